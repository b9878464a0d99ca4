"""Damaged files of a finished run: told by name, or made again; never another result, never a traceback."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.paired.ssim import Ssim
from kvbench.methods.heatkv.method import HeatKV
from kvbench.report.collect import collect_runs
from kvbench.runs import execute
from kvbench.runs.calls import recall, remember
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results
from tests.support.fake_run import job_in
from tests.support.run_folders import paint

COUNT = 4


def make_job(root: Path, **more: object) -> Job:
    return job_in(root, count=COUNT, method=HeatKV(sinks=1), **more)


def with_another(root: Path) -> Job:
    return make_job(root, evaluators={"psnr": Psnr(), "ssim": Ssim()})


USES: dict[str, Callable[[Path], Results | None]] = {
    "again": lambda root: execute.run(make_job(root)).results,
    "another metric": lambda root: execute.run(with_another(root)).results,
    "evaluate": lambda root: execute.rescore(with_another(root)).results,
    "recall": lambda root: getattr(recall(root, make_job(root).config, "streaming_llm"), "results", None),
    "report": lambda root: next((run for run in collect_runs(root) if run.reference is not None), None),
}


def images_of(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("images/*.png")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs: a compressed one, its reference and its calibration."""
    root = tmp_path_factory.mktemp("whole")
    job = make_job(root)
    remember(job, execute.run(job))
    return root


Damage = Callable[[bytes], bytes]
WHOLE: dict[str, Damage] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "list": lambda _: b"[1, 2]\n",
    "null": lambda _: b"null\n",
    "object": lambda _: b"{}\n",
    "text": lambda _: b"not json\n",
    "binary": lambda _: b"\xff\xfe\x00\x01\n",
    "deep": lambda _: b"[" * 100_000 + b"\n",
}


VALUES: dict[str, object] = {"null": None, "nan": float("nan"), "text": "x", "negative": -1, "list": []}
RECORDED = ("index", "seed", "prompt", "sha256", "batch", "seconds", "peak_tokens", "peak_bytes")
RESULTS = ("schema_version", "run", "n", "config", "memory", "latency")


def change(content: bytes, line: int, key: str, value: object) -> bytes:
    """Give a key of a line in JSON another value, or take it out for `...`."""
    lines = content.splitlines()
    changed = {**json.loads(lines[line]), key: value}
    lines[line] = json.dumps({name: one for name, one in changed.items() if one is not ...}).encode()
    return b"\n".join([*lines, b""])


def change_results(content: bytes, key: str, value: object) -> bytes:
    return change(json.dumps(json.loads(content)).encode(), 0, key, value)


def damages() -> Iterator[tuple[str, str, Damage]]:
    """File, what happens to it, and how."""
    for side in ("streaming_llm", "full"):
        for name in ("results.json", "samples.jsonl", "provenance.json", "config.yaml", "status"):
            for what, damage in WHOLE.items():
                yield f"{side}-*/{name}", what, damage
        for what in ("empty", "cut", "text", "foreign"):
            yield f"{side}-*/images/000001.png", what, WHOLE.get(what, lambda _: paint(90))
        for what, value in {**VALUES, "missing": ...}.items():
            for key in RECORDED:
                yield (
                    f"{side}-*/samples.jsonl",
                    f"{key} {what}",
                    partial(change, line=2, key=key, value=value),
                )
            for key in RESULTS:
                yield f"{side}-*/results.json", f"{key} {what}", partial(change_results, key=key, value=value)
    for what in ("empty", "cut", "text", "binary"):
        yield "calibration-*.safetensors", what, WHOLE[what]


def find_fault(root: Path, name: str, use: str, expected: Results, images: dict[str, str]) -> str | None:
    """What is wrong with one use of a damaged run; None if it told the file's name, or came to the same as before."""
    try:
        results = USES[use](root)
    except ConfigError as error:
        told = f"{error}"
        return None if name.rpartition("/")[2].partition("*")[0] in told and "\n" not in told else told
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if results is None:
        return None if use in ("recall", "report") else "no results"
    same = (results.n, results.memory, results.metrics["psnr"]) == (
        expected.n, expected.memory, expected.metrics["psnr"],
    )  # fmt: skip
    if not same:
        return f"another result: {results}"
    side = (
        "full" if use in ("another metric", "evaluate") else "streaming_llm"
    )  # "again" trusts the reference
    there = {name: sha256 for name, sha256 in images_of(root).items() if side in name}
    return None if use in ("recall", "report") or there.items() <= images.items() else "other images"


@pytest.mark.slow
def test_damage_is_told_or_repaired(whole: Path, tmp_path: Path) -> None:
    expected = execute.run(make_job(whole)).results
    images, rng, faults = images_of(whole), random.Random(0), []
    cases = list(damages())
    for number, (pattern, what, damage) in enumerate(rng.sample(cases, 150)):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        [path] = (root / "fake").glob(pattern)
        path.write_bytes(damage(path.read_bytes()))
        use = rng.choice(list(USES))
        if fault := find_fault(root, pattern, use, expected, images):
            faults.append(f"{pattern} {what}, {use}: {fault}")
        shutil.rmtree(root)
    assert not faults, "\n".join(faults)
