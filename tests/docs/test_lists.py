"""Lists of choices in the pages: equal to what `conf/` gives; examples equal to their files."""

import re
from pathlib import Path

import pytest

from kvbench.cli.tasks.table import TASKS
from tests.support.marks import slow_but_every
from tests.support.pages import read_blocks
from tests.support.places import ROOT

GROUPS = {"method": "methods", "model": "models", "prompts": "prompts", "eval": "metrics", "sweeps": "tables"}
GROUPS |= {"sampling": "reproduction"}


@pytest.mark.parametrize(("group", "page"), slow_but_every(3, GROUPS.items()))
def test_a_page_lists_every_choice_and_no_other(group: str, page: str) -> None:
    from generator.lists import update_page

    text = (ROOT / "docs" / f"{page}.md").read_text()
    listed = re.findall(rf"^\| \[`(\w+)`\]\(\.\./conf/{group}/\1\.yaml\) \|", text, re.MULTILINE)
    assert listed == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    assert update_page(ROOT, f"docs/{page}.md", text) == text, f"docs/{page}.md: make docs"


def test_the_help_and_the_page_list_every_task() -> None:
    from generator.lists import update_page

    text = (ROOT / "docs" / "runs.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted({*TASKS, "work", "status"})
    assert update_page(ROOT, "docs/runs.md", text) == text, "docs/runs.md: make docs"


def test_the_page_of_published_scores_has_the_tables_as_the_file_has_them() -> None:
    from generator.lists import update_page

    text = (ROOT / "docs" / "reproduction.md").read_text()
    page = "docs/reproduction.md"
    assert update_page(ROOT, page, text) == text, f"{page}: make docs"
    ours = "| `var_d16` | ours | - | - | - | - |"
    assert text.count(ours) == 1
    measured = text.replace(ours, "| `var_d16` | ours | 3.5 | 280.1 | - | - |")
    assert update_page(ROOT, page, measured) == measured


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_of_results_has_the_tables_as_their_files_have_them(page: Path) -> None:
    from generator.lists import MADE, update_page

    text = page.read_text()
    assert update_page(ROOT, f"docs/results/{page.name}", text) == text, f"{page.name}: make docs"
    assert not re.search(r"^\|", MADE.sub("", text), re.MULTILINE), "a table without a file"
    shown = [page.parent / made["source"] for made in MADE.finditer(text)]
    assert sorted(shown) == sorted((page.parent / "data" / page.stem).glob("*.csv"))


def test_a_table_is_what_its_file_says(tmp_path: Path) -> None:
    from generator.lists import update_page

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


def test_a_list_is_replaced_and_papers_stay(tmp_path: Path) -> None:
    from generator.lists import update_page

    for folder in ("docs", "conf/method"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf" / "method" / "full.yaml").write_text("# Everything.\n_target_: a.B\n")
    row = "| [`full`](../conf/method/full.yaml) | old | cache |  | scales | Paper, arXiv:0000.00000 |"
    gone = row.replace("full", "gone")
    mark = "<!-- made by `make docs` from conf -->"
    text = f"before\n\n{mark}\n\n{gone}\n{row}\n\n<!-- end -->\n\nafter\n"
    text = update_page(tmp_path, "docs/methods.md", text)
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| Everything. |" in text
    assert "| Paper, arXiv:0000.00000 |" in text
    assert "gone" not in text


def test_the_interface_lists_the_modules_that_it_documents() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"automodule:: ([\w.]+)", text)
    assert documented
    assert re.findall(r"^\| \[`([\w.]+)`\]", text, re.MULTILINE) == documented


def test_the_example_of_a_metric_is_the_plugin_s() -> None:
    blocks = read_blocks((ROOT / "docs" / "extending.md").read_text())
    [shown] = [block.text for block in blocks if block.what == "eval/paired/mae.py"]
    assert shown == (ROOT / "docs" / "examples" / "plugin" / "kvbench_example" / "mae.py").read_text()
