"""The base dependencies alone: what runs without any extra, and what is said in place of the rest."""

import json
import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.command_line import run_python
from tests.support.places import ROOT

pytestmark = pytest.mark.slow
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set({hidden!r})
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path = [Finder if one is PathFinder else one for one in sys.meta_path]
from kvbench.cli.app import main
for words in {commands!r}:
    sys.argv = ["run.py", *words]
    try:
        status = main() or 0
    except SystemExit as leaving:
        status = leaving.code or 0
        if isinstance(status, str):
            status = print(status, file=sys.stderr) or 1
    print(status, end="\\x1e", flush=True)
    print(end="\\x1e", file=sys.stderr, flush=True)
"""
"""Program that runs commands as if packages were not installed; each ends with its exit status and a separator."""
JOB = ("method=heatkv", "budget=0.1", "prompts.count=1", "calibrate.count=1", "runs_dir=runs")
COMMANDS = (
    (*JOB, "eval=[psnr,ssim,fid_scenes,lpips]"),
    ("task=report", "runs_dir=runs"),
    ("require=[lpips]", "eval=[lpips]", "runs_dir=none"),
)


@cache
def list_hidden() -> list[str]:
    """Installed packages that the base dependencies do not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed, waiting = {"kvbench"}, list(project["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in allowed or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        allowed.add(name)
        try:
            waiting += requires(name) or ()
        except PackageNotFoundError:  # of another platform
            continue
    installed = {
        top: {canonicalize_name(one) for one in names} for top, names in packages_distributions().items()
    }
    return sorted(top for top, names in installed.items() if not names & allowed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slim")


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[tuple[str, str]]:
    """Standard output, with the exit status at its end, and error of each command, run in one process."""
    done = run_python(folder, "-c", HIDE.format(hidden=list_hidden(), commands=COMMANDS))
    assert done.returncode == 0, done.stderr
    return list(zip(done.stdout.split("\x1e"), done.stderr.split("\x1e"), strict=True))[:-1]


def test_a_run_and_its_report_need_no_extra(ended: list[tuple[str, str]], folder: Path) -> None:
    assert {"matplotlib", "torchmetrics", "lpips", "cleanfid", "torchvision", "transformers"} <= {
        *list_hidden()
    }
    out, err = ended[0]
    assert out.endswith("0"), err
    said = [line for line in (out + err).splitlines() if "packages are missing" in line]
    assert len(said) == 1
    assert said[0].endswith(
        'eval=lpips: skipped, packages are missing; get them with: pip install "kvbench[eval]"'
    )
    [run] = folder.glob("runs/infinity_tiny/heatkv-*")
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    assert all(metrics[name]["value"] > 0 for name in ("psnr", "ssim", "ssim_tm"))
    assert (run / "contact_sheet.png").is_file()
    out, err = ended[1]
    assert out.endswith("0"), err
    assert out.count('left out: figures: matplotlib is not installed; pip install "kvbench[plots]"') == 1
    assert (folder / "runs" / "report.md").is_file()


def test_what_is_missing_is_said_in_one_line_before_any_work(
    ended: list[tuple[str, str]], folder: Path
) -> None:
    out, err = ended[2]
    assert out.endswith("1")
    assert re.fullmatch('error: require=lpips: package missing: lpips\\. .*"kvbench\\[eval\\]".*\n', err)
    assert not list(folder.glob("none/*/*/images"))
