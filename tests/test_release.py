"""What a tag sets off: its workflow asks for little, and its notes are the changelog's section."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvbench
from tests.support.places import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    """A workflow; YAML takes its key `on` for a truth."""
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert kvbench.__version__ == citation["version"] == version == released[0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    granted = {
        (name, scope)
        for name, job in workflow["jobs"].items()
        for scope, access in job.get("permissions", {}).items()
        if access == "write"
    }
    assert granted <= {("publish", "id-token"), ("announce", "contents")}
    assert "secrets." not in path.read_text()


def test_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    steps = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["build"]["steps"]
    [script] = [step["run"] for step in steps if step.get("name") == "What is new"]
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [2.0.0] - x\n\nNew.\n\n## [1.0.0] - y\n\nOld.\n"
    )
    subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={"GITHUB_REF_NAME": "v2.0.0", "PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert (tmp_path / "notes.md").read_text() == "## [2.0.0] - x\n\nNew.\n\n"
