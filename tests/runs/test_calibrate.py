"""Calibration: equal to the official accumulator, all kinds in one pass; artifacts only fit what they belong to."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

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
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise, PromptNoise
from kvbench.prompts.base import Prompt
from kvbench.prompts.scenes import Scenes
from kvbench.runs import execute
from kvbench.runs.calibrate import calibrate, choose_calibration, load_artifact
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


def test_the_observer_equals_an_explicit_computation() -> None:
    observer, model = AttentionByScale(), Attending()
    cache = open_cache(observer, SPEC)
    expected = torch.zeros(SPEC.layers, SPEC.heads, 4, 4, dtype=torch.float64)
    for seed in range(2):
        model.generate(["a"] * 3, cache, PromptNoise(seed, range(3)))
        expected += torch.stack([model.mass(prompt) for prompt in range(3)]).mean(0) / 2
    torch.testing.assert_close(observer.average()["mass"], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        observer.average()["mass"].sum(-1), torch.ones(SPEC.layers, SPEC.heads, 4).double()
    )


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
    lines = [Prompt(index, "x") for index in (0, 1, 2, 5, 9)]  # which decide the noise
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


def test_calibrations_are_reused_and_repeat_to_the_byte(tmp_path: Path) -> None:
    first, again = calibrating(tmp_path / "first"), calibrating(tmp_path / "again")
    observe(first, every()[:2])
    observe(first, every())
    assert first.model.batches == [2] * 2  # the second pass for the two that were missing
    observe(first, every())
    assert first.model.batches == [2] * 2
    for observer, made in zip(every(), observe(again, every()), strict=True):
        one, other = (locate_calibration(job, observer)[0].read_bytes() for job in (first, again))
        assert one == other
        assert (made.kind, made.metadata) == (observer.kind, locate_calibration(again, observer)[1])
        shapes = {name: values.shape for name, values in made.tensors.items()}
        assert shapes == observer.tensor_shapes(FAKE_SPEC)
        for values in made.tensors.values():
            assert values.dtype == torch.float64
            assert values.isfinite().all()
            assert values.abs().sum() > 0


OTHERS: dict[str, dict[str, object]] = {
    "model": {"model": Fake(name="other")},
    "weights_sha256": {"model": Fake(salt=1)},
    "sizes": {"model": Fake(spec=replace(FAKE_SPEC, segments=next_scale([(1, 1), (2, 3), (3, 3), (4, 4)])))},
    "prompts": {"calibration_prompts": [Prompt(0, "calibration 0")]},
    "prompts_sha256": {"calibration_prompts": [Prompt(i, f"another {i}") for i in range(2)]},
}
FOREIGN: list[tuple[Observer, Observer, str, dict[str, object]]] = [
    *((KeySimilarity(), KeySimilarity(), field, more) for field, more in OTHERS.items()),
    (AttentionSelectivity(), KeySimilarity(), "kind", {}),
    (AttentionSelectivity(), AttentionSelectivity(queries=8), "observer=.*, this run has .*queries", {}),
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


def test_a_calibration_has_the_noise_of_its_run(tmp_path: Path) -> None:
    jobs = [calibrating(tmp_path, noise=noise) for noise in ("stream", "counter")]
    assert len({locate_calibration(job, AttentionByScale())[0] for job in jobs}) == 2
    one, other = (observe(job, [AttentionByScale()])[0].tensors["mass"] for job in jobs)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("bare", [False, True])
def test_an_unreadable_artifact_is_refused(bare: bool, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    if bare:
        save_file({"mass": torch.zeros(1)}, path)
    else:
        path.write_bytes(b"not a calibration at all")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_artifact(path, AttentionByScale.kind, {})


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
