"""A sweep under the newest Hydra of the registry, release candidates included."""

import re
from pathlib import Path

import pytest

from tests.support.command_line import RUN, run_python

INSTALL = "-m pip install --quiet --disable-pip-version-check --pre --target hydra hydra-core"
WORDS = "-m method=random_tokens,heatkv budget=0.1 prompts.count=1 calibrate.count=1 eval=none"


@pytest.mark.nightly
def test_a_sweep_runs(root: Path, tmp_path: Path) -> None:
    """One of its methods is that of a plugin, whose classes are of another package."""
    installed = run_python(tmp_path, *INSTALL.split())
    if installed.returncode:
        pytest.skip(f"the newest hydra-core cannot be installed here: {installed.stderr[-200:]}")
    example = root / "docs" / "examples" / "plugin"
    path = f"hydra.searchpath=[file://{example / 'kvbench_example' / 'conf'}]"
    done = run_python(tmp_path, RUN, *WORDS.split(), path, PYTHONPATH=f"{tmp_path / 'hydra'}:{example}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not re.search("will (become an error|be removed) in Hydra", done.stdout + done.stderr)
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*/*/results.json"))
    assert [name.split("-")[0] for name in runs] == ["full", "heatkv", "random_tokens"]
