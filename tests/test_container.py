"""Recipes of images: they install as the Makefile does, and the demo runs from what they copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT


def read_lines(name: str) -> list[str]:
    """Return the lines of a recipe, continued ones joined, without comments and indents."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and line[0] != "#"]


def read_instructions(name: str) -> list[str]:
    """Return the arguments of each instruction of this name in the Dockerfile."""
    return [line.partition(" ")[2] for line in read_lines("Dockerfile") if line.split()[0] == name]


def read_section(name: str) -> list[str]:
    """Return the lines of a section of the recipe for Apptainer."""
    sections = re.split(r"^%(\w+)\n", "\n".join(read_lines("apptainer.def")), flags=re.MULTILINE)
    return sections[sections.index(name) + 1].splitlines()


def list_included() -> list[str]:
    """Return the files and folders that `.dockerignore` lets in."""
    return [line[1:] for line in read_lines(".dockerignore") if line.startswith("!")]


def list_installing_commands() -> list[str]:
    """Return the commands of the Makefile that install, with values in place of its variables."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) \??:?= (.*)$", text, re.MULTILINE))
    [recipe] = re.findall(r"^\$\(VENV\)/stamp:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    while (name := re.search(r"\$\((\w+)\)", recipe)) is not None:
        recipe = recipe.replace(name[0], variables[name[1]])
    return [line.strip() for line in recipe.splitlines() if not line.startswith("\t@")]


def test_both_recipes_install_as_the_makefile_does() -> None:
    expected = list_installing_commands()
    assert len(expected) == 4
    assert expected[2].count("--require-hashes -r requirements.lock") == 2
    for lines in (read_instructions("RUN"), read_section("post")):
        commands = [command.strip() for line in lines for command in line.split("&&")]
        assert [c for c in commands if " -m pip " in c or " -m venv " in c] == expected
    assert [f"From: {image}" for image in read_instructions("FROM")] == read_lines("apptainer.def")[1:2]
    assert read_instructions("RUN")[0] == read_section("post")[0]
    assert read_section("post")[-1].endswith(read_instructions("RUN")[-1].removesuffix(" && mkdir runs"))


def test_both_recipes_copy_the_same_files_for_the_user_who_runs_them() -> None:
    names = [line.split()[0] for line in read_lines("Dockerfile")]
    assert names.index("USER") < names.index("COPY")
    assert all(line.startswith("--chown=kvbench:kvbench ") for line in read_instructions("COPY"))
    assert all((ROOT / name).exists() for name in list_included())
    assert read_section("files") == [f"{name} /kvbench/{name}" for name in list_included()]


@pytest.mark.nightly
def test_the_demo_runs_from_what_is_copied(tmp_path: Path) -> None:
    for name in list_included():
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "KVBENCH_COMMIT": "c0ffee"}
    demo = read_instructions("RUN")[-1].partition(" && ")[0]
    shorter = f"{demo} prompts.count=4 calibrate.count=2"
    subprocess.run(["sh", "-c", shorter], cwd=tmp_path, env=environment, check=True)
    [results] = tmp_path.glob("runs/infinity_tiny/heatkv-*/results.json")
    assert '"commit": "c0ffee"' in results.read_text()
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True)
