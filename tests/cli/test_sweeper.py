"""Jobs of a sweep: the product of its lists, and methods of reference that lack their settings."""

from typing import cast

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

from kvbench.cli.config.command import name_base
from kvbench.cli.sweeps.extend import extend_sweeper
from kvbench.cli.sweeps.sweeper import split_product


def jobs(*words: str) -> list[set[str]]:
    return [set(job) for job in split_product(OverridesParser.create().parse_overrides(list(words)))]


def test_jobs_are_the_product_of_the_lists() -> None:
    assert jobs("method=a,b", "budget=1") == [{"method=a", "budget=1"}, {"method=b", "budget=1"}]


def test_methods_of_reference_lack_the_settings_of_others_and_share_the_rest() -> None:
    found = jobs(
        "method=a",
        "method.p=1,2",
        "calibrate.count=3",
        "budget=5,6",
        "beside.method=b,c",
        "sweeps=s",
        "seed=7",
    )
    own = [
        {"method=a", f"method.p={p}", "calibrate.count=3", f"budget={b}", "sweeps=s", "seed=7"}
        for p in (1, 2)
        for b in (5, 6)
    ]
    assert found[:4] == own
    assert found[4:] == [
        {f"method={m}", f"budget={b}", "sweeps=s", "seed=7"} for b in (5, 6) for m in ("b", "c")
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("method.base=h2o", "method@method.base=h2o"),
        ("method.base.base=rkv", "method@method.base.base=rkv"),
        ("method.base.sinks=2", "method.base.sinks=2"),
        ("method=lookm", "method=lookm"),
    ],
)
def test_the_method_inside_another_is_chosen_by_name(word: str, expected: str) -> None:
    assert name_base(word) == expected
    assert jobs("method=a", word)[0] >= {expected}


def test_methods_of_reference_may_have_lists_of_their_own() -> None:
    assert jobs("method=a", "beside.method=b", "beside.budget=1,2", "budget=3") == [
        {"method=a", "budget=3"},
        {"method=b", "budget=1"},
        {"method=b", "budget=2"},
    ]


@pytest.mark.parametrize("words", [("method=a,b", "beside.method=b"), ("method=b,a", "beside.method=a,b")])
def test_no_job_is_there_twice(words: tuple[str, str]) -> None:
    assert sorted(map(sorted, jobs(*words))) == [["method=a"], ["method=b"]]


@pytest.mark.parametrize(("max_batch_size", "sizes"), [(None, [4]), (3, [3, 1])])
def test_hydras_sweeper_makes_these_jobs(max_batch_size: int | None, sizes: list[int]) -> None:
    extend_sweeper()
    name = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    words = OverridesParser.create().parse_overrides(["method=a", "method.p=1,2", "beside.method=b,c"])
    sweeper = cast(type[BasicSweeper], Plugins.instance().class_name_to_class[name])
    batches = sweeper.split_arguments(words, max_batch_size)
    assert [len(batch) for batch in batches] == sizes
    assert [job for batch in batches for job in batch] == split_product(words)
