"""A run from start to end on a tiny model with random weights: what it leaves, its identity, what it refuses."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.settings import Shard
from kvbench.engine.ledger import BudgetExceeded
from kvbench.eval.files.images import ImageSet
from kvbench.eval.paired.lpips import Lpips
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.scores import MetricSpec, Score
from kvbench.methods.ams_kv import AMSKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.scale_groups import ScaleGroups
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from kvbench.runs.record.provenance import provenance
from kvbench.runs.record.results import Evaluated, Outcome
from kvbench.runs.score import scoring
from kvbench.runs.score.scoring import find_pending
from tests.support.fake_run import Fake, images_of, job_in, open_folder
from tests.support.results import made_up


@dataclass(frozen=True)
class Broken(Psnr):
    """Fails until its setting says otherwise."""

    name: ClassVar[str] = "broken"
    metrics: ClassVar[dict[str, MetricSpec]] = {"broken": MetricSpec("higher")}
    works: bool = False

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        if not self.works:
            raise SkipEvaluation("not today")
        return make_result(self, {"broken": Score(1.0, len(images))})


def identity(job: Job) -> str:
    job.model.load("cpu")
    return open_folder(job).path.name


def test_run_leaves_everything(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    memory, full = results["memory"], 2 * 2 * 14
    assert results["schema_version"] == 2
    assert memory["full_tokens"] == full
    assert memory["budget_tokens"] == full / 2
    assert 0 < memory["peak_tokens"] <= full / 2
    bytes_of_a_token = 4 * 2 * 4 * 2 * 2  # D, K and V, float32, guidance, batch
    assert memory["peak_bytes"] == memory["peak_tokens"] * bytes_of_a_token
    assert memory["full_bytes"] == full * bytes_of_a_token
    assert memory["paper_full_mib"] == full * 4 * 6 * 4 / 2**20
    assert results["metrics"]["psnr"]["n"] == 10
    assert results["latency"]["seconds_per_image"] > 0
    model = Fake()
    model.load("cpu")
    assert results["provenance"]["weights_sha256"] == model.weights_sha256
    assert (whole / "status").read_text() == "done\n"
    assert yaml.safe_load((whole / "config.yaml").read_text())["model"]["name"] == "fake"
    assert Image.open(whole / "contact_sheet.png").width > 4 * 32
    lines = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(10))
    assert lines[3]["meta"] == {"number": 3}
    reference = json.loads((whole.parent / results["reference"] / "results.json").read_text())
    assert (reference["method"], reference["reference"]) == ("full", None)
    assert reference["memory"]["peak_tokens"] == reference["memory"]["full_tokens"]
    assert reference["metrics"]["psnr"]["status"] == "skipped"
    config = yaml.safe_load((whole.parent / results["reference"] / "config.yaml").read_text())
    assert (config["budget"], config["method"]) == (1, {"_target_": "kvbench.methods.full.Full"})


IGNORED: list[dict[str, object]] = [
    {"device": "cpu:0"}, {"batch_size": 5}, {"shard": Shard(1, 2)}, {"evaluators": {}}, {"logger": object()},
    {"cuda_graph": False}, {"method_name": "sta"},
    {"config": {**job_in(Path()).config, "model": {"name": "fake", "sources": {"path": "/elsewhere"}}}},
]  # fmt: skip
HELD: list[dict[str, object]] = [
    {"seed": 1}, {"budget": 0.6}, {"budget": "0.5000001"}, {"cache_dtype": "bfloat16"}, {"model": Fake(salt=1)},
    {"method": StreamingLLM(sinks=2)}, {"method": Full()}, {"prompts": [Prompt(0, "another")]},
    {"config": {"model": {"name": "fake", "sampling": {"cfg": 2}}, "method": {}}},
]  # fmt: skip


def test_identity_holds_what_changes_images_and_nothing_else(tmp_path: Path) -> None:
    plain = identity(job_in(tmp_path / "b"))
    for more in IGNORED:
        assert identity(job_in(tmp_path, **more)) == plain, more
    assert len({plain, *(identity(job_in(tmp_path, **more)) for more in HELD)}) == 1 + len(HELD)


def test_full_ignores_the_budget_but_not_nonsense(tmp_path: Path) -> None:
    folders = {
        execute.run(job_in(tmp_path, method=Full(), budget=budget, count=2)).folder for budget in (0.04, 1, 7)
    }
    assert len(folders) == 1
    with pytest.raises(ValueError, match=r"budget=2\.5"):
        execute.run(job_in(tmp_path, method=Full(), budget=2.5))


def test_a_budget_in_bytes(tmp_path: Path) -> None:
    """It is a run of its own, whose reference is that of budgets in tokens; bytes are those of one sequence."""
    outcome = execute.run(job_in(tmp_path, budget=0.75, budget_unit="bytes", cache_dtype="float16"))
    memory, spec = outcome.results.memory, Fake().spec
    assert outcome.folder.name.startswith("streaming_llm-0.75-bytes-")
    assert (memory.budget, memory.budget_unit, memory.allowed) == (0.75, "bytes", (0.75, "bytes"))
    assert memory.full_sequence_bytes == spec.full_bytes
    assert memory.budget_bytes == 0.75 * spec.full_bytes
    assert memory.budget_tokens == 0.75 * spec.full_tokens
    assert memory.sequence_bytes == memory.peak_tokens * 2 * spec.head_dim * 2 <= memory.budget_bytes
    assert 0.8 < memory.last_share <= 1
    assert not memory.exceeded
    tokens = execute.run(job_in(tmp_path, budget=0.75, cache_dtype="float16"))
    assert tokens.folder != outcome.folder
    assert tokens.results.reference == outcome.results.reference
    assert tokens.results.memory.budget_bytes is None
    assert images_of(tokens.folder) == images_of(outcome.folder)


def test_calibration_is_made_once_and_belongs_to_the_identity(tmp_path: Path) -> None:
    first = execute.run(job_in(tmp_path, method=HeatKV(sinks=1)))
    [artifact] = (tmp_path / "fake").glob("calibration-*.safetensors")
    made = artifact.stat().st_mtime_ns
    second = execute.run(job_in(tmp_path, method=HeatKV(sinks=1), budget=0.6))
    assert artifact.stat().st_mtime_ns == made
    provenance = json.loads((first.folder / "provenance.json").read_text())
    assert provenance["calibration_sha256"] == hashlib.sha256(artifact.read_bytes()).hexdigest()
    assert second.results.memory.peak_tokens <= second.results.memory.budget_tokens
    other = [Prompt(0, "something else")]
    assert identity(job_in(tmp_path, method=HeatKV(sinks=1), calibration_prompts=other)) != first.folder.name


GRAPHS: list[tuple[str, Method, dict[str, object], str]] = [
    ("cuda", Full(), {}, "on"),
    ("cuda", H2O(sinks=1), {}, "on"),
    ("cuda", Full(), {"cuda_graph": False}, "off: cuda_graph=false"),
    ("cpu", Full(), {}, "off: device=cpu has no CUDA graphs"),
    ("cuda", Full(), {"cache_dtype": "int4"}, "off: steps that read low-bit storage are not recorded"),
    ("cuda", AMSKV(), {}, "off: no scale of fake is recorded under method=AMSKV: " + AMSKV.graph_obstacle),
]  # fmt: skip


@pytest.mark.parametrize(("device", "method", "more", "expected"), GRAPHS)
def test_graphs_are_recorded_where_they_can_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    method: Method,
    more: dict[str, object],
    expected: str,
) -> None:
    monkeypatch.setattr("kvbench.runs.cache_plan.CudaGraphs", object)  # the real one asks the driver
    job = job_in(tmp_path, method=method)
    job = replace(job, settings=replace(job.settings, device=device, **more))
    assert (job.cache_plan.make_recorder() is not None) == (expected == "on")
    found = provenance("cpu", job.cache_plan.graph_obstacle)["cuda_graph"]
    assert found == expected
    if expected != "on" and "cuda_graph" not in more:
        with pytest.raises(ConfigError, match=f"^cuda_graph=true: {expected.removeprefix('off: ')}; "):
            check_job(replace(job, settings=replace(job.settings, cuda_graph=True)))


def test_method_that_keeps_too_much_is_stopped(tmp_path: Path) -> None:
    @dataclass
    class Greedy(StreamingLLM):
        def keep(self, view: View) -> Tensor:
            return torch.ones_like(view.position, dtype=torch.bool)

    with pytest.raises(BudgetExceeded, match=r"^method=Greedy: .* tokens held after layer"):
        execute.run(job_in(tmp_path, method=Greedy(sinks=1)))
    [status] = tmp_path.glob("fake/streaming_llm-*/status")
    assert status.read_text().startswith("failed: method=Greedy")


def test_only_missing_metrics_are_computed(tmp_path: Path) -> None:
    skipped = {"psnr": Psnr(), "broken": Broken()}
    first, job, again = execute.run(job_in(tmp_path)), job_in(tmp_path, evaluators=skipped), job_in(tmp_path)
    assert execute.run(again) == replace(first, reused=True)
    assert again.model.batches == []
    second = execute.run(job)
    assert second.folder == first.folder
    assert not second.reused
    assert job.model.batches == []
    assert second.results.metrics["psnr"] == first.results.metrics["psnr"]
    assert second.results.evaluated["broken"].status == "skipped"
    assert execute.run(job_in(tmp_path, evaluators=skipped)).reused
    third = execute.run(job_in(tmp_path, evaluators={**skipped, "broken": Broken(works=True)}))
    assert third.results.evaluated["broken"].status == "ok"
    assert third.results.metrics["broken"].value == 1


@pytest.mark.parametrize(
    ("entry", "works", "pending"),
    [
        (None, True, True),
        (Evaluated({"works": True}, "ok", "p"), True, False),
        (Evaluated({"works": False}, "ok", "p"), True, True),
        (Evaluated({"works": True}, "failed", "p"), True, True),
        (Evaluated({"works": True}, "skipped", "p"), True, False),
        (Evaluated({"works": True}, "skipped", "p", ("a file",)), True, True),
        (Evaluated({"works": True}, "skipped", "p", ("a file",)), False, False),
    ],
)
def test_an_evaluator_is_pending_if_its_result_is_not_current(
    entry: Evaluated | None, works: bool, pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "find_missing", lambda _: [] if works else ["a file"])
    known = made_up("m", 0.1, {}, evaluated={} if entry is None else {"psnr": entry})
    assert bool(find_pending({"psnr": Psnr()}, {"psnr": {"works": True}}, {"psnr": {}}, known)) == pending


@pytest.mark.parametrize("evaluator", [Psnr(), Lpips(path="nowhere.pth")])
def test_a_missing_requirement_stops_a_run(tmp_path: Path, evaluator: Evaluator) -> None:
    job = job_in(tmp_path / "runs", evaluators={evaluator.name: evaluator})
    job = replace(job, settings=replace(job.settings, require=("lpips",)))
    with pytest.raises(ConfigError, match=r"^require=lpips: (not in eval|weights missing: nowhere.pth)"):
        execute.run(job)
    assert job.model.batches == []
    assert not job.settings.runs_dir.exists()


def test_what_is_required_must_have_been_scored(tmp_path: Path) -> None:
    job = job_in(tmp_path, evaluators={"psnr": Psnr(), "broken": Broken()})
    required = replace(job, settings=replace(job.settings, require=("psnr",)))
    assert execute.run(required).results is not None
    reference = execute.run(replace(required, method=Full()))  # has no PSNR of its own
    assert reference.results is not None
    with pytest.raises(ConfigError, match=r"^require=broken: skipped \(not today\)"):
        execute.run(replace(job, settings=replace(job.settings, require=("broken",))))


def test_a_forgotten_budget_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for budget, told in ((0.5, False), (1, True)):
        check_job(job_in(tmp_path, budget=budget))
        assert ("budget=1 keeps everything" in caplog.text) == told


def test_a_method_without_budget_has_one_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scales of 1, 4, 9 and 16 tokens in 2 x 2 heads: condensed ones stay, the last cached one never comes in."""

    def draw(budget: float, **more: object) -> Outcome:
        method = ScaleGroups("local", condensed=1, local=1, **more)
        return execute.run(job_in(tmp_path, 2, method, method_name="scale_groups", budget=budget))

    first, again, other = draw(0.5), draw(0.25), draw(1, strict=True)
    assert "method=scale_groups has no budget: budget=0.5 changes nothing" in caplog.text
    assert first.folder.name.startswith("scale_groups-")
    assert again == replace(first, reused=True)
    assert not other.reused
    memory = first.results.memory
    assert (memory.budget, memory.full_tokens, memory.peak_tokens) == (1, 4 * 14, 4 * 5)
    assert (memory.last_tokens, memory.last_share) == (4 * 5, 5 / 14)
    assert memory.least_share == pytest.approx(5 / 14)
