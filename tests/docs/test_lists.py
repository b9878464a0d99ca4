"""Lists of choices in the pages: equal to what `conf/` gives; examples equal to their files."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.marks import slow_but_every
from tests.support.pages import read_blocks
from tests.support.places import ROOT

GROUPS = {"method": "methods", "model": "models", "prompts": "prompts", "eval": "metrics", "sweeps": "tables"}
GROUPS |= {"sampling": "reproduction"}


@pytest.fixture(autouse=True)
def _generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the generator importable, as `docs/conf.py` does."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "generator"]:
        del sys.modules[name]


@pytest.mark.parametrize(("group", "page"), slow_but_every(3, GROUPS.items()))
def test_a_page_lists_every_choice_and_no_other(group: str, page: str) -> None:
    from generator.lists import update_page

    text = (ROOT / "docs" / f"{page}.md").read_text()
    listed = re.findall(rf"^\| \[`(\w+)`\]\(\.\./conf/{group}/\1\.yaml\) \|", text, re.MULTILINE)
    assert listed == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    assert update_page(ROOT, group) == text, f"docs/{page}.md: make docs"


def test_the_page_of_published_scores_has_the_tables_as_the_file_has_them() -> None:
    from generator.baselines import update_tables

    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert update_tables(text) == text, "docs/reproduction.md: make docs"
    ours = "| `var_d16` | ours | - | - | - | - |"
    assert text.count(ours) == 1
    measured = text.replace(ours, "| `var_d16` | ours | 3.5 | 280.1 | - | - |")
    assert update_tables(measured) == measured


def test_the_readme_lists_every_method() -> None:
    from generator.lists import update_readme

    text = (ROOT / "README.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(conf/method/\1\.yaml\) \|", text, re.MULTILINE)
    assert listed == sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    assert update_readme(ROOT) == text, "README.md: make docs"


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
    page = tmp_path / "docs" / "methods.md"
    page.write_text(
        f"before\n\n<!-- made by `make docs` from conf -->\n\n{gone}\n{row}\n\n<!-- end -->\n\nafter\n"
    )
    text = update_page(tmp_path, "method")
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
