"""Tables of strangers: small files of many rows, of large texts and of other columns are refused, unread."""

from pathlib import Path

import polars as pl
import pytest

from kvbench.data.bounded import TooLargeError, read_table


def test_a_table_within_its_bounds_is_read_and_a_run_of_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = pl.DataFrame(
        {"folder": ["x", "x", "y"], "psnr": [1.0, None, 3.0], "late": [True, False, None], "none": [None] * 3}
    )
    whole.write_parquet(path)
    assert read_table(path, 3).equals(whole)
    assert read_table(path, 1, "y")["psnr"].to_list() == [3.0]
    with pytest.raises(TooLargeError, match=r"a.parquet: has 3 rows, the records give 2"):
        read_table(path, 2)
    assert read_table(path, 0, "z").height == 0


def test_a_kilobyte_that_holds_gigabytes_of_text_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pl.Series(["a" * 2**22]).new_from_index(0, 2**8)
    pl.DataFrame({"folder": ["x"] * 255 + ["y"], "text": column}).write_parquet(path)
    assert path.stat().st_size < 2**13
    with pytest.raises(TooLargeError, match="a gibibyte of texts or more"):
        read_table(path, 2**8)
    assert read_table(path, 1, "y")["text"].str.len_bytes().to_list() == [2**22]


@pytest.mark.parametrize(
    "column", [[[1, 2]], [b"a"], [{"a": 1}], pl.Series(["a"], dtype=pl.Categorical)], ids=str
)
def test_columns_of_other_types_are_refused(column: object, tmp_path: Path) -> None:
    pl.DataFrame({"folder": ["x"], "more": column}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(TooLargeError, match=r"'more' is no column of numbers or texts"):
        read_table(tmp_path / "a.parquet", 1)
