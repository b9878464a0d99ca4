"""Run folders written by hand: results that never were, with samples, values per sample and what was kept."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kvbench.core.files import hash_content
from kvbench.eval.files.kinds import READINGS, list_kinds
from kvbench.eval.protocol.scores import Metric
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.forced.record import ScoredText
from kvbench.runs.record.results import Memory, Results
from tests.support.results import LPIPS, PSNR, made_up

HOSTILE = """</script><script>document.title = "owned"</script><img src=x onerror="document.title='owned'">"""
"""A prompt that would run a program if it became HTML anywhere."""
PROMPTS = ("a red ring", HOSTILE, "two blue circles", "a cyan cross")
WORTH = {"streaming_llm": 20.0, "heatkv": 26.0, "random": 18.0}
"""PSNR of a method at a budget of 0.1; ten times the budget more at others."""


def read_files(folder: Path) -> dict[str, bytes]:
    """Contents of the files in a folder, by name in order."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_run(
    runs_dir: Path,
    run: Results,
    samples: Sequence[tuple[str, Mapping[str, object], bytes]],
    kind: str = "images",
    values: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> Path:
    """Write a run's folder: of each sample its prompt, metadata and file, and values per sample.

    `values` has columns by the stem of a file under metrics/.
    """
    folder = runs_dir / run.model / run.run
    (folder / kind).mkdir(parents=True)
    (folder / "metrics").mkdir()
    lines = []
    for index, (prompt, meta, content) in enumerate(samples):
        (folder / kind / f"{index:06d}{list_kinds()[kind].suffix}").write_bytes(content)
        known = {"index": index, "prompt": prompt, "meta": meta, "seed": 0, "sha256": hash_content(content)}
        lines.append(json.dumps(known))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    for stem, columns in (values or {}).items():
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        text = "".join(json.dumps({"index": index, **row}) + "\n" for index, row in enumerate(rows))
        (folder / "metrics" / f"{stem}.samples.jsonl").write_text(text)
    (folder / "results.json").write_text(run.to_json())
    (folder / "status").write_text("done\n")
    return folder


def score(like: Metric, value: float, half: float, **more: object) -> Metric:
    """A metric with an interval around its value."""
    known = {**vars(like), "value": value, "ci95": (value - half, value + half), "n": len(PROMPTS)}
    return Metric(**{**known, **more})


def paint(brightness: int) -> bytes:
    """A PNG of 8 x 8 pixels of one grey."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), brightness, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def with_bytes(memory: Memory, budget: float) -> Memory:
    """A run's memory that holds a share of 1 MiB a sequence, in batches of 4."""
    each = int(budget * 2**20)
    return replace(memory, peak_bytes=4 * each, sequence_bytes=each, full_sequence_bytes=2**20)


def write_image_runs(runs_dir: Path) -> list[Results]:
    """Three methods at two budgets, and their reference."""
    config = {
        "model": {"name": "infinity_tiny"},
        "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": 4},
        "method": {"note": HOSTILE},
    }
    provenance = {"code": {"commit": "c0ffee", "diff_sha256": ""}, "weights_sha256": "feed", "device": "cpu"}
    full = made_up("full", 1.0, {}, run="full-0", n=4, config=config, provenance=provenance)
    full = replace(full, memory=with_bytes(full.memory, 1.0))
    write_run(runs_dir, full, [(prompt, {}, paint(200)) for prompt in PROMPTS])
    runs = [full]
    for method, worth in WORTH.items():
        for budget in (0.1, 0.2):
            psnr = worth + 10 * (budget - 0.1)
            metrics = {
                "psnr": score(PSNR, psnr, 1.5, protocol="uint8"),
                "lpips": score(LPIPS, 2 / psnr, 0.01),
            }
            settings = {**config, "budget": budget}
            run = made_up(method, budget, metrics, n=4, config=settings, provenance=provenance)
            run = replace(run, memory=with_bytes(run.memory, budget))
            each = [psnr + step for step in (3.0, -4.0, 1.0, 0.0)]
            folder = write_run(
                runs_dir,
                run,
                [(prompt, {}, paint(90)) for prompt in PROMPTS],
                values={"psnr-uint8": {"psnr": each}, "lpips-": {"lpips": [0.1, 0.2, 0.4, 0.3]}},
            )
            runs.append(run)
            kept = [[[1.0, 0.5], [1.0, 0.25]], [[1.0, 0.0], [1.0, 0.125]]]
            retention = {
                "segment": 2, "sources": ["1x1", "2x2"], "tokens": [1, 4], "kept": kept, "prompts": 4,
            }  # fmt: skip
            (folder / "retention.json").write_text(json.dumps({"schema_version": 1, **retention}))
    return runs


def write_text_runs(runs_dir: Path) -> None:
    """A language model's reference, and a run one of whose texts goes astray."""
    config = {"model": {"name": "reasoner_tiny"}, "prompts": {"count": 2}}
    right = Metric(1.0, "higher", evaluator="exact_answer", protocol="last-line", digits=3)
    answers = ("7", "2")
    texts = (b"first 3 then 4\nanswer: 7", b"first 1 then 1\nanswer: 2")
    astray = (b"first 3 then 5\nanswer: 8", texts[1])
    for method, budget, said, each in (("full", 1.0, texts, [1.0, 1.0]), ("rkv", 0.25, astray, [0.0, 1.0])):
        metrics = {"exact_answer": score(right, sum(each) / 2, 0.1)}
        name = "full-0" if method == "full" else f"{method}-0.25"
        run = made_up(method, budget, metrics, "reasoner_tiny", run=name, n=2, config=config)
        samples = [(f"sum {i}", {"answer": answers[i]}, text) for i, text in enumerate(said)]
        write_run(runs_dir, run, samples, "texts", {"exact_answer-last-line": {"exact_answer": each}})


WORDS = {1: "a", 2: " hen", 3: " and", 4: "\n", 5: HOSTILE}
"""Characters of tokens; token 9 has none."""
GIVEN = "It was the best of times: "
TEXT = (1, 2, 3, 1, 2, 4, 1, 5)
"""Tokens that are scored of a text that begins with `GIVEN`."""
TEXTS = {
    "snapkv": ((0, 0.5, 0, 3, 0, 1, 0, 2), (0, 0, 0, 1, 0, 1, 0, 4)),
    "h2o": ((0.125,) * 8, (0.25,) * 8),
}
"""KL of two texts by method."""


def make_reading(kl: Sequence[float], full: Mapping[int, int] | None = None, **more: object) -> ScoredText:
    """A reading of `TEXT` that predicts it everywhere under the full cache, and under the method where KL is below 1.

    At `full` the full cache expects other tokens.
    """
    tokens, values = np.array(TEXT[: len(kl)], np.int32), np.array(kl, np.float32)
    expected = tokens.copy()
    for position, token in (full or {}).items():
        expected[position] = token
    columns = {"tokens": tokens, "kl": values, "nll": values + 1, "nll_full": np.ones_like(values)}
    others = np.where(values < 1, expected, np.int32(9))
    return ScoredText(**{**columns, "likeliest": others, "likeliest_full": expected, "words": WORDS, **more})


def write_reading_runs(
    runs_dir: Path, divergences: Mapping[str, Sequence[Sequence[float]]], model: str = "smollm2_135m"
) -> list[Results]:
    """The full cache, with its hidden states, and methods that read texts; `divergences` has KL by method and text."""
    texts = len(next(iter(divergences.values())))
    prompts = {"_target_": "kvbench.prompts.texts.Texts", "count": texts}
    config = {"model": {"name": model}, "prompts": prompts, "method": {"sinks": 0}}
    kl = Metric(None, "lower", "nats", evaluator="kl", protocol="forced")
    runs = []
    for method, own in {"full": [[0.0] * len(TEXT)] * texts, **divergences}.items():
        means = [float(np.mean(one)) for one in own]
        metrics = {"kl": score(kl, float(np.mean(means)), 0.01, n=texts)}
        name = {"run": "full-0"} if method == "full" else {}
        run = made_up(
            method, 1.0 if method == "full" else 0.1, metrics, model, n=texts, config=config, **name
        )
        states = {"states": torch.zeros(len(TEXT), 64)} if method == "full" else {}
        scored = "".join(WORDS.get(token, "") for token in TEXT)
        samples = [
            (f"{GIVEN}{number}{scored}", {}, READINGS.encode(make_reading(one, {1: 3}, **states)))
            for number, one in enumerate(own)
        ]
        write_run(runs_dir, run, samples, "readings", {"kl-forced": {"kl": means}})
        runs.append(run)
    return runs


def write_unfinished_runs(runs_dir: Path) -> None:
    """A run at work whose last line is torn, others: failed, out of a race, with results cut off, empty; a sweep."""
    parent = runs_dir / "infinity_tiny"
    for name in ("h2o-0.1", "hack-0.1", "swa-0.1", "snapkv-0.1", "tova-0.1"):
        (parent / name).mkdir(parents=True)
    for name in ("h2o-0.1", "hack-0.1"):
        (parent / name / "config.yaml").write_text("prompts: {count: 8}\n")
        (parent / name / "samples.jsonl").write_text('{"index": 0}\n{"index": 1}\n{"index": 1}\n{"ind')
    (parent / "h2o-0.1" / "status").write_text("running\n")
    (parent / "hack-0.1" / "status").write_text("failed: out of memory\n")
    (parent / "tova-0.1" / "status").write_text("left a race\n")
    sweep = runs_dir / "sweeps" / "abc"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps([["method=h2o"], ["budget=9"], ["method=swa"], ["seed=1"]]))
    for number, outcome in enumerate(("started", "failed", "finished")):
        entry = {"overrides": ["budget=9"], "outcome": outcome, "error": "budget=9: too large"}
        (sweep / f"job-{number:05}.json").write_text(json.dumps(entry))
    (parent / "swa-0.1" / "results.json").write_text('{"schema_version": 2, "run"')


def publish_runs(out: Path, runs: Mapping[str, Sequence[float]], seeds: Sequence[int] = (0,)) -> Path:
    """Write runs with a PSNR per sample, and a reference, for each seed beside `out`, and publish them as `out`."""
    place, folders = out.with_name(f"{out.name}-runs"), []
    for seed in seeds:
        config = {
            "model": {"name": "infinity_tiny"},
            "method": {"_target_": "kvbench.methods.x.X"},
            "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": len(PROMPTS)},
            "seed": seed,
            "noise": "stream",
        }
        shared, full = {"n": len(PROMPTS), "config": config}, f"full-1-{seed}"
        reference = made_up("full", 1.0, {}, run=full, **shared)
        write_run(place, reference, [(text, {}, paint(200)) for text in PROMPTS])
        samples = [(text, {}, paint(90 + number)) for number, text in enumerate(PROMPTS)]
        for method, each in runs.items():
            psnr = score(PSNR, sum(each) / len(each), 1.0, protocol="uint8", n=len(each))
            name = f"{method}-0.1-{seed}1"
            run = made_up(method, 0.1, {"psnr": psnr}, run=name, reference=full, **shared)
            folders.append(write_run(place, run, samples, values={"psnr-uint8": {"psnr": each}}))
    prepare_dataset(read_published(folders), out)
    return out
