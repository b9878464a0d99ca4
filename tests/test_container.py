"""Recipes of images: they install as the Makefile does, and the demo runs from what they copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

IMAGE = "python:3.11-slim"


def read_lines(path: Path) -> list[str]:
    """The lines of a recipe, continued ones joined, without comments and indents."""
    text = path.read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and line[0] != "#"]


def read_instructions(name: str) -> list[str]:
    """What follows an instruction of the Dockerfile, wherever it stands."""
    return [line.partition(" ")[2] for line in read_lines(ROOT / "Dockerfile") if line.split()[0] == name]


def read_section(name: str) -> list[str]:
    """The lines of a section of the recipe for Apptainer."""
    lines = read_lines(ROOT / "apptainer.def")
    start = lines.index(f"%{name}") + 1
    ends = [number for number, line in enumerate(lines) if number >= start and line.startswith("%")]
    return lines[start : min(ends, default=len(lines))]


def read_commands(lines: list[str]) -> list[str]:
    return [command.strip() for line in lines for command in line.split("&&")]


def list_included() -> list[str]:
    """Files and folders that `.dockerignore` lets in."""
    first, *others = read_lines(ROOT / ".dockerignore")
    assert (first, others[-1]) == ("*", "**/__pycache__")
    assert all(line.startswith("!") for line in others[:-1])
    return [line[1:] for line in others[:-1]]


def list_makefile_s_installation() -> list[str]:
    """The commands of the Makefile that install, its variables replaced."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) \??:?= (.*)$", text, re.MULTILINE))
    [recipe] = re.findall(r"^\$\(VENV\)/stamp:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    while (found := re.search(r"\$\((\w+)\)", recipe)) is not None:
        recipe = recipe.replace(found[0], variables[found[1]])
    return [line.strip() for line in recipe.splitlines() if not line.startswith("\t@")]


def copy_context(folder: Path) -> None:
    """Copy what an image gets."""
    assert [line.split()[1:] for line in read_instructions("COPY")] == [
        ["requirements.lock", "./"],
        [".", "."],
    ]
    for name in list_included():
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)


def test_both_recipes_install_as_the_makefile_does() -> None:
    expected = list_makefile_s_installation()
    assert len(expected) == 4
    assert expected[2].count("--require-hashes -r requirements.lock") == 2
    for lines in (read_instructions("RUN"), read_section("post")):
        found = [
            command for command in read_commands(lines) if " -m pip " in command or " -m venv " in command
        ]
        assert found == expected


def test_both_recipes_begin_with_one_image_and_end_with_the_demo() -> None:
    text = (ROOT / "apptainer.def").read_text()
    assert read_instructions("FROM") == [IMAGE]
    assert f"Bootstrap: docker\nFrom: {IMAGE}\n" in text
    apt = [command for command in read_commands(read_instructions("RUN")) if command.startswith("apt-get")]
    assert [
        command for command in read_commands(read_section("post")) if command.startswith("apt-get")
    ] == apt
    demo = re.search(r"^demo: .*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert demo is not None
    for lines in (read_instructions("RUN"), read_section("post")):
        assert f"{demo[1]} && rm -rf runs" in lines[-1]
    assert "://" not in text + (ROOT / "Dockerfile").read_text()


def test_nobody_is_root_when_files_are_copied() -> None:
    names = [line.split()[0] for line in read_lines(ROOT / "Dockerfile")]
    assert names.index("USER") < names.index("COPY")
    assert read_instructions("USER") == ["kvbench"]
    assert all(line.startswith("--chown=kvbench:kvbench ") for line in read_instructions("COPY"))


def test_what_is_copied_is_there_and_the_same_for_both() -> None:
    included = list_included()
    assert sorted(included, key=str.lower) == included
    assert all((ROOT / name).exists() for name in included)
    assert read_section("files") == [f"{name} /kvbench/{name}" for name in included]


@pytest.mark.slow
def test_the_demo_runs_from_what_is_copied(tmp_path: Path) -> None:
    copy_context(tmp_path)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KVBENCH_COMMIT")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    demo = read_instructions("RUN")[-1].partition(" && ")[0]
    shorter = f"{demo} prompts.count=4 calibrate.count=2"
    environment = {**kept, "PATH": path, "KVBENCH_COMMIT": "c0ffee"}
    subprocess.run(["sh", "-c", shorter], cwd=tmp_path, env=environment, check=True)
    [results] = tmp_path.glob("runs/infinity_tiny/heatkv-*/results.json")
    assert '"commit": "c0ffee"' in results.read_text()
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=tmp_path, capture_output=True, check=True)
    assert list(out.glob("kvbench-*.whl"))
