"""task=profile: what adds up, what is written, what happens when memory does not suffice; nothing here is timed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.settings import ProfileSettings, Settings
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.heatkv.method import HeatKV
from kvbench.models.base import Cache, Calls
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.noise import Noise
from kvbench.profile import task as profiler
from kvbench.profile.bench import Bench, Candidate, find_largest
from kvbench.profile.paths import format_segments
from kvbench.profile.stopwatch import REST, HostClock, Phases
from kvbench.profile.tables import show_profile, tabulate_phases
from kvbench.runs.job import Job
from tests.support.fake_run import Fake, job_in

QUICK = ProfileSettings(batch_sizes=(4, 2, 2), warmup=1, repeats=3)


@dataclass
class Ticks(HostClock):
    """A clock that moves when it is told to."""

    now: float = 0.0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        pass


@dataclass
class Parts:
    """Calls inside calls, each of which takes known time."""

    clock: Ticks

    def outer(self) -> None:
        self.clock.now += 1
        self.inner(2)
        self.clock.now += 4

    def inner(self, seconds: float) -> str:
        self.clock.now += seconds
        return "inner"

    def failing(self) -> None:
        self.clock.now += 8
        raise KeyError


@dataclass
class Timed(Fake):
    """A model that a profiler can watch and whose memory does not suffice for `max_full` prompts of a full cache."""

    max_full: int = 1000
    cost: Callable[[int, bool], None] = lambda prompts, full: None
    weights: str = "random"

    @property
    def parameters(self) -> int:
        return 10**6

    @property
    def calls(self) -> Calls:
        return {"decode": [(self, "decode")]}

    def decode(self) -> None:
        pass

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        assert isinstance(cache, KVCache)
        full = isinstance(cache.method, Full)
        if full and len(prompts) > self.max_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        images = super().generate(prompts, cache, noise)
        self.decode()
        self.cost(len(prompts), full)
        return images


def timed_job(tmp_path: Path, model: Timed | None = None, **more: object) -> Job:
    more.setdefault("profile", QUICK)
    return job_in(tmp_path, model=model or Timed(), **more)


def rows_of(found: dict[str, object]) -> dict[tuple[int, str], dict[str, object]]:
    rows = found["rows"]
    assert isinstance(rows, list)
    return {(row["batch"], row["cache"]): row for row in rows}


def test_phases_are_exclusive_and_add_up() -> None:
    clock = Ticks()
    parts, phases = Parts(clock), Phases(clock)

    def work() -> None:
        clock.now += 16
        parts.outer()
        assert parts.inner(seconds=32) == "inner"
        with pytest.raises(KeyError):
            parts.failing()
        clock.now += 64

    calls = {"a": [(parts, "outer"), (parts, "failing")], "b": [(parts, "inner")]}
    phases.run(work, calls)
    assert phases.seconds() == {REST: 16 + 64, "a": 1 + 4 + 8, "b": 2 + 32}
    assert phases.total() == sum(phases.seconds().values())
    assert not {"outer", "inner", "failing"} & set(vars(parts))
    with pytest.raises(KeyError):
        phases.run(parts.failing, {"a": [(parts, "failing")]})
    assert "failing" not in vars(parts)
    phases.run(lambda: parts.inner(3), {})
    assert phases.seconds() == {REST: 3}


def test_modules_are_watched_through_their_call() -> None:
    layer, phases, seen = torch.nn.Linear(2, 2), Phases(Ticks()), []
    layer.register_forward_hook(lambda *_: seen.append(True))
    phases.run(lambda: layer(torch.zeros(1, 2)), {"layer": [(layer, "forward")]})
    assert set(phases.seconds()) == {REST, "layer"}
    assert seen == [True]
    assert "forward" not in vars(layer)


def test_latencies_are_of_the_timed_rounds_and_in_turns(tmp_path: Path) -> None:
    clock = Ticks()
    order: list[bool] = []

    def cost(prompts: int, full: bool) -> None:
        order.append(full)
        clock.now += prompts * (4 if full else 3) + len(order) % 2

    job = timed_job(tmp_path, Timed(cost=cost))
    job.model.load("cpu")
    candidates = []
    for name, one in (("streaming_llm", job), ("full", job.reference)):
        one.method.prepare(job.model.spec, one.budget)
        candidates.append(Candidate(name, one.method, one.budget))
    ticked: list[None] = []
    bench = Bench(job, lambda: ticked.append(None), clock)
    mine, full = bench.measure(candidates, 10, set())
    # Memory of both, then one warm-up and three timed rounds, beginning in turns; then phases, each warmed up.
    turns = [True, False, False, True] * 2
    assert order == [False, True, *turns, False, False, True, True]
    assert len(ticked) == 2 + 8 + 2
    assert mine["latency"]["seconds"] == [31, 30, 31]
    assert full["latency"]["seconds"] == [40, 41, 40]
    assert mine["latency"]["median"] == 31
    assert mine["latency"]["p10"] == pytest.approx(30.2)
    assert mine["seconds_per_image"] == 3.1
    assert mine["images_per_second"] == pytest.approx(10 / 31)
    assert mine["tokens_per_second"] == pytest.approx(10 * sum(job.model.spec.lengths) / 31)  # of all scales
    assert mine["ratio_to_full"] == pytest.approx(31 / 40)
    assert full["ratio_to_full"] == 1
    for row, total in ((mine, 30), (full, 40)):
        assert sum(row["phases"]["seconds"].values()) == row["phases"]["total"]
        assert total <= row["phases"]["total"] <= total + 1
        assert set(row["phases"]["seconds"]) == {REST, "cache", "decode"}


def test_what_is_written(tmp_path: Path) -> None:
    job = timed_job(tmp_path)
    path, found = profiler.profile(job)
    assert path.parent == tmp_path / "profile"
    assert path.name.startswith("fake-streaming_llm-0.5-")
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    assert found["status"] == "done"
    assert list(rows_of(found)) == [(2, "streaming_llm"), (2, "full"), (4, "streaming_llm"), (4, "full")]
    assert all(name in (profiler.__doc__ or "") for name in (*found, *found["rows"][0]))
    row = rows_of(found)[4, "streaming_llm"]
    token = 4 * 2 * 4 * 2 * 4  # D, K and V, float32, guidance, prompts
    assert row["kv"]["full_bytes"] == 2 * 2 * 14 * token
    assert row["kv"]["budget_bytes"] == row["kv"]["full_bytes"] / 2
    assert row["kv"]["peak_bytes"] == row["kv"]["peak_tokens"] * token
    assert row["kv"]["peak_of_budget"] == 2 * row["kv"]["peak_of_full"] <= 1
    assert profiler.profile(job)[0] == path
    other = timed_job(tmp_path, profile=ProfileSettings((4,), 1, 3))
    settings = [replace(job.settings, device="cuda", cuda_graph=recorded) for recorded in (False, True)]
    jobs = [job, other, *(replace(job, settings=one) for one in settings)]
    assert len({profiler._hash_job(one) for one in jobs}) == len(jobs)


def test_the_paths_of_attention_are_told_by_segment(tmp_path: Path) -> None:
    """Of a CPU: torch's products, and of the full cache one call over past and present, as nothing leaves."""
    job = timed_job(tmp_path)
    _, found = profiler.profile(job)
    spec = job.model.spec
    for row in found["rows"]:
        calls = [(one["path"], one["segments"], one["calls"]) for one in row["attention"]]
        every = [index for _, segments, _ in calls for index in segments]
        assert set(every) == set(range(len(spec.segments)))
        assert sum(count for *_, count in calls) == spec.layers * len(spec.segments)
        others = {one["path"]: one["others"] for one in row["attention"]}
        assert others["products"]["kernel"] == "needs a GPU"
        assert others["dense products"] == {"fused attention": "needs a GPU"}


def test_segments_are_shown_as_ranges() -> None:
    assert format_segments([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_segments([4]) == "4"


def test_without_the_full_cache(tmp_path: Path) -> None:
    alone = ProfileSettings((1,), 0, 1, against_full=False)
    _, found = profiler.profile(timed_job(tmp_path, profile=alone))
    assert [row["cache"] for row in found["rows"]] == ["streaming_llm"]
    assert found["rows"][0]["ratio_to_full"] is None
    _, found = profiler.profile(timed_job(tmp_path, method=Full(), method_name="full", profile=QUICK))
    assert [row["cache"] for row in found["rows"]] == ["full", "full"]


def test_out_of_memory_loses_nothing(tmp_path: Path) -> None:
    sizes = ProfileSettings((1, 2, 4, 8, 16), 0, 1)
    model = Timed(max_prompts=8, max_full=2)
    path, found = profiler.profile(timed_job(tmp_path, model, profile=sizes))
    assert max(model.batches) == 16  # ten prompts, repeated
    status = {key: row["status"] for key, row in rows_of(found).items()}
    assert [status[batch, "streaming_llm"] for batch in sizes.batch_sizes] == ["ok"] * 4 + ["out of memory"]
    assert [status[batch, "full"] for batch in sizes.batch_sizes] == ["ok"] * 2 + ["out of memory"] + [
        "left out"
    ] * 2
    assert json.loads(path.read_text())["rows"][4]["ratio_to_full"] is None
    console = Console(width=160, record=True)
    show_profile(console, found)
    text = console.export_text()
    assert "out of memory" in text
    assert "left out" in text
    assert "not measured on a CPU" in text
    assert "attention by segment" in text
    assert "varlen_cudnn: needs a GPU" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("shapes do not match")], ids=repr)
def test_what_was_measured_survives_any_failure(error: BaseException, tmp_path: Path) -> None:
    def cost(prompts: int, full: bool) -> None:
        if prompts > 2:
            raise error

    with pytest.raises(type(error)):
        profiler.profile(timed_job(tmp_path, Timed(cost=cost)))
    [path] = (tmp_path / "profile").iterdir()
    found = json.loads(path.read_text())
    assert found["status"] == "running"
    assert [row["batch"] for row in found["rows"]] == [2, 2]


@dataclass
class Recorder:
    """Runs work in place of recording it; a repetition takes known time."""

    clock: Ticks

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        return work(), lambda: vars(self.clock).update(now=self.clock.now + 5)

    def make_room(self) -> None:
        pass

    clear = make_room


@dataclass
class Repeated(Timed):
    """A model of one scale, which is repeated from the third generation on, of up to three prompts."""

    clock: Ticks = field(default_factory=Ticks)

    def decode(self) -> None:
        self.clock.now += 4

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        assert isinstance(cache, KVCache)
        cache.reset(2 * len(prompts))
        self.clock.now += 1

        def scale() -> Tensor:
            cache.begin(self.spec.segments[0])
            self.clock.now += 3
            self.decode()
            return torch.zeros(1)

        if cache.repetitions is None:
            return scale()
        cache.repetitions.hold(torch.zeros(len(prompts)))
        out = cache.repetitions.run(len(prompts), scale)
        if not cache.repetitions.by_launches and len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return out


def test_phases_and_the_largest_batch_are_of_repeated_generations_as_latencies_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Repeated()
    monkeypatch.setattr("kvbench.runs.job.find_graph_obstacle", lambda *_: None)
    monkeypatch.setattr("kvbench.runs.cache_plan.CudaGraphs", lambda: Recorder(model.clock))
    job = timed_job(tmp_path, model)
    job.model.load("cpu")
    job.method.prepare(job.model.spec, job.budget)
    bench, candidate = Bench(job, lambda: None, model.clock), Candidate("a", job.method, job.budget)
    row = bench._split_phases(candidate, 2)
    assert row["phases"] == {"seconds": {REST: 1, "cache": 0, "recorded": 5}, "total": 6}
    assert row["phases_by_launches"] == {"seconds": {REST: 1 + 3, "cache": 0, "decode": 4}, "total": 8}
    row |= {"batch": 2, "cache": "a", "status": "ok", "latency": {"median": 6}}
    table = tabulate_phases([row])
    assert [*table.columns[2].cells] == ["graphs", "launches"]
    assert [*table.columns[-1].cells] == ["1.00", "1.33"]
    assert [bench.fits(candidate, batch) for batch in (2, 3, 4)] == [True, True, False]
    assert find_largest(lambda batch: bench.fits(candidate, batch), 1) == 3


def test_calibration_stands_in_unless_it_is_there(tmp_path: Path) -> None:
    job = timed_job(tmp_path, method=HeatKV(sinks=1), config={"model": {"weights": "random"}})
    assert profiler.profile(job)[1]["calibration"] == "random numbers (timing only)"
    assert list(tmp_path.iterdir()) == [tmp_path / "profile"]


def test_missing_weights_name_the_remedy(tmp_path: Path) -> None:
    class Missing(Timed):
        def load(self, device: str) -> None:
            raise WeightsError("model.sources.transformer: weights missing")

    with pytest.raises(WeightsError, match=r"weights missing; to time the model without weights"):
        profiler.profile(timed_job(tmp_path, Missing()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sizes": []}, r"profile\.batch_sizes=\[\]: name one or more"),
        ({"batch_sizes": [4, 0]}, r"profile\.batch_sizes=\[4, 0\]: must be a list \(a whole number of at"),
        ({"repeats": 0}, r"profile\.repeats=0: must be a whole number of at least 1"),
        ({"trace": "trace.txt"}, r"profile\.trace=trace\.txt: must be a file name that ends with \.json"),
        ({"largest": True}, r"profile\.largest=true: .* device=cpu; use device=cuda"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    rest = {"budget": 1, "sinks": 1, "seed": 0, "batch_size": 8, "device": "cpu", "cache_dtype": "auto"}
    with pytest.raises(ConfigError, match=message):
        Settings.of({"task": "profile", "runs_dir": "runs", **rest, "profile": values})


@pytest.mark.parametrize("known", [0, 1, 6, 8])
@pytest.mark.parametrize("limit", [0, 1, 8, 9, 37, 63, 64, 4095, 5000])
def test_the_largest_batch_is_found(known: int, limit: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    if known <= limit:
        assert find_largest(fits, known, limit=4500) == min(limit, 4500)
        assert len(set(tried)) == len(tried) <= 26
