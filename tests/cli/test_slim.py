"""The base dependencies alone: what runs without any extra, and what is said in place of the rest."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set({hidden!r})
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path = [Finder if one is PathFinder else one for one in sys.meta_path]
sys.argv = ["run.py", *{words!r}]
from kvbench.cli.app import main
sys.exit(main())
"""
"""Program that runs the command line as if packages were not installed."""


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


def run_slim(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output and error of a command without any extra."""
    program = HIDE.format(hidden=list_hidden(), words=words)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_run_and_its_report_need_no_extra(tmp_path: Path) -> None:
    assert {"matplotlib", "torchmetrics", "lpips", "cleanfid", "torchvision", "transformers"} <= {
        *list_hidden()
    }
    job = ("method=heatkv", "budget=0.1", "prompts.count=1", "calibrate.count=1", f"runs_dir={tmp_path}")
    status, out, err = run_slim(*job, "eval=[psnr,ssim,fid_scenes,lpips]")
    assert status == 0, err
    said = [line for line in (out + err).splitlines() if "packages are missing" in line]
    assert len(said) == 1
    assert said[0].endswith(
        'eval=lpips: skipped, packages are missing; get them with: pip install "kvbench[eval]"'
    )
    [folder] = tmp_path.glob("infinity_tiny/heatkv-*")
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    assert all(metrics[name]["value"] > 0 for name in ("psnr", "ssim", "ssim_tm"))
    assert (folder / "contact_sheet.png").is_file()
    status, out, err = run_slim("task=report", f"runs_dir={tmp_path}")
    assert status == 0, err
    assert out.count('left out: figures: matplotlib is not installed; pip install "kvbench[plots]"') == 1
    assert (tmp_path / "report.md").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("require=[lpips]", "eval=[lpips]"),
            r'require=lpips: package missing: lpips\. .*"kvbench\[eval\]".*',
        ),
        (("logger=trackio",), r'logger=trackio: not installed; pip install "kvbench\[trackio\]"'),
    ],
)
def test_what_is_missing_is_said_in_one_line_before_any_work(
    words: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    status, _, err = run_slim(*words, f"runs_dir={tmp_path}")
    assert status == 1
    assert re.fullmatch(f"error: {line}\n", err)
    assert not list(tmp_path.glob("*/*/images"))
