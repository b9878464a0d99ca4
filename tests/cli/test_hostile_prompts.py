"""A hostile prompt file goes through every stage, from check to resume, or its line is refused before any work."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from tests.support.command_line import Command, errors

PROMPTS = (
    "a red\u2028circle",
    " \x1ca\r\ngreen\x85square\n\n",
    "a\x0bYELLOW\u2029\u3000triangle",
    "a " + "blue " * 3 + "ring",
)
"""Captions whose words any space separates."""
META = {
    "note": "</script><script>alert(1)</script> ${x} \\end{tabular} | \u202e\ufeff 红 \u03b1 🔴 \x1b[31m\r\n# head",
    "answer": "</textarea>\u2028\ud7ff\ue000",
    "big": 2**63 - 1,
    "small": 5e-324,
    "index": "7",
    "seed": [None],
    "prompt_index": {"deep": [[[[[[{}]]]]]]},
    "": "",
}
NAME = "красный 红 & $x_1$.jsonl"


@pytest.mark.slow
def test_a_hostile_file_passes_every_stage(command: Command, tmp_path: Path) -> None:
    """It has a byte order mark and Windows' line ends."""
    lines = [json.dumps({"prompt": text, **META}, ensure_ascii=False) for text in PROMPTS]
    (tmp_path / NAME).write_bytes(("\ufeff" + "\r\n\r\n".join(lines)).encode())
    words = ["prompts=file", f"prompts.path='{NAME}'", "eval=[psnr]", "method=streaming_llm", "budget=0.1"]
    for stage in (["task=check"], []):
        status, _, err = command(*words, *stage)
        assert (status, [line for line in errors(err) if line.startswith("error")]) == (0, [])
    [folder] = (tmp_path / "runs" / "infinity_tiny").glob("streaming_llm-*")
    assert (folder / "contact_sheet.png").stat().st_size > 0
    samples = (folder / "samples.jsonl").read_bytes()
    records = [json.loads(line) for line in samples.splitlines()]
    assert [record["prompt"] for record in records] == list(PROMPTS)
    assert all(record["meta"] == {"prompt": record["prompt"], **META} for record in records)
    shutil.rmtree(folder / "metrics")
    (folder / "results.json").unlink()
    (folder / "samples.jsonl").write_bytes(b"".join(samples.splitlines(keepends=True)[:2]))
    for stage in (words, ["task=report"], ["task=dashboard"], ["task=export"]):
        status, _, err = command(*stage)
        assert (stage, status, errors(err)) == (stage, 0, [])
    assert (folder / "samples.jsonl").read_bytes().splitlines() != []
    assert pl.read_parquet(tmp_path / "runs" / "samples.parquet")["prompt"].to_list() == list(PROMPTS) * 2
    assert command("publish", str(folder), "out=set")[0] == 0
    published = pl.read_parquet(tmp_path / "set" / "data" / "samples.parquet")["prompt"].to_list()
    assert sorted(published) == sorted(PROMPTS * 2)
    for page in ("runs/dashboard.html", "set/dashboard.html", "set/README.md", "runs/report.md"):
        text = (tmp_path / page).read_text()
        assert "<script>alert(1)" not in text
        assert "\x1b" not in text


BAD = r"""
{"prompt": "a red circle \ud83d"} | \ud83d is half of a surrogate pair; remove it or complete the pair
{"prompt": "a red circle\u0000"} | \u0000 is a null character; remove it
{"prompt": "a red circle", "x": NaN} | nan is not a number that JSON can hold; use null
{"prompt": "a red circle", "x": 9223372036854775808} | 9223372036854775808 is too large for a number
{"prompt": "a red circle", "prompt": "a blue ring"} | key `prompt` is repeated; remove one
{"prompt": "a red circle", "x": DEEP} | are nested in more than 64 levels
{"prompt": "a red circle", "x": NINES} | not a JSON object with `prompt`
{"prompt": "WWW"} | the scenes vocabulary has no word 'www
"""
LONG = {"DEEP": "[" * 80 + "]" * 80, "NINES": "9" * 5000, "WWW": "w" * 10**5}


@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_check_refuses_a_line_by_its_number(command: Command, tmp_path: Path, row: str) -> None:
    line, _, problem = row.partition(" | ")
    for name, text in LONG.items():
        line = line.replace(name, text)
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a red ring", "note": "\\\\u0000 is no null"}\n\n' + line + "\n"
    )
    status, out, err = command("task=check", "prompts=file", "prompts.path=p.jsonl", "eval=none")
    said = " ".join((out + err).split())
    assert status == 1
    assert "prompts.path=p.jsonl: line 3" in said
    assert problem in said
    assert len(out + err) < 2500
    assert not (tmp_path / "runs").exists()
