"""Release: least permissions of workflows, and notes from the changelog's section."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import kvbench
from tests.support.places import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## \[(\d.*?)\] - \d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert kvbench.__version__ == citation["version"] == version == released
    bibtex = re.findall(r"^  (\w+) += \{+(.+?)\}+,$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    fields = {key: citation[key] for key in ("title", "version", "license")}
    assert dict(bibtex) == {**fields, "author": citation["authors"][0]["name"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
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
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    [script] = [step["run"] for step in steps if step.get("name") == "What is new"]
    changes = "# Changelog\n\n## [2.0.0] - x\n\nNew.\n\n## [1.0.0] - y\n\nOld.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    environment = {"GITHUB_REF_NAME": "v2.0.0", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "notes.md").read_text() == "## [2.0.0] - x\n\nNew.\n\n"
