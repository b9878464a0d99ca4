"""The brakes: fast tests over two seconds, rooms over their share, generators that tests would share."""

import re
from pathlib import Path

import pytest

from tests.support import brake

EXCUSED = brake.EXCUSED
SHARED = re.compile(
    r"(?m)^\w.* = [\w.]*(?:default_rng|Generator|RandomState|Random)\([^()]*\)(\.manual_seed.*)?$"
)
"""A generator that a module holds: what a test draws from it would depend on the tests before it."""


@pytest.fixture(autouse=True)
def _shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brake, "SHARES", {"runs": 0.5, "core": 0.6})
    monkeypatch.setattr(brake, "EXCUSED", {"tests/runs/test_job.py::test_whole": "the one whole job"})


@pytest.mark.parametrize(
    ("times", "faults"),
    [
        ({"tests/core/test_a.py::test_b[1]": 2.0}, []),
        (
            {"tests/core/test_a.py::test_b[1]": 2.04},
            ["  2.0 s of at most 2  tests/core/test_a.py::test_b[1]"],
        ),
        ({"tests/runs/test_job.py::test_whole[x]": 9.0}, []),
        ({"tests/runs/a.py::b": 1.0, "tests/runs/a.py::c": 0.2, "tests/core/a.py::b": 1.2}, []),
        (
            {"tests/runs/a.py::b": 1.5, "tests/core/a.py::b": 1.0},
            ["60.0% of at most 50% of all seconds  tests/runs"],
        ),
    ],
)
def test_what_is_over_its_limit_is_named(times: dict[str, float], faults: list[str]) -> None:
    assert brake.find_faults(times) == faults


def test_at_most_ten_tests_are_excused_each_with_its_reason() -> None:
    assert len(EXCUSED) <= 10
    assert all(EXCUSED.values())


def test_no_module_holds_a_generator_of_random_numbers(root: Path) -> None:
    for line in ("np.random.default_rng(0)", "torch.Generator().manual_seed(SEED)", "Random(1)"):
        assert SHARED.search(f"import x\nRNG = {line}\n")
        assert not SHARED.search(f"    rng = {line}\nVALUES = torch.randn(2, generator={line})\n")
    tests = (root / "tests").rglob("*.py")
    assert [path for path in tests if SHARED.search(path.read_text())] == [], "use the fixture `rng`"
