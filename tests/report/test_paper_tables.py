"""Tables for papers: methods by budgets, bold where a paired difference is significant, never wider than a page."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.core.config import ConfigError
from kvbench.core.settings import ReportSettings
from kvbench.eval.protocol.scores import Metric
from kvbench.report.latex import escape, format_latex, format_paper_table, join_latex, write_cell
from kvbench.report.paper_tables import (
    CellKey,
    PaperTable,
    check_metrics,
    find_significant,
    make_paper_tables,
)
from kvbench.report.seeds import MeanMetric, combine_seeds
from kvbench.report.tables import choose_style, split_columns
from kvbench.runs.record.results import Results
from tests.report.test_seeds import make_run
from tests.support.texts import check_text

BASE = np.array([20.0, 30.0, 25.0, 35.0, 22.0, 28.0])


@pytest.fixture
def runs(tmp_path: Path) -> list[Results]:
    """Three methods at two budgets and two seeds; only at the larger one is the best better on every prompt."""
    noise = np.array([0.1, -0.1, 0.2, -0.2, 0.1, -0.1])
    made = [make_run(tmp_path, BASE, seed, "full", 1.0) for seed in (0, 1)]
    for method, shift in (("heatkv", 3.0), ("snapkv", 2.0), ("random", 0.0)):
        for budget, spread in ((0.04, 60.0), (0.1, 1.0)):
            for seed in (0, 1):
                values = BASE + seed + shift + spread * shift * np.roll(noise, 2 * seed)
                made.append(make_run(tmp_path, values, seed, method, budget))
    return made


def test_best_values_compete_at_one_seed_and_budget(runs: list[Results], tmp_path: Path) -> None:
    best = find_significant(runs, tmp_path, ["psnr"])
    assert best == {(f"heatkv-0.1-{seed}-None", "psnr") for seed in (0, 1)}
    only = [run for run in runs if run.method in ("full", "heatkv")]
    assert find_significant(only, tmp_path, ["psnr"]) == set()
    shutil.rmtree(tmp_path / "m")
    assert find_significant(runs, tmp_path, ["psnr"]) == set()


def test_tables_of_every_layout(runs: list[Results], tmp_path: Path) -> None:
    """References span the columns, best values are bold, and runs with equal labels have their hash."""
    rows = combine_seeds(runs, tmp_path)
    first = next(run for run in runs if run.method == "random")
    other = replace(first, run="random-0.04-abcdef", config={**first.config, "batch_size": 3})
    cases = {
        "methods by budgets, and differences": (rows, ReportSettings(), "random"),
        "budgets by methods": (rows, ReportSettings(rows="budget", columns="method"), None),
        "methods by models": (rows, ReportSettings(columns="model"), None),
        "a metric that no run has": (rows, ReportSettings(metrics=("lpips",)), None),
        "equal labels": ([first, other], ReportSettings(), None),
    }
    texts = []
    for what, (own, layout, against) in cases.items():
        tables = make_paper_tables(own, tmp_path, layout, against)
        texts += [f"% {what}\n", *map(format_paper_table, tables)]
    check_text("paper_tables.txt", "\n".join(texts))
    with pytest.raises(ConfigError, match="against=h2o: no finished run"):
        make_paper_tables(rows, tmp_path, ReportSettings(), "h2o")
    with pytest.raises(ConfigError, match=r"'psrn'; did you mean psnr\? choose from psnr$"):
        check_metrics(rows, ("psnr", "psrn"))


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric(-1.0, "higher", digits=0, ci95=(-1.0, 1.0)), r"$-$1\,{\scriptsize[$-$1, 1]}"),
        (MeanMetric(1.0, "higher", digits=0, ci95=(-2.0, 4.0), df=2.25), r"1\,{\scriptsize$\pm$3$_{2.2}$}"),
        (
            MeanMetric(1.0, "higher", digits=0, ci95=(0.0, 2.0), df=9, prompts_only=True),
            r"1\,{\scriptsize$\pm$1$^\dagger$}",
        ),
        (Metric(None, "higher", status="skipped"), "skipped"),
        (None, "-"),
    ],
)
def test_cells_in_latex(metric: Metric | None, text: str) -> None:
    assert write_cell(metric, choose_style([metric])) == text


def make_long_tables() -> list[str]:
    """Tables of many rows, columns and letters, and more of them than LaTeX holds back."""
    rng = np.random.default_rng(0)

    def make_metrics(count: int) -> dict[str, Metric]:
        return {
            f"metric_{number}[of a network]": MeanMetric(
                float(100 * rng.random()), "lower", digits=4, ci95=(0.0, 25.5), df=float(rng.integers(1, 99))
            )
            for number in range(count)
        }

    rows = [
        {"method": f"a_method_{number}", "kernel": "3", "a setting, its value": "W", **make_metrics(9)}
        for number in range(90)
    ]
    tables = [format_latex(rows, "95 % of x & y", "long", {(3, "metric_1[of a network]")}, lead=2)]
    for number in range(25):
        rows = [{"method.sinks": str(one), **make_metrics(7)} for one in range(3)]
        tables.append(format_latex(rows, f"ablation {number}", f"ablation-{number}"))
    names = [f"critical_adakv base={number} norm=per_query" for number in range(40)]
    cells: dict[CellKey, Metric] = {
        (name, metric, column): value
        for name in names
        for column in ("4 %", "10 %", "20 %", "40 %")
        for metric, value in make_metrics(4).items()
    }
    best = frozenset(list(cells)[:5])
    metrics = {metric: value for (_, metric, _), value in cells.items()}
    cells |= {("full", metric, None): value for metric, value in metrics.items()}
    table = PaperTable("t", "caption", "method", metrics, cells, best)
    return [*tables, format_paper_table(table)]


def test_every_row_and_metric_of_a_divided_table_is_there() -> None:
    *_, text = make_long_tables()
    bodies = text.split(r"\begin{tabular}")[1:]
    for name in ("full", *(f"critical\\_adakv base={number} norm" for number in range(40))):
        assert sum(body.count(f"\n{name}") for body in bodies) == len(bodies) / 2
    assert max(body.count(r"\\") for body in bodies) < 45
    widths = {"a": 8, "b": 6, **{str(number): 18 for number in range(5)}}
    blocks = list(split_columns(widths, 2, 59))  # 14 + 18 + 18 letters, two after each column and one
    assert blocks == [["a", "b", "0", "1"], ["a", "b", "2", "3"], ["a", "b", "4"]]
    assert list(split_columns({"a": 8, "b": 200}, 1, 59)) == [["a", "b"]]


def make_tables_of(texts: Sequence[str]) -> str:
    """Tables with texts as heads, cells and caption."""
    rows = [{text[:20]: text for text in texts}] * 2
    return join_latex([format_latex(rows, "; ".join(texts), "letters")])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("é ł “x” €", "é ł “x” €"),
        ("红", r"\unicodeletter{7EA2}{红}"),
        ("a\n\nb\u2028c\x1bd\x00e", "a  b c d e"),
        ("a ≤ b → c|d", r"a $\leq$ b $\rightarrow$ c$|$d"),
    ],
)
def test_letters_in_latex(text: str, written: str) -> None:
    assert escape(text) == written
    assert ("fontspec" in make_tables_of([text])) == (r"\unicodeletter" in written)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="pdflatex is not installed: texlive-latex-recommended"
)
def test_latex_takes_every_letter_and_stays_within_the_page(tmp_path: Path) -> None:
    letters = "".join(map(chr, (*range(0xA0, 0x250), *range(0x370, 0x400), *range(0x2010, 0x2050))))
    hostile = (
        "红色的圆 \u0430\u05d0 🔴 a\nb\n\nc\u2028\x00\x1b[31m\x7f\x85\u202e\ue000 "
        "\\end{tabular} ${x} a|b % ^^M ~#&_"
    )
    lists = [{"sizes": text, "geneval[scenes]": "1"} for text in ("[1, 2]", "[3]")]
    texts = (
        make_tables_of([hostile]),
        make_tables_of([letters[start : start + 30] for start in range(0, len(letters), 30)]),
        make_tables_of(["tau τ, é, ł"]),
        format_latex(lists, "lines that begin with brackets", "brackets"),
        join_latex(make_long_tables()),
    )
    document = (
        r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}\input{tables}\end{document}"
    )
    (tmp_path / "page.tex").write_text(document)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    for text in texts:
        (tmp_path / "tables.tex").write_text(text)
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "page.log").read_text(errors="replace")
    assert "Overfull" not in log
    assert "Float too large" not in log
