"""A run in shards, in other batches, stopped or short of memory or disk: the bytes are those of a whole one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.core.settings import Shard
from kvbench.data.flatten import flatten_run
from kvbench.engine.cache import KVCache
from kvbench.eval.files.images import ImageSet
from kvbench.methods.full import Full
from kvbench.models.base import Cache
from kvbench.models.noise import Noise
from kvbench.report.code_notes import describe_mixed
from kvbench.runs import execute
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.record.origins import list_origins
from tests.support.fake_run import Fake, images_of, job_in
from tests.support.places import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_shards_make_the_same_bytes(tmp_path: Path, whole: Path) -> None:
    first, second = (execute.run(job_in(tmp_path, shard=Shard(index, 2))) for index in (1, 0))
    assert first.results is None
    assert images_of(second.folder) == images_of(whole)
    assert (second.folder / RETENTION).read_bytes() == (whole / RETENTION).read_bytes()
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (second.folder, whole))
    assert ours["metrics"]["psnr"] == theirs["metrics"]["psnr"]


def is_close(one: Path, other: Path) -> bool:
    """Whether the images of two runs differ in nothing but rounding."""
    ours, theirs = (ImageSet(folder).stack(range(10)).astype(int) for folder in (one, other))
    return bool(np.abs(ours - theirs).max() <= 1)


def test_batch_size_changes_nothing_but_rounding(tmp_path: Path, whole: Path) -> None:
    assert is_close(execute.run(job_in(tmp_path, batch_size=5)).folder, whole)


def test_noise_by_counter_is_the_same_in_any_shard_batch_and_resume(tmp_path: Path, whole: Path) -> None:
    def draw(folder: str, **more: object) -> Path:
        for index in (1, 0):  # the first process leaves blocks to the second
            outcome = execute.run(job_in(tmp_path / folder, noise="counter", shard=Shard(index, 2), **more))
        return outcome.folder

    pairs, threes = draw("pairs"), draw("threes", batch_size=3)
    assert pairs.name == threes.name != whole.name
    assert json.loads((pairs / "results.json").read_text())["reference"] != whole.name
    assert images_of(pairs) != images_of(whole)
    assert is_close(pairs, threes)


class Killed(BaseException):
    """Stands for the end of the process."""


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> Callable[[], int]:
    calls = 0
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return lambda: calls


def leave_everything_once(monkeypatch: pytest.MonkeyPatch, after: int, calls: Callable[[], int]) -> None:
    """Remove no file after the last write that works: a killed process does not tidy up."""
    unlink = Path.unlink

    def unlink_or_stop(path: Path, missing_ok: bool = False) -> None:
        if calls() > after:
            raise Killed
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_or_stop)


@pytest.mark.slow
def test_stopped_at_any_write_it_ends_in_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = execute.run(job_in(tmp_path / "whole", count=4)).folder
    expected, after, stopped = images_of(whole), 0, True
    while stopped:
        root = tmp_path / str(after)
        with monkeypatch.context() as patch:
            leave_everything_once(patch, after, interrupt(patch, after, Killed()))
            try:
                execute.run(job_in(root, count=4))
                stopped = False
            except Killed:
                pass
        outcome = execute.run(job_in(root, count=4))
        assert outcome.results is not None
        assert images_of(outcome.folder) == expected
        assert (outcome.folder / RETENTION).read_bytes() == (whole / RETENTION).read_bytes()
        assert (outcome.folder / "status").read_text() == "done\n"
        after += 1
    assert after > 25  # every write of a run was tried


def test_full_disk_is_told_and_nothing_finished_is_lost(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 27, OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            execute.run(job_in(tmp_path))
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []
    job = job_in(tmp_path)
    outcome = execute.run(job)
    assert images_of(outcome.folder) == images_of(whole)
    assert 0 < len(job.model.batches) < 10


def test_a_finished_run_has_no_leftovers_of_killed_processes(tmp_path: Path) -> None:
    """A process with blocks of another size dies beside this one, and one on another machine works on."""
    kill = "import os; from contextlib import ExitStack; from pathlib import Path\n"
    kill += "from kvbench.core import claims, files\n"
    kill += "stack, place = ExitStack(), Path({folder!r})\n"
    kill += "stack.enter_context(claims.claim(place / '.block-0-7'))\n"
    kill += "stack.enter_context(files.write_beside(place / 'images' / 'new.png')).write_text('part')\nos._exit(1)"
    working = {"machine": "elsewhere", "lapse": 60}

    def die(folder: Path, _: int) -> None:
        code = kill.format(folder=str(folder))
        assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 1
        (folder / ".block-7-14").write_text(json.dumps(working))
        (folder / ".own").write_text("of its user")
        assert len(list(folder.rglob(".*"))) == 4

    folder = execute.run(job_in(tmp_path), opened=die).folder
    assert sorted(path.name for path in folder.rglob(".*")) == [".block-7-14", ".own"]


def test_out_of_memory_halves_batches(tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Fake(max_prompts=2)
    outcome = execute.run(job_in(tmp_path, model=model, batch_size=8))
    assert model.batches[:3] == [8, 4, 2]
    assert model.batches.count(8) == 2  # once for the reference, once for the run
    assert "out of memory with 8 prompts: continuing with 4" in caplog.text
    assert outcome.results.memory.batch == 2
    assert images_of(outcome.folder) == images_of(whole)


class Held:
    """Repetitions whose recordings hold memory in some calls of `generate`."""

    holds_memory = False

    def forget(self) -> None:
        self.holds_memory = False

    clear = forget


def test_recordings_are_given_up_before_batches_are_halved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the second batch memory does not suffice for recordings."""
    tries: list[int] = []

    class Recorded(Fake):
        def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
            assert isinstance(cache, KVCache)
            tries.append(len(prompts))
            cache.repetitions = cache.repetitions or Held()
            if len(tries) == 2:
                cache.repetitions.holds_memory = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return super().generate(prompts, cache, noise)

    job = job_in(tmp_path, 8, model=Recorded(), method=Full(), method_name="full", batch_size=4)
    execute.run(job)
    assert tries == [4, 4, 4]
    assert caplog.text.count("of memory for recorded graphs with 4 prompts: continuing without") == 1
    assert "at a time" not in caplog.text


def test_out_of_memory_with_one_prompt_is_an_error(tmp_path: Path) -> None:
    job = job_in(tmp_path, model=Fake(max_prompts=0))
    with pytest.raises(torch.OutOfMemoryError):
        execute.run(job)
    [status] = tmp_path.glob("fake/full-*/status")
    assert status.read_text().startswith("failed: CUDA out of memory")


def test_a_resumed_run_names_every_origin_and_tells_its_times_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten samples, four are made by another commit on another machine, where a batch takes no time."""
    assert execute.run(job_in(tmp_path, shard=Shard(0, 2))).results is None
    ours = {"commit": "b" * 40, "diff_sha256": ""}
    monkeypatch.setattr("kvbench.runs.record.provenance.find_commit", lambda: ours)
    for module in ("record.provenance", "generate.batch"):
        monkeypatch.setattr(f"kvbench.runs.{module}.describe_machine", lambda _: "other, 1 threads")
    execute.run(job_in(tmp_path, shard=Shard(1, 2)))
    outcome = execute.run(job_in(tmp_path))
    results = outcome.results
    assert results is not None
    first, second = list_origins(results.provenance)
    assert (second["code"], second["machine"]) == (ours, "other, 1 threads")
    assert first["code"] != ours
    lines = map(json.loads, (outcome.folder / "samples.jsonl").read_text().splitlines())
    usual = [line["seconds"] for line in lines if line["machine"] == first["machine"]]
    latency = results.latency
    assert (latency.samples, latency.others) == (len(usual), 10 - len(usual)) == (6, 4)
    assert latency.seconds_per_image == pytest.approx(np.mean(usual))
    shown = describe_mixed([results])
    assert "1 of 1 runs" in shown
    assert "bbbbbbbbbbbb" in shown
    assert flatten_run(results)["commit"] == f"{first['code']['commit']}; {ours['commit']}"  # type: ignore[index]
