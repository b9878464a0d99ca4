"""Sources of generated pages: files of `conf/` with their comments, docstrings, tables."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from docs.generator.choices import Setting, read_choice
from docs.generator.figures import read_points
from docs.generator.measured import read_tables
from docs.generator.pages import describe
from tests.support.places import ROOT


def test_a_file_is_read_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "# @package _global_\n# What it is,\n# in two lines.\ndefaults: [other, _self_]\n_target_: a.b.C\n"
        "plain: '#1'\nnoted: 0.5      # of all,\n                # or none\n"
        "outer:\n  _target_: a.b.D\n  inner: [1, 2]   # a pair\n"
    )
    choice = read_choice(path)
    assert choice.comment == ("What it is,", "in two lines.")
    noted = Setting("noted", "0.5", "of all, or none")
    assert choice.settings == (
        Setting("plain", "'#1'", ""),
        noted,
        Setting("outer.inner", "[1, 2]", "a pair"),
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf" / "method").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_values_are_those_that_yaml_reads(path: Path) -> None:
    values, files = {}, [path]
    for file in files:
        own = yaml.safe_load(file.read_text())
        bases = [base for base in own.pop("defaults", ()) if isinstance(base, str) and base.count("/") == 1]
        files += [ROOT / "conf" / base.replace("@_here_", ".yaml").strip("/") for base in bases]
        values |= {key: value for key, value in own.items() if key[0] != "_"}
    assert {key: yaml.safe_load(value) for key, value in read_choice(path).values.items()} == values


def test_docstrings_include_settings_of_bases() -> None:
    @dataclass
    class Base:
        """A base.

        Attributes:
            first: said there,
                in two lines.
        """

        first: int = 0

    @dataclass
    class Own(Base):
        """Do it.

        Differs from the paper in:
        nothing.

        Attributes:
            second: said here.
        """

        second: int = 0

    described = describe(Own)
    assert described.paragraphs == ("Do it.", "Differs from the paper in: nothing.")
    assert described.settings == {"first": "said there, in two lines.", "second": "said here."}


@pytest.mark.parametrize("mark", ["takes: time", "at: 1a2b3c4d"])
def test_a_table_has_the_commands_above_it(tmp_path: Path, mark: str) -> None:
    commands = f"<!-- {mark} -->\n```bash\nrun\n```"
    made = "<!-- made by `make docs` from data/tiny/one.csv -->"
    text = f"# Results\n\n## One\n\n{commands}\n\nSmall:\n\n{made}\n\n| method | old |\n\n<!-- end -->\n"
    (tmp_path / "docs/results/data/tiny").mkdir(parents=True)
    (tmp_path / "docs/results/data/tiny/one.csv").write_text('method,a\n"x, y",1\nz,2\n')
    (tmp_path / "docs/results/tiny.md").write_text(text)
    [table] = read_tables(tmp_path)
    assert (table.page, table.section, table.caption) == ("tiny.md", "One", "Small:")
    assert table.header == ("method", "a")
    assert table.commands == commands
    assert table.pick_rows("x").rows == (("x, y", "1"),)


def test_points_of_a_figure_are_cells_of_its_table() -> None:
    rows = [
        ("method", "peak %", "psnr ↑"),
        ("random", "20.00", "**35.28 [35.01, 35.55]**"),
        ("hack", "4.00", "29.77 [29.41, 30.10]"),
        ("random", "4.00", "-0.50 [-0.75, -0.25]"),
    ]
    drawn = {name: points for name, points in read_points(rows, "psnr ↑").items() if points}
    assert drawn == {"random": [(0.04, -0.5, -0.75, -0.25), (0.2, 35.28, 35.01, 35.55)]}
