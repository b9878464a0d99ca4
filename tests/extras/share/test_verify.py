"""Verification: an honest run is verified; each kind of tampering is found and named."""

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from kvbench.core.files import hash_path
from kvbench.eval.paired.psnr import Psnr
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.extras.share.verify.dataset import verify_dataset
from kvbench.extras.share.verify.document import write_badge, write_document
from kvbench.extras.share.verify.folders import find_recorded
from kvbench.extras.share.verify.redraw import Rule, _compare_images
from kvbench.extras.share.verify.run import Choice, verify_run
from kvbench.extras.share.verify.verdict import Finding, Verdict
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results
from tests.support.verification import ALL, COUNT, edit, edit_record, named, remake, verify

SHOWN = "?[1A?[2Kverified???"


def test_an_honest_run_and_its_reference_are_verified(run: Path) -> None:
    verdicts = verify(run, Choice(1, 7))
    assert {one.status for one in verdicts.values()} == {"verified"}
    ours = verdicts[run.name]
    assert (len(verdicts), len(ours.chosen), ours.compared) == (2, 1, "same bytes")
    assert ours.drawn == (1 if ours.chosen == (4,) else 2)
    assert ours.metrics == 3
    assert verify(run)[run.name].drawn == COUNT


def test_the_seed_chooses_the_samples() -> None:
    chosen = [Choice(3, seed).choose("fake/a", 100) for seed in range(20)]
    assert chosen == [Choice(3, seed).choose("fake/a", 100) for seed in range(20)]
    assert len(set(map(tuple, chosen))) == 20
    assert Choice(9, 0).choose("a", 3) == [0, 1, 2]


def test_a_replaced_sample_is_named_even_if_its_record_and_metrics_agree(run: Path) -> None:
    path = run / "images" / "000003.png"
    pixels = np.asarray(Image.open(path)).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    assert "sample 3" in named(verify(run)[run.name])
    edit_record(run, 3, sha256=hash_path(path))
    verdict = verify(run)[run.name]
    [said] = [finding.text for finding in verdict.findings if finding.what == "sample 3"]
    assert said.startswith("0.4% of its pixels differ, by 1 at most")  # 1 of 256
    assert verdict.status == "differs"


def test_a_metric_is_named(run: Path) -> None:
    edit(run / "results.json", lambda all_: all_["metrics"]["psnr"].update(value=99.0))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert (verdict.status, named(verdict)) == ("differs", {"metric psnr"})
    assert "value is 99.0, computed again" in verdict.describe()


def test_a_metric_that_no_evaluator_of_the_run_computes_is_named(run: Path) -> None:
    edit(run / "results.json", lambda all_: all_["metrics"].update(better=all_["metrics"]["psnr"]))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert (verdict.status, named(verdict)) == ("differs", {"metric better"})
    assert "no evaluator of the run computes it" in verdict.describe()


def test_a_value_of_a_sample_is_named(run: Path) -> None:
    path = run / "metrics" / "psnr-uint8.samples.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), "psnr": 99.0}) + "\n" + "".join(others))
    assert named(verify(run, Choice(1, 0))[run.name]) == {"metrics/psnr-uint8.samples.jsonl"}


def test_a_figure_of_the_ledger_is_named(run: Path) -> None:
    edit(run / "results.json", lambda all_: all_["memory"].update(peak_tokens=1))
    assert named(verify(run, Choice(1, 0))[run.name]) == {"memory.peak_tokens"}
    for index in range(COUNT):  # so that records and summary agree
        edit_record(run, index, peak_tokens=1)
    assert {"ledger of sample 0", "ledger of sample 4"} <= named(verify(run)[run.name])


def test_a_cost_that_is_no_peak_is_named_in_the_same_arithmetic(run: Path) -> None:
    edit_record(run, 2, lse_drift=0.5)
    assert "ledger of sample 2" in named(verify(run)[run.name])


def test_a_record_beyond_the_samples_is_named(run: Path) -> None:
    lines = (run / "samples.jsonl").read_text().splitlines()
    more = {**json.loads(lines[-1]), "index": COUNT}
    (run / "samples.jsonl").write_text("\n".join([*lines, json.dumps(more)]) + "\n")
    shutil.copy(run / "images" / f"{COUNT - 1:06d}.png", run / "images" / f"{COUNT:06d}.png")
    verdict = verify(run, Choice(1, 0))[run.name]
    assert f"sample {COUNT}: is recorded, and results.json counts {COUNT} samples" in verdict.describe()


def test_a_truncated_run_is_named(run: Path) -> None:
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(lines[:4]))
    (run / "images" / "000004.png").unlink()
    edit(run / "results.json", lambda all_: all_.update(n=4))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert verdict.status == "differs"
    assert "counts 4 samples, the configuration gives 5 prompts" in verdict.describe()


def test_prompts_and_seeds_of_other_samples_are_named_without_the_own_prompts(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    own = lines[1]["prompt"]
    lines[1]["prompt"], lines[3]["seed"] = "another prompt", 99
    (run / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    verdict = verify(run, Choice(1, 0))[run.name]
    assert verdict.status == "differs"
    assert "sample 1: its prompt is 'another prompt', not the one of the configuration" in verdict.describe()
    assert "sample 3: its seed is 99, not 0" in verdict.describe()
    assert own not in verdict.describe()


def test_a_metric_that_fails_here_is_not_verified(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(Psnr, "run", fail)
    verdict = verify(run, Choice(1, 0))[run.name]
    assert (verdict.status, named(verdict)) == ("not verifiable here", {"metric psnr"})
    assert "not computed here: psnr" in write_badge(run, Choice(1, 0), [verdict])


@pytest.mark.parametrize("own", [True, False])
def test_a_reason_quotes_no_file_of_the_user(run: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    secret = run.parents[1] / "mine.csv"
    secret.write_text("a secret")

    def fail(*_: object) -> None:
        raise ValueError(secret.read_text())

    def make(results: Results, config: Mapping[str, Any]) -> Job:
        job = remake(run.parents[1] / "again")(results, config)
        node = {"_target_": "x", "of": {"questions": str(secret) if own else "pkg://x"}}
        return Job(**{**vars(job), "config": {**config, "eval": {"psnr": node}}})

    monkeypatch.setattr(Psnr, "run", fail)
    [one] = [one for one in find_recorded(run, run.parents[1] / "staged") if one.folder.name == run.name]
    verdict = verify_run(one, make, Choice(1, 0))
    assert (verdict.status, named(verdict)) == ("not verifiable here", {"metric psnr"})
    assert ("a secret" in verdict.describe()) != own
    assert ("failed with mine.csv" in verdict.describe()) == own


def test_a_malformed_run_does_not_stop_the_others(run: Path) -> None:
    edit(run / "results.json", lambda all_: all_["config"].pop("method"))
    verdicts = verify(run, Choice(1, 0))
    assert verdicts[run.name].status != "verified"
    assert any("KeyError" in finding.text for finding in verdicts[run.name].findings)
    assert len(verdicts) == 2


def test_blocks_are_drawn_again_whatever_the_recorded_times(run: Path) -> None:
    edit_record(run, 1, seconds=9.0)  # an image that was drawn again
    verdict = verify(run)[run.name]
    assert not {what for what in named(verdict) if what.startswith(("sample", "ledger"))}
    assert verdict.drawn == COUNT
    edit_record(run, 1, batch=1)  # after out of memory
    [said] = [one for one in verify(run, ALL)[run.name].findings if one.what == "sample 0"]
    assert (said.missing, "smaller batch" in said.text) == (True, True)


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
    table = out / "data" / "samples.parquet"
    rows = pl.read_parquet(table)
    rows.with_columns(seed=pl.col("seed") + (pl.col("index") == 1)).write_parquet(table)
    assert named(verify_dataset(out, folders)) == {"SHA256SUMS", "data/samples.parquet"}
    rows.filter(pl.col("index") > 0).write_parquet(table)
    assert named(verify_dataset(out, folders)) == {"SHA256SUMS", "data/samples.parquet"}
    rows.with_columns(psnr=pl.col("psnr") + (pl.col("index") == 1)).write_parquet(table)
    wrong = {
        name for one in found for name in named(verify_run(one, remake(tmp_path / "again"), Choice(1, 0)))
    }
    assert wrong == {"data/samples.parquet"}
    rows.write_parquet(table)
    for name in ("samples", "runs"):
        path = out / "data" / f"{name}.parquet"
        whole = pl.read_parquet(path)
        pl.concat([whole, whole.head(1)]).write_parquet(path)
        said = verify_dataset(out, folders)
        assert (said.status, named(said)) == ("differs", {"SHA256SUMS", "tables"})
        assert f"{name}.parquet: has " in said.describe()
        whole.write_parquet(path)
    assert verify_dataset(out, folders).status == "verified"
    card = out / "README.md"
    card.write_text(card.read_text().replace("| fake | streaming_llm |", "| fake | streaming_llm_best |"))
    assert named(verify_dataset(out, folders)) == {"SHA256SUMS", "README.md"}
    table.unlink()
    assert named(verify_dataset(out, folders)) == {"SHA256SUMS", "README.md", "tables"}


def paint(change: int = 0, width: int = 8, form: str = "PNG") -> bytes:
    """An image in grey whose upper half is brighter."""
    pixels = np.full((8, width, 3), 100, np.uint8)
    pixels[:4] += np.uint8(change)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def compare(tmp_path: Path, stored: bytes, rule: Rule) -> tuple[str | None, bool]:
    (tmp_path / "stored.png").write_bytes(stored)
    return _compare_images(tmp_path / "stored.png", paint(), rule)


def test_pixels_of_another_arithmetic_have_a_tolerance(tmp_path: Path) -> None:
    # Half of the pixels differ by d: PSNR is 20 log10(255 / d) + 3.01 dB, so 41.6 dB at 3, 35.2 at 6, 23.2 at 25.
    assert compare(tmp_path, paint(3), Rule(exact=False)) == (None, False)
    assert compare(tmp_path, paint(3), Rule(exact=True))[0] is not None
    assert compare(tmp_path, paint(6), Rule(exact=False))[1]
    said = compare(tmp_path, paint(25), Rule(exact=False))
    assert said == ("50.0% of its pixels differ, by 25 at most, PSNR 23.2 dB", False)


def test_images_of_another_format_or_size_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [paint(width=9), paint(form="BMP"), b"no image", paint(width=9000)]
    monkeypatch.setattr("kvbench.eval.files.pictures.MAX_PIXELS", 8 * 8000)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it is decoded"))
    said = [compare(tmp_path, stored, Rule(exact=True))[0] or "" for stored in files]
    assert said[:2] == ["is 9 x 8 pixels, drawn again 8 x 8", "is a file of BMP, not of PNG"]
    assert said[2] == "is not an image: its content has no known format"
    assert said[3].startswith("has 9000 x 8 pixels: an image may have ")


def test_a_line_has_the_number_of_the_runs_samples(run: Path) -> None:
    verdict = verify(run, Choice(1, 7))[run.name]
    assert f": 1 of {COUNT} samples ({verdict.drawn} drawn, same bytes), 3 metrics" in verdict.describe()


def test_a_sample_without_a_record_is_named_though_its_batch_is_drawn(run: Path) -> None:
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(lines[:1] + lines[2:]))
    verdict = verify(run)[run.name]
    assert verdict.status == "differs"
    assert [finding[:2] for finding in verdict.findings].count(("sample 1", "has no record")) == 1
    assert "run" not in named(verdict)


def test_texts_of_strangers_move_no_cursor_and_are_no_markdown(tmp_path: Path) -> None:
    hostile = "\x1b[1A\x1b[2Kverified\r\u202e\ud800"
    finding = Finding(hostile, hostile)
    verdict = Verdict(f"a/{hostile}", (finding,), unchecked={f"{hostile}`<b>](x)": hostile})
    choice = Choice(1, 0)
    assert verdict.describe() == f"differs: a/{SHOWN}: {SHOWN}: {SHOWN}"
    badge = write_badge(tmp_path / "a`\x1b", choice, [verdict])
    assert badge.endswith(f"not computed here: {SHOWN}'&lt;b>]\\(x) (`kvbench verify a'  samples=1 seed=0`)")
    outcome = json.loads(write_document(tmp_path, choice, [verdict], {}))
    assert outcome["runs"][0]["findings"] == [{"what": SHOWN, "text": SHOWN, "missing": False}]
