"""Tables of the results: the keys of a row, recorded when its table was made, are what its overrides compose now."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.jobs import make_job
from kvbench.report.row_keys import SUFFIX, pick_keys
from tests.support.places import ROOT

DATA = ROOT / "docs" / "results" / "data"
WITHOUT = DATA / "without_keys.txt"
"""Tables made before commands recorded keys, which leave it when they are made again, or from other tables."""
TABLES = sorted(path.relative_to(DATA).as_posix() for path in DATA.glob("*/*.csv"))
RECORDED = [name for name in TABLES if (DATA / name).with_suffix(SUFFIX).exists()]


def read_keys(table: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in table.with_suffix(SUFFIX).read_text().splitlines()]


def find_changes(entry: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row that compose to other values now, of those that count in the identity of a run."""
    job, sides = make_job(entry["overrides"]), []
    for config in ({**job.config, **entry["keys"]}, job.config):
        keys = {**pick_keys(config), "model": replace(job, config=config).model_settings}
        groups = {name: value if isinstance(value, dict) else {"": value} for name, value in keys.items()}
        sides.append(
            {f"{name}.{key}".strip("."): item for name, own in groups.items() for key, item in own.items()}
        )
    then, now = json.loads(json.dumps(sides))
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    return [f"{entry['row']}: {name} was {then.get(name)}, is {now.get(name)}" for name in names]


def test_every_table_has_keys_or_is_listed_as_without() -> None:
    assert WITHOUT.read_text().split() == [name for name in TABLES if name not in RECORDED]
    for name in RECORDED:
        assert len(read_keys(DATA / name)) >= len((DATA / name).read_text().splitlines()) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_rows_compose_to_what_they_were(name: str) -> None:
    assert [change for entry in read_keys(DATA / name) for change in find_changes(entry)] == []
