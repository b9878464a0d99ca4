"""Lists and tables in the pages: made of their sources, and missed by `--check` where they are not."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from docs.generator.__main__ import find_faults
from docs.generator.choices import read_choice
from docs.generator.figures import read_points
from docs.generator.lists import MADE
from kvbench.cli.tasks.table import TASKS
from tests.support.places import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.mark.slow
def test_generated_files_that_are_not_current_are_named_with_the_command(tmp_path: Path) -> None:
    for name in ("docs", "conf", "kvbench", "kernels", "eval"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "*.pyc"))
    broken = {
        "docs/methods.md": ("](../conf/method/h2o.yaml)", "make docs"),
        "docs/reproduction.md": ("| `var_d16` | ", "make docs"),
        "docs/results/infinity_tiny.md": ("| random | ", "make docs"),
        "docs/extending.md": ('"""Mean absolute', "make docs"),
        "docs/images/fidelity-dark.svg": ("SHA-256 ", "make docs"),
        "docs/images/rooms.svg": ("<polyline", "make rooms"),
        "kvbench/assets/pins.json": ("kvbench.methods.h2o", "raise `revision`"),
    }
    for name, (text, _) in broken.items():
        content = (tmp_path / name).read_text()
        assert text in content, name
        (tmp_path / name).write_text(content.replace(text, f"{text}x", 1))
    faults = dict(fault.split(": ") for fault in find_faults(tmp_path))
    assert faults.keys() == broken.keys()
    assert all(remedy.startswith(broken[name][1]) for name, remedy in faults.items())


def test_the_help_lists_every_task() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({*TASKS, "work", "status"})


def test_pages_of_results_have_a_file_for_each_table_and_a_table_for_each_file() -> None:
    texts = {page: page.read_text() for page in RESULTS.glob("*.md")}
    assert [page for page, text in texts.items() if re.search(r"^\|", MADE.sub("", text), re.MULTILINE)] == []
    for page, text in texts.items():
        shown = [RESULTS / made["source"] for made in MADE.finditer(text)]
        assert sorted(shown) == sorted((RESULTS / "data" / page.stem).glob("*.csv"))


def test_every_method_names_its_paper() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\].*\|\s*\|$", text, re.MULTILINE) == []


def test_the_interface_lists_the_modules_that_it_documents() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"automodule:: ([\w.]+)", text)
    assert documented
    assert re.findall(r"^\| \[`([\w.]+)`\]", text, re.MULTILINE) == documented


def test_values_are_those_that_yaml_reads() -> None:
    for path in (ROOT / "conf" / "method").rglob("*.yaml"):
        values, files = {}, [path]
        for file in files:
            own = yaml.safe_load(file.read_text())
            bases = [one for one in own.pop("defaults", ()) if isinstance(one, str) and one.count("/") == 1]
            files += [ROOT / "conf" / base.replace("@_here_", ".yaml").strip("/") for base in bases]
            values |= {key: value for key, value in own.items() if key[0] != "_"}
        assert {key: yaml.safe_load(value) for key, value in read_choice(path).values.items()} == values, path


def test_points_of_a_figure_are_cells_of_its_table() -> None:
    rows = [
        ("method", "peak %", "psnr ↑"),
        ("random", "20.00", "**35.28 [35.01, 35.55]**"),
        ("hack", "4.00", "29.77 [29.41, 30.10]"),
        ("random", "4.00", "-0.50 [-0.75, -0.25]"),
    ]
    drawn = {name: points for name, points in read_points(rows, "psnr ↑").items() if points}
    assert drawn == {"random": [(0.04, -0.5, -0.75, -0.25), (0.2, 35.28, 35.01, 35.55)]}
