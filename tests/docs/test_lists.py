"""Lists and tables in the pages: made of their sources, and missed by `--check` where they are not."""

import re
import shutil
from pathlib import Path

import pytest

from docs.generator.__main__ import find_faults
from docs.generator.baselines import make_table
from docs.generator.lists import MADE, update_page
from kvbench.cli.tasks.table import TASKS
from kvbench.report.papers.published import PublishedRow, PublishedTable
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


def test_published_scores_have_a_row_for_each_source_and_ours_stay() -> None:
    def draw(prompts: str, **cells: str | None) -> PublishedRow:
        return PublishedRow({"prompts._target_": (f"kvbench.prompts.{prompts}",)}, cells)

    models = {
        "var (a)": (draw("Coco", fid="3.50", psnr=None), draw("Dpg", dpg="71")),
        "emu (b)": (draw("Dpg", dpg="80.1"),),
        "var (b)": (draw("Coco", fid="3.4"),),
    }
    table = PublishedTable("t", "", "", "", (), (), models, sources={"a": "A", "b": "B, 2 runs"})
    written = "| `var` | ours | 3.6 | - |"
    assert make_table(table, f"| model | full cache, by |\n{written}").splitlines() == [
        "| model | full cache, by | Coco: `fid` | Dpg: `dpg` |",
        "| --- | --- | --- | --- |",
        "| `var` | a: A | 3.50 | 71 |",
        "| `var` | b: B, 2 runs | 3.4 | - |",
        written,
        "| `emu` | b: B, 2 runs | - | 80.1 |",
        "| `emu` | ours | - | - |",
    ]


def test_pages_of_results_have_a_file_for_each_table_and_a_table_for_each_file() -> None:
    texts = {page: page.read_text() for page in RESULTS.glob("*.md")}
    assert [page for page, text in texts.items() if re.search(r"^\|", MADE.sub("", text), re.MULTILINE)] == []
    for page, text in texts.items():
        shown = [RESULTS / made["source"] for made in MADE.finditer(text)]
        assert sorted(shown) == sorted((RESULTS / "data" / page.stem).glob("*.csv"))


def test_a_table_is_what_its_file_says(tmp_path: Path) -> None:
    file, page = tmp_path / "docs/results/data/one.csv", "docs/results/page.md"
    file.parent.mkdir(parents=True)
    file.write_text('method,a\n"x, y",**1 [0| 2]**\n')
    mark = "<!-- made by `make docs` from data/one.csv -->"
    text = f"a\n\n{mark}\n\n| old |\n\n<!-- end -->\n\nb\n"
    table = "| method | a |\n| --- | --- |\n| x, y | **1 [0\\| 2]** |"
    assert update_page(tmp_path, page, text) == f"a\n\n{mark}\n\n{table}\n\n<!-- end -->\n\nb\n"
    file.write_text("method,a\nx\n")
    with pytest.raises(ValueError, match=r"one\.csv"):
        update_page(tmp_path, page, text)


def test_every_method_names_its_paper() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\].*\|\s*\|$", text, re.MULTILINE) == []


def test_a_list_is_replaced_and_names_papers(tmp_path: Path) -> None:
    for folder in ("docs", "conf/method"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf" / "method" / "full.yaml").write_text(
        "# Everything. [Paper, arXiv:0000.00000]\n_target_: a.B\n"
    )
    row = "| [`full`](../conf/method/full.yaml) | old | cache |  | scales | old |"
    gone = row.replace("full", "gone")
    mark = "<!-- made by `make docs` from conf -->"
    text = f"before\n\n{mark}\n\n{gone}\n{row}\n\n<!-- end -->\n\nafter\n"
    text = update_page(tmp_path, "docs/methods.md", text)
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| Everything. |" in text
    assert "| Paper, arXiv:0000.00000 |" in text
    assert "gone" not in text
    assert "old" not in text


def test_the_interface_lists_the_modules_that_it_documents() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"automodule:: ([\w.]+)", text)
    assert documented
    assert re.findall(r"^\| \[`([\w.]+)`\]", text, re.MULTILINE) == documented
