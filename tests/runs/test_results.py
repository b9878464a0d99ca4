"""results.json: what is written is read back, and what cannot be read is told in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.results import Evaluated, read_results
from tests.support.results import made_up

MADE = made_up(
    "heatkv",
    0.1,
    {"psnr": Metric(25.0, "higher", "dB", ci95=(24.0, None), nonfinite=1), "fid": Metric(None, "lower")},
    evaluated={"psnr": Evaluated({"batch": 4}, "skipped", "uint8", ("a file",))},
    provenance={"code": None},
    finished="2026-01-01T00:00:00+00:00",
)
RUN = replace(MADE, memory=replace(MADE.memory, lse_drift=-0.5))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Fields of other versions of the schema do no harm."""
    (tmp_path / "results.json").write_text(RUN.to_json())
    assert read_results(tmp_path) == RUN
    values = json.loads(RUN.to_json())
    newer = {**values, "mood": "good", "metrics": {"psnr": {**values["metrics"]["psnr"], "colour": "red"}}}
    for name in ("digits", "detail", "needs_reference"):
        del newer["metrics"]["psnr"][name]
    (tmp_path / "results.json").write_text(json.dumps(newer))
    assert read_results(tmp_path) == replace(RUN, metrics={"psnr": RUN.metrics["psnr"]})
    assert read_results(tmp_path / "elsewhere") is None
    assert RUN.model == "infinity_tiny"
    assert RUN.setting("method.sinks") == 1
    assert RUN.setting("method.sinks.deeper") is RUN.setting("nothing") is None
    assert RUN.memory.budget == 0.1


def test_a_budget_in_tables_is_in_tokens_per_head_where_it_was_given_so() -> None:
    given, whole = ({**RUN.config, "budget": number} for number in (128, 1))
    assert RUN.budget_text == "0.1"
    assert replace(RUN, config=given).budget_text == "128"
    assert replace(RUN, config=whole).budget_text == "0.1"
    full = replace(RUN.memory, budget_tokens=RUN.memory.full_tokens)
    assert replace(RUN, config=given, memory=full).budget_text == "1"
    in_bytes = replace(RUN.memory, budget_unit="bytes", budget_bytes=RUN.memory.full_sequence_bytes / 4)
    assert replace(RUN, config=given, memory=in_bytes).budget_text == "0.25 bytes"


def test_the_file_has_the_documented_fields(root: Path) -> None:
    values = json.loads(RUN.to_json())
    text = (root / "docs" / "results_schema.md").read_text()
    whole, memory, latency, metric = (
        set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", part, re.MULTILINE))))
        for part in re.split(r"^## ", text, flags=re.MULTILINE)[:4]
    )
    assert whole == set(values)
    assert memory == set(values["memory"])
    assert latency == set(values["latency"])
    assert metric == set(values["metrics"]["psnr"])
    assert set(values["evaluated"]["psnr"]) == {"settings", "status", "protocol", "lacking", "inputs"}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"n": 96,\n "config"', '"config"', r"damaged \(n is missing\); delete it and start the run again"),
        ('"peak_tokens": 99', '"peak_tokens": true', r"damaged \(memory\.peak_tokens is True, not int\)"),
        ('"better": "higher"', '"better": "both"', r"damaged \(metrics\.psnr\.better is 'both', not "),
        ('"lacking": [\n', '"lacking": [\n 3,', r"damaged \(evaluated\.psnr\.lacking is 3, not str\)"),
        ('"code": null', '"resumed": [{"code": [3]}]', r"damaged \(provenance\.resumed\[0\]\.code is "),
        ('"schema_version": 2', '"schema_version": 3', "has schema_version 3, this program reads 2"),
        ('"schema_version": 2,', '"schema_version": 2', "cannot be read "),
        (RUN.to_json(), "[]", ""),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    text, path = RUN.to_json(), tmp_path / "results.json"
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: {message}") as told:
        read_results(tmp_path)
    assert "\n" not in str(told.value)
