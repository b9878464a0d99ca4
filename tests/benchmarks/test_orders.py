"""Orders of methods in two tables, beside ranks counted by hand."""

import csv
from pathlib import Path

import pytest

from benchmarks.__main__ import main

ROWS = {"a": 30.0, "b": 31.5, "c": 29.0, "d": 33.25, "random": 29.5}
OTHER = {"a": 20.0, "b": 27.0, "c": 24.0, "d": 26.0, "e": 40.0, "random": 19.0}


def write_table(path: Path, means: dict[str, float]) -> str:
    path.parent.mkdir()
    rows = "".join(f'{method},0.1,"{mean:.2f} [0, 99]"\n' for method, mean in means.items())
    path.write_text(f"method,budget,psnr ↑\nfull,0.1,-\n{rows}", encoding="utf-8")
    return str(path)


def test_methods_of_both_tables_have_ranks_and_a_correlation(tmp_path: Path) -> None:
    first, second = write_table(tmp_path / "one/a.csv", ROWS), write_table(tmp_path / "two/b.csv", OTHER)
    out = tmp_path / "orders.csv"
    main(["orders", "--first", first, "--second", second, "--csv", str(out)])
    with out.open(encoding="utf-8", newline="") as file:
        found = {row["method"]: (row["one 0.1"], row["two 0.1"]) for row in csv.DictReader(file)}
    ranks = {"a": (3, 4), "b": (2, 1), "c": (5, 3), "d": (1, 2), "random": (4, 5)}
    correlation = 1 - 6 * sum((x - y) ** 2 for x, y in ranks.values()) / (5 * (5**2 - 1))
    assert found.pop("rank correlation") == ("", f"{correlation:.2f}")
    # of a, b and d the ranks are 3, 2, 1 and 3, 1, 2
    assert found.pop("the same, of those ahead of `random` on the first") == ("", "0.50 (n = 3)")
    assert found == {
        method: (f"{ROWS[method]:g} ({x})", f"{OTHER[method]:g} ({y})") for method, (x, y) in ranks.items()
    }


def test_tables_without_common_methods_are_refused(tmp_path: Path) -> None:
    first, second = (
        write_table(tmp_path / "one/a.csv", {"a": 1}),
        write_table(tmp_path / "two/b.csv", {"b": 1}),
    )
    with pytest.raises((ValueError, SystemExit), match="no budget and method are in tables of both"):
        main(["orders", "--first", first, "--second", second])
