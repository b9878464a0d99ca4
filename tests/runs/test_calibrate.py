"""Calibration: equal to the official accumulator, all kinds in one pass; artifacts only fit what they belong to."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.cli import app as cli
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.core.settings import CalibrateSettings
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import CodebookTensors
from kvbench.methods.ams_kv import KeySimilarity
from kvbench.methods.hack.classes import ColumnVariance, HeadPatterns
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.pricekv.errors import SubsetError
from kvbench.methods.scalekv import AttentionSelectivity
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise, PromptNoise
from kvbench.prompts.base import Prompt
from kvbench.prompts.scenes import Scenes
from kvbench.runs import execute
from kvbench.runs.calibrate import calibrate, choose_calibration
from kvbench.runs.job import Job
from kvbench.runs.prepare import locate_calibration, observe
from tests.support.engine import open_cache
from tests.support.fake_run import SPEC as FAKE_SPEC
from tests.support.fake_run import Fake, job_in

D = 8
SPEC = ModelSpec("small", 2, 3, D, next_scale([(1, 1), (2, 2), (3, 3), (4, 4)]), logit_scale=0.5)


class Attending(Model):
    """Attends to random tokens: two rows per prompt, conditional ones first."""

    spec = SPEC

    def load(self, device: str) -> None:
        """There are no weights."""

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        rows = 2 * len(prompts)
        self.given = [
            [noise.draw(3 * 2 * SPEC.heads * s.length * D).view(len(prompts), 3, 2, SPEC.heads, s.length, D)
             for _ in range(SPEC.layers)]
            for s in SPEC.segments
        ]  # fmt: skip
        cache.reset(rows)
        for segment, layers in zip(SPEC.segments, self.given, strict=True):
            cache.begin(segment)
            for layer, qkv in enumerate(layers):
                cache.attend(layer, *qkv.permute(1, 2, 0, 3, 4, 5).flatten(1, 2).unbind(0))
        return torch.zeros(len(prompts), 1, 1, 3, dtype=torch.uint8)

    def mass(self, prompt: int) -> Tensor:
        """What the conditional row of a prompt paid, [L, H, K, K]."""
        mass = torch.zeros(SPEC.layers, SPEC.heads, 4, 4, dtype=torch.float64)
        for k in range(4):
            for layer in range(SPEC.layers):
                q = self.given[k][layer][prompt, 0, 0]
                keys = torch.cat([self.given[i][layer][prompt, 1, 0] for i in range(k + 1)], 1)
                paid = (q.double() @ keys.double().transpose(1, 2) * 0.5).softmax(-1).mean(1)
                parts = paid.split(SPEC.lengths[: k + 1], 1)
                mass[layer, :, k, : k + 1] = torch.stack([part.sum(1) for part in parts], 1)
        return mass


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_observer_equals_an_explicit_computation(prompts: int) -> None:
    observer, model = AttentionByScale(), Attending()
    cache = open_cache(observer, SPEC)
    expected = torch.zeros(SPEC.layers, SPEC.heads, 4, 4, dtype=torch.float64)
    for seed in range(2):
        model.generate(["a"] * prompts, cache, PromptNoise(seed, range(prompts)))
        expected += torch.stack([model.mass(prompt) for prompt in range(prompts)]).mean(0) / 2
    torch.testing.assert_close(observer.average()["mass"], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        observer.average()["mass"].sum(-1), torch.ones(SPEC.layers, SPEC.heads, 4).double()
    )


def test_calibrate_reports_progress_and_makes_a_usable_artifact() -> None:
    steps: list[int] = []
    lines = [Prompt(index, "x") for index in range(3)]
    (made,) = calibrate(Attending(), lines, [AttentionByScale()], 7, "cpu", steps.append)
    assert steps == [1, 1, 1]
    (again,) = calibrate(Attending(), lines, [AttentionByScale()], 7, "cpu", lambda _: None)
    assert torch.equal(made["mass"], again["mass"])
    method = HeatKV(1)
    method.prepare(SPEC, Budget.parse("0.5", SPEC), Artifact(AttentionByScale.kind, made))
    assert method.schedule.cached_after.max() <= method.budget.capacity


class OwnTokens(Observer):
    """Counts by how much codebooks of 8 bits miss the tokens that they are shown."""

    kind = "own_tokens"
    uses = Uses(codebooks=True)

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {"missed": ()}

    def accumulate(self, view: View) -> None:
        if not view.segment.last:
            keys, values = view.read_back(view.keys(), view.values(), view.segment, 8)
            self.sums["missed"] += (keys - view.keys()).square().sum() + (
                values - view.values()
            ).square().sum()


def test_codebooks_are_fitted_to_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[list[int]] = []
    fit = Codebooks.fit

    def note(observer: Codebooks, without: Sequence[int] = ()) -> dict[str, Tensor]:
        left_out.append(list(without))
        return fit(observer, without)

    monkeypatch.setattr(Codebooks, "fit", note)
    steps: list[int] = []
    lines = [Prompt(index, "x") for index in range(5)]
    (made,) = calibrate(Attending(), lines, [OwnTokens()], 7, "cpu", steps.append)
    assert sum(steps) == 5
    assert left_out == [[1, 3, 5], [2, 4]]  # counted from 1, as they are watched
    codebooks = [fit(watched(Codebooks(), lines[1 - fold :: 2])) for fold in range(2)]
    expected = 0.0
    for fold in range(2):
        expected += float(watched(OwnTokens(), lines[fold::2], codebooks[fold]).sums["missed"])
    assert float(made["missed"]) == pytest.approx(expected / 5)
    assert expected > 0


def watched(
    observer: Observer, lines: Sequence[Prompt], codebooks: CodebookTensors | None = None
) -> Observer:
    """Show an observer one prompt after the other."""
    cache = open_cache(observer, SPEC, codebooks=codebooks)
    for line in lines:
        Attending().generate([line.text], cache, PromptNoise(7, [line.index]))
    return observer


def test_every_prompt_is_watched_under_noise_of_its_own() -> None:
    class Recording(Attending):
        """Remembers the first numbers of every generation."""

        def __init__(self) -> None:
            self.drawn: list[Tensor] = []

        def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
            self.drawn.append(noise.draw(4))
            return super().generate(prompts, cache, noise)

    model = Recording()
    lines = [Prompt(index, "x") for index in (0, 1, 5)]
    calibrate(model, lines, [AttentionByScale()], 7, "cpu", lambda _: None)
    assert [drawn.tolist() for drawn in model.drawn] == [
        PromptNoise(7, [index]).draw(4).tolist() for index in (0, 1, 5)
    ]
    assert len({tuple(drawn.flatten().tolist()) for drawn in model.drawn}) == 3


def test_prompts_at_a_time_change_rounding_and_the_name_of_the_artifact(tmp_path: Path) -> None:
    found, names = [], set()
    for size in (1, 2, 3, 8):
        settings = replace(job_in(tmp_path).settings, calibrate=CalibrateSettings(batch_size=size))
        job = replace(job_in(tmp_path), settings=settings)
        job = replace(job, calibration_prompts=job.prompts[:3])
        job.model.load("cpu")
        found.append(observe(job, [AttentionByScale()])[0].tensors["mass"])
        names.add(locate_calibration(job, AttentionByScale())[0])
        assert job.model.batches == {1: [1, 1, 1], 2: [2, 1], 3: [3], 8: []}[size]  # 8 finds what 3 made
    for mass in found[1:]:
        torch.testing.assert_close(mass, found[0], atol=1e-6, rtol=1e-5)
    assert len(names) == 3


def test_too_large_a_batch_is_told_with_one_that_may_fit(tmp_path: Path) -> None:
    job = replace(
        job_in(tmp_path, model=Fake(max_prompts=2)), calibration_prompts=job_in(tmp_path).prompts[:8]
    )
    job.model.load("cpu")
    with pytest.raises(ConfigError, match=r"calibrate\.batch_size=8: .* set calibrate\.batch_size=4"):
        observe(job, [AttentionByScale()])


def every() -> list[Observer]:
    return [
        *(AttentionByScale(), AttentionSelectivity(), ColumnVariance(), HeadPatterns(), KeySimilarity()),
        SubsetError(),
    ]


def calibrating(path: Path, **more: object) -> Job:
    """A job whose model is loaded."""
    job = job_in(path, **more)
    job.model.load("cpu")
    return job


@pytest.mark.slow
def test_one_pass_makes_every_artifact(tmp_path: Path) -> None:
    job = calibrating(tmp_path / "runs")
    artifacts = observe(job, every())
    assert job.model.batches == [2]  # both prompts once, whatever is watched
    assert [artifact.kind for artifact in artifacts] == [
        "attention_by_scale", "attention_selectivity", "column_variance", "head_patterns", "key_similarity",
        "subset_error",
    ]  # fmt: skip
    for observer, artifact in zip(every(), artifacts, strict=True):
        path, metadata = locate_calibration(job, observer)
        assert path.is_file()
        assert artifact.metadata == metadata
        assert metadata["observer"] == repr(observer)
        [alone] = observe(calibrating(tmp_path / "alone"), [observer])
        assert {name: values.shape for name, values in artifact.tensors.items()} == observer.tensor_shapes(
            FAKE_SPEC
        )
        for name, values in artifact.tensors.items():
            assert values.dtype == torch.float64
            assert values.isfinite().all()
            assert values.abs().sum() > 0
            assert torch.equal(alone.tensors[name], values)
    assert len(list((tmp_path / "runs" / "fake").glob("calibration-*"))) == len(every())


def test_calibrations_are_reused_and_repeat_to_the_byte(tmp_path: Path) -> None:
    first, again = calibrating(tmp_path / "first"), calibrating(tmp_path / "again")
    observe(first, every()[:2])
    observe(first, every())
    assert first.model.batches == [2] * 2  # the second pass for the two that were missing
    observe(first, every())
    assert first.model.batches == [2] * 2
    observe(again, every())
    for observer in every():
        one, other = (locate_calibration(job, observer)[0].read_bytes() for job in (first, again))
        assert one == other


OTHERS: dict[str, dict[str, object]] = {
    "model": {"model": Fake(name="other")},
    "weights_sha256": {"model": Fake(salt=1)},
    "sizes": {"model": Fake(spec=replace(FAKE_SPEC, segments=next_scale([(1, 1), (2, 3), (3, 3), (4, 4)])))},
    "prompts": {"calibration_prompts": [Prompt(0, "calibration 0")]},
    "prompts_sha256": {"calibration_prompts": [Prompt(i, f"another {i}") for i in range(2)]},
}
SETTINGS: dict[str, tuple[Observer, Observer]] = {
    "queries": (AttentionSelectivity(), AttentionSelectivity(queries=8)),
    "strongest": (AttentionSelectivity(), AttentionSelectivity(strongest=0.1)),
    "metric": (KeySimilarity(), KeySimilarity(metric="neg_l2")),
    "resize": (KeySimilarity(), KeySimilarity(resize="nearest")),
}
FOREIGN = [
    *((observer, observer, field, more) for field, more in OTHERS.items() for observer in every()[-2:]),
    *((own, other, f"observer=.*, this run has .*{field}", {}) for field, (own, other) in SETTINGS.items()),
]


@pytest.mark.parametrize(("observer", "wanted", "field", "more"), FOREIGN)
def test_a_calibration_of_something_else_is_neither_found_nor_taken(
    observer: Observer, wanted: Observer, field: str, more: dict[str, object], tmp_path: Path
) -> None:
    own, other = calibrating(tmp_path), calibrating(tmp_path, **more)
    observe(own, [observer])
    (mine, _), (theirs, _) = locate_calibration(own, observer), locate_calibration(other, wanted)
    assert mine != theirs
    theirs.parent.mkdir(exist_ok=True)
    shutil.copy(mine, theirs)
    with pytest.raises(ConfigError, match=rf"made for {field}=.*calibrate again"):
        observe(other, [wanted])


def test_a_calibration_of_one_kind_is_not_taken_for_another(tmp_path: Path) -> None:
    job = calibrating(tmp_path)
    observe(job, every())
    for observer, next_one in zip(every()[-2::-1], every()[:0:-1], strict=True):
        (mine, _), (theirs, _) = (locate_calibration(job, one) for one in (observer, next_one))
        shutil.copy(mine, theirs)
        with pytest.raises(ConfigError, match=f"made for kind='{observer.kind}'"):
            observe(job, [next_one])


@pytest.mark.slow
def test_the_command_makes_every_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "task=calibrate model=var_tiny prompts=imagenet prompts.classes=[0,1,2] calibrate.count=2"
    monkeypatch.setattr("sys.argv", ["run.py", *words.split()])
    cli.main()
    lines = [line.split(": ") for line in capsys.readouterr().out.splitlines() if "calibration-" in line]
    others = {"attention_spread", "budget_shares", "layer_entropies", "position_importance", "score_errors"}
    of_variants = {"subset_error"}
    assert {kind for kind, _ in lines} == {observer.kind for observer in every()} - of_variants | others
    assert all((tmp_path / path).is_file() for _, path in lines)


def test_overlap_of_calibration_prompts_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "own.txt"
    file.write_text("a dog\na cat\na red circle\n")
    settings = CalibrateSettings(count=2, prompts=str(file))
    with caplog.at_level("WARNING"):
        chosen = choose_calibration(settings, Scenes(4), [Prompt(0, "a bird")])
        assert [prompt.text for prompt in chosen] == ["a dog", "a cat"]
        assert not caplog.records
        choose_calibration(settings, Scenes(4), [Prompt(0, "a cat")])
    assert "1 of its 2 prompts are evaluated too, such as 'a cat'" in caplog.text
    with pytest.raises(ConfigError, match=r"^calibrate\.prompts.*nowhere.txt: cannot be read"):
        choose_calibration(CalibrateSettings(prompts=str(tmp_path / "nowhere.txt")), Scenes(4), [])
    with pytest.raises(ConfigError, match=r"^calibrate\.count=4: .* has 3 prompts; set calibrate\.count=3$"):
        choose_calibration(replace(settings, count=4), Scenes(4), [])


def test_nothing_to_calibrate_on_is_told_before_weights_are_read(tmp_path: Path) -> None:
    job = job_in(tmp_path, method=HeatKV(1), calibration_prompts=[])
    with pytest.raises(ConfigError, match=r"^calibrate\.prompts=null: the set has no prompt left"):
        execute.run(job)
    assert not list(tmp_path.iterdir())
