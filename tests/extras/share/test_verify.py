"""Verification: an honest run is verified; each kind of tampering is found and named."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from kvbench.core.files import hash_path, hash_values
from kvbench.eval.files.kinds import IMAGES, TEXTS
from kvbench.eval.paired.psnr import Psnr
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.extras.share.verify.dataset import verify_dataset
from kvbench.extras.share.verify.folders import find_recorded
from kvbench.extras.share.verify.redraw import Rule, compare_sample
from kvbench.extras.share.verify.run import MakeJob, verify_run
from kvbench.extras.share.verify.verdict import Choice, Finding, Verdict, write_badge, write_document
from tests.support.verification import (
    ALL,
    COUNT,
    Change,
    edit,
    edit_record,
    lower_peaks,
    named,
    read_verdict,
    remake,
    verify,
)

SHOWN = "?[1A?[2Kverified???"
ROWS = "metrics/psnr-uint8.samples.jsonl"
METHOD = "kvbench.methods.streaming_llm"
Tamper = Callable[[Path], object]


def results(change: Change) -> Tamper:
    return lambda run: edit(run / "results.json", change)


def record(index: int, **fields: object) -> Tamper:
    return lambda run: edit_record(run, index, **fields)


def metric(**fields: object) -> Tamper:
    return results(lambda all_: all_["metrics"]["psnr"].update(fields))


def swap_pixel(run: Path, *, agreeing: bool = False) -> None:
    path = run / "images" / "000003.png"
    pixels = np.asarray(Image.open(path)).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    if agreeing:
        edit_record(run, 3, sha256=hash_path(path))


def change_row(run: Path) -> None:
    first, *others = (run / ROWS).read_text().splitlines(keepends=True)
    (run / ROWS).write_text(json.dumps({**json.loads(first), "psnr": 99.0}) + "\n" + "".join(others))


def read_lines(run: Path) -> list[str]:
    return (run / "samples.jsonl").read_text().splitlines(keepends=True)


def add_sample(run: Path) -> None:
    lines = read_lines(run)
    more = {**json.loads(lines[-1]), "index": COUNT}
    (run / "samples.jsonl").write_text("".join([*lines, json.dumps(more), "\n"]))
    shutil.copy(run / "images" / f"{COUNT - 1:06d}.png", run / "images" / f"{COUNT:06d}.png")


def lose_record(run: Path) -> None:
    (run / "samples.jsonl").write_text("".join(read_lines(run)[:1] + read_lines(run)[2:]))


def truncate(run: Path) -> None:
    (run / "samples.jsonl").write_text("".join(read_lines(run)[:4]))
    (run / "images" / "000004.png").unlink()
    edit(run / "results.json", lambda all_: all_.update(n=4))


def change_file(run: Path, *, agreeing: bool) -> None:
    def change(all_: Any) -> None:
        all_["method"]["files"][METHOD] = "0" * 12
        all_["method"] |= {"sha256": hash_values(all_["method"]["files"])} if agreeing else {}

    edit(run / "code.json", change)


def change_revision(all_: Any) -> None:
    all_["provenance"]["classes"]["method"][f"{METHOD}.StreamingLLM"]["revision"] = 99


DIFFERS, MISSING = "differs", "not verifiable here"


@pytest.mark.parametrize(
    ("tamper", "status", "what", "said"),
    [
        (swap_pixel, DIFFERS, {"sample 3", "samples"}, "0.4% of its pixels differ, by 1 at most"),  # 1 of 256
        (lambda run: swap_pixel(run, agreeing=True), DIFFERS, {"sample 3"}, "0.4% of its pixels differ"),
        (metric(value=99.0), DIFFERS, {"metric psnr"}, "value is 99.0, computed again"),
        (
            results(lambda all_: all_["metrics"].update(better=all_["metrics"]["psnr"])),
            DIFFERS, {"metric better"}, "no evaluator of the run computes it",
        ),
        (change_row, DIFFERS, {ROWS}, "psnr of sample 0 differs"),
        (
            results(lambda all_: all_["memory"].update(peak_tokens=1)),
            DIFFERS, {"memory.peak_tokens"}, "is 1, the records give",
        ),
        (record(2, lse_drift=0.5), DIFFERS, {"ledger of sample 2"}, "lse_drift is 0.5, measured again None"),
        (add_sample, DIFFERS, {"samples.jsonl"}, "its 6 samples are not samples 0 to 4"),
        (lose_record, DIFFERS, {"samples.jsonl", "samples"}, "its 4 samples are not samples 0 to 4"),
        (truncate, DIFFERS, {"results.json"}, "counts 4 samples, the configuration gives 5 prompts"),
        (record(1, prompt="another"), DIFFERS, {"sample 1"}, "has another prompt or seed in samples.jsonl"),
        (record(3, seed=99), DIFFERS, {"sample 3"}, "has another prompt or seed in samples.jsonl"),
        (lambda run: (run / "code.json").unlink(), DIFFERS, {"code.json"}, "is missing"),
        (lambda run: change_file(run, agreeing=False), DIFFERS, {"code.json"}, "is damaged"),
        (lambda run: change_file(run, agreeing=True), MISSING, {"code"}, f"from the run's: {METHOD}"),
        (results(change_revision), MISSING, {"code"}, f"from the run's: {METHOD}.StreamingLLM"),
        (
            results(lambda all_: all_["provenance"].update(weights_sha256="0" * 64)),
            MISSING, {"weights"}, "the record has SHA-256 000000000000, the weights here",
        ),
        (results(lambda all_: all_["config"]["method"].update(sinks=0)), DIFFERS, {"name"}, "the folder is called"),
        (results(lambda all_: all_.update(run="streaming_llm-9")), DIFFERS, {"name"}, "is of streaming_llm-9"),
        (
            lambda run: edit(run / "results.json", lambda all_: all_.update(reference=run.name)),
            DIFFERS, {"reference"}, "the configuration gives full-",
        ),
        (
            results(lambda all_: all_.update(reference="../../x")),
            MISSING, {"run"}, "'../../x', not the name of a folder beside this one",
        ),
        (results(lambda all_: all_["config"].pop("method")), MISSING, {"run"}, "KeyError"),
        (lambda run: (run / "results.json").unlink(), MISSING, {"results.json"}, "the run is not finished"),
        (
            lambda run: shutil.rmtree(next(run.parent.glob("full-*"))),
            MISSING, {"reference"}, "is not beside the run",
        ),
        (record(1, seconds=9.0), DIFFERS, {"latency.seconds_per_image"}, "the records give"),
    ],
)  # fmt: skip
def test_what_was_changed_is_named(run: Path, tamper: Tamper, status: str, what: set[str], said: str) -> None:
    tamper(run)
    verdict = read_verdict(run)
    assert (verdict.status, what <= named(verdict)) == (status, True), verdict.describe()
    assert any(said in one.text for one in verdict.findings if one.what in what), verdict.findings


def test_no_finding_quotes_a_prompt_of_the_configuration(run: Path) -> None:
    for folder in run.parent.glob("*-*"):
        for index in range(COUNT):
            edit_record(folder, index, prompt="another")
    verdict = read_verdict(run)
    [said] = [one.text for one in verdict.findings if one.what == "sample 0"]
    assert said.endswith("than the configuration gives")
    assert not [one for one in verdict.findings if "prompt 1" in one.text]


def test_an_honest_run_and_its_reference_are_verified(run: Path) -> None:
    verdicts = verify(run, Choice(1, 7))
    assert {one.status for one in verdicts.values()} == {"verified"}
    ours = verdicts[run.name]
    assert (len(verdicts), len(ours.chosen), ours.compared) == (2, 1, "same bytes")
    assert ours.drawn == (1 if ours.chosen == (4,) else 2)
    assert ours.metrics == 3
    assert f": 1 of {COUNT} samples ({ours.drawn} drawn, same bytes), 3 metrics" in ours.describe()
    assert verify(run)[run.name].drawn == COUNT
    badge = write_badge(run, Choice(1, 7), [ours], "Eve")
    assert " by Eve: 1 of 1 runs" in badge
    assert "drawn again (same bytes), 3 metrics" in badge
    chosen = [Choice(3, seed).choose("fake/a", 100) for seed in range(20)]
    assert chosen == [Choice(3, seed).choose("fake/a", 100) for seed in range(20)]
    assert len(set(map(tuple, chosen))) == 20
    assert Choice(9, 0).choose("a", 3) == [0, 1, 2]


@pytest.mark.parametrize("machine", ["here", "another"])
@pytest.mark.parametrize("lengths", ["from shapes", "from data"])
def test_peaks_are_equal_whatever_machine_is_recorded(
    run: Path, monkeypatch: pytest.MonkeyPatch, machine: str, lengths: str
) -> None:
    if machine == "another":
        edit(run / "results.json", lambda all_: all_["provenance"].update(machine="Cray-1, 1 threads"))
    if lengths == "from data":
        monkeypatch.setattr("kvbench.extras.share.verify.run.predict_row_lengths", lambda *_: None)
    before = read_verdict(run)
    assert (before.status, before.other_arithmetic) == ("verified", ("machine",) * (machine == "another"))
    assert before.compared == ("same bytes" if machine == "here" else "same peaks, PSNR of at least 40 dB")
    lower_peaks(run, 0.95)
    verdict = read_verdict(run)
    assert {f"ledger of sample {index}" for index in range(COUNT)} <= named(verdict)
    assert verdict.status == (DIFFERS if machine == "here" or lengths == "from shapes" else MISSING)


def test_samples_of_a_smaller_batch_are_not_compared(run: Path) -> None:
    edit_record(run, 1, batch=1)  # as after out of memory
    swap_pixel(run, agreeing=True)
    found = {one.what: one for one in read_verdict(run).findings if one.what.startswith("sample ")}
    assert found.keys() == {"sample 1", "sample 3"}
    assert "was drawn in a batch of 1" in found["sample 1"].text
    assert found["sample 1"].missing


def test_a_metric_that_fails_here_is_not_verified(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a secret")

    def make(own: str) -> MakeJob:
        return lambda results: (remake(run.parents[1] / "again")(results)[0], [own])

    monkeypatch.setattr(Psnr, "run", fail)
    for own, quoted in (("eval.psnr.questions", False), ("eval.psnr2.path", True)):
        verdict = read_verdict(run, make(own))
        assert (verdict.status, named(verdict)) == (MISSING, {"metric psnr"})
        assert ("a secret" in verdict.describe()) == quoted
        assert "not computed here: psnr" in write_badge(run, Choice(1, 0), [verdict])


def test_a_dataset_is_verified_and_edits_of_its_tables_are_named(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "set"
    out.parent.mkdir()
    prepare_dataset(read_published([run]), out)
    shutil.rmtree(run.parent)
    found = find_recorded(out, tmp_path / "staged")
    verdicts = [verify_run(one, remake(tmp_path / "again"), ALL) for one in found]
    assert [one.status for one in verdicts] == ["verified", "verified"]
    folders = [one.folder for one in found]
    assert verify_dataset(out, folders).status == "verified"
    table, card, runs = out / "data" / "samples.parquet", out / "README.md", out / "data" / "runs.parquet"
    whole = {path: path.read_bytes() for path in (table, card, runs)}
    rows, both = pl.read_parquet(table), pl.read_parquet(runs)
    renamed = card.read_text().replace("| fake | streaming_llm |", "| fake | streaming_llm_best |")
    for path, change, what in (
        (runs, pl.concat([both, both.head(1)]), "tables"),
        (runs, both.with_columns(budget=pl.lit(0.9)), "data/runs.parquet"),
        (card, renamed, "README.md"),
        (runs, None, "tables"),
    ):
        if isinstance(change, pl.DataFrame):
            change.write_parquet(path)
        elif change is None:
            path.unlink()
        else:
            path.write_text(change)
        said = verify_dataset(out, folders)
        assert (said.status, named(said)) == (DIFFERS, {"SHA256SUMS", what}), said.describe()
        path.write_bytes(whole[path])
    first = pl.col("index") == 1
    for change, what in (
        (rows.with_columns(psnr=pl.col("psnr") + first), "data/samples.parquet"),
        (rows.with_columns(seed=pl.col("seed") + first), "sample 1"),
        (rows.filter(pl.col("index") > 0), "data/samples.parquet"),
        (pl.concat([rows, rows.head(1)]), "run"),
    ):
        change.write_parquet(table)
        verdicts = [verify_run(one, remake(tmp_path / "again"), ALL) for one in found]
        assert {name for verdict in verdicts for name in named(verdict)} == {what}
        assert DIFFERS in {verdict.status for verdict in verdicts}


def paint(change: int = 0, width: int = 8, form: str = "PNG") -> bytes:
    """An image in grey whose upper half is brighter."""
    pixels = np.full((8, width, 3), 100, np.uint8)
    pixels[:4] += np.uint8(change)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def test_samples_are_compared_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, exact, other = tmp_path / "stored", Rule(exact=True), Rule(exact=False)

    def compare(content: bytes, rule: Rule, drawn: bytes | None = None) -> tuple[str | None, bool]:
        stored.write_bytes(content)
        return compare_sample(stored, drawn or paint(), TEXTS if drawn else IMAGES, rule)

    # Half of the pixels differ by d: PSNR is 20 log10(255 / d) + 3.01 dB, so 41.6 dB at 3, 35.2 at 6, 23.2 at 25.
    assert compare(paint(3), other) == (None, False)
    assert compare(paint(3), exact)[0] is not None
    assert compare(paint(6), other)[1]
    said = "50.0% of its pixels differ, by 25 at most, PSNR 23.2 dB"
    assert compare(paint(25), other) == (said, False)
    assert compare(b"a text", exact, b"a test") == ("differs from byte 4 on, of 6", False)
    assert compare(b"a text", other, b"a text, longer") == ("differs from byte 6 on, of 6", True)
    monkeypatch.setattr("kvbench.eval.files.pictures.MAX_PIXELS", 8 * 8000)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it is decoded"))
    for content, text in (
        (paint(width=9), "is 9 x 8 pixels, drawn again 8 x 8"),
        (paint(form="BMP"), "is a file of BMP, not of PNG"),
        (b"no image", "cannot be read: its content has no known format"),
        (paint(width=9000), "has 9000 x 8 pixels: an image may have "),
    ):
        assert str(compare(content, exact)[0]).startswith(text)
    stored.unlink()
    assert compare_sample(stored, paint(), IMAGES, other) == ("has no file", False)


def test_texts_of_strangers_move_no_cursor_and_are_no_markdown(tmp_path: Path) -> None:
    hostile = "\x1b[1A\x1b[2Kverified\r\u202e\ud800"
    findings = Finding(hostile, hostile), Finding(f"metric {hostile}`<b>](x)", "", missing=True)
    verdict = Verdict(f"a/{hostile}", findings)
    choice = Choice(1, 0)
    assert verdict.describe().startswith(f"differs: a/{SHOWN}: {SHOWN}: {SHOWN}; metric {SHOWN}")
    badge = write_badge(tmp_path / "a`\x1b", choice, [verdict])
    assert badge.endswith(f"not computed here: {SHOWN}'&lt;b>]\\(x) (`kvbench verify a'  samples=1 seed=0`)")
    outcome = json.loads(write_document(tmp_path, choice, [verdict], {}))
    assert outcome["runs"][0]["findings"][0] == {"what": SHOWN, "text": SHOWN, "missing": False}
