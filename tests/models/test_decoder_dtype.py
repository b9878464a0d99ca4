"""Images decoded in 16 bits: near those in float32, of the same latents, and of a run of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.models.noise import PromptNoise
from kvbench.runs.job import Job
from tests.support import reference_janus, reference_lumina
from tests.support.fake_run import job_in
from tests.support.marks import slow_but_every
from tests.support.small_models import SMALL_TOKENIZER, configured, full, load, shrink

LLAMAGEN = shrink("llamagen_b", *SMALL_TOKENIZER, heads=2, vocabulary=128, grid=[3, 4], classes=10)
MODELS = {
    "llamagen": (LLAMAGEN, "3"),
    "janus": (reference_janus.SMALL, "a red circle"),
    "lumina": (reference_lumina.SMALL, "a red circle"),
    "infinity": (("model=infinity_tiny",), "a red circle"),
    "var": (("model=var_tiny",), "3"),
}
HALF = "model.decoder_dtype=bfloat16"


def draw(one: Any, prompt: str) -> torch.Tensor:
    return one.generate([prompt], full(one), PromptNoise(0, (0,)))


@pytest.mark.parametrize("name", slow_but_every(5, MODELS))
def test_pixels_are_near_those_in_single_precision(name: str) -> None:
    overrides, prompt = MODELS[name]
    single, half = load(*overrides), load(*overrides, HALF)
    exact, found = draw(single, prompt).double(), draw(half, prompt).double()
    decibels = 10 * (255**2 / (exact - found).square().mean()).log10()
    assert 40 < decibels < torch.inf
    decoder = half._tokenizer.decoder
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert decoder.conv_in.conv.weight.is_contiguous(memory_format=torch.channels_last)
    others = {p.dtype for n, p in half._tokenizer.named_parameters() if not n.startswith("decoder.")}
    assert others <= {torch.float32}


def test_half_as_many_bytes_are_planned() -> None:
    single, half = configured(*LLAMAGEN), configured(*LLAMAGEN, HALF)
    assert half.decoding_bytes(3) * 2 == single.decoding_bytes(3)


def test_only_another_dtype_is_part_of_a_runs_name(tmp_path: Path) -> None:
    job = job_in(tmp_path)

    def settings(**more: str) -> object:
        model = {**job.section("model"), **more}
        changed: Job = replace(job, config={**job.config, "model": model})
        return changed.model_settings

    assert settings(decoder_dtype="float32") == settings()
    assert settings(decoder_dtype="bfloat16") != settings()
