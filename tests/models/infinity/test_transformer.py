"""Infinity's transformer and its loop: equal to the official program, and to itself however it is run."""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.full import Full
from kvbench.models.base import NotFinite, TextFeatures
from kvbench.models.infinity import loop as generation
from kvbench.models.infinity.loop import draw_bit_scales, make_features
from kvbench.models.infinity.sampling import Sampling, probabilities
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.noise import PromptNoise
from kvbench.models.parts import cross_attention
from kvbench.models.parts.cross_attention import TextKeys
from tests.support.engine import open_cache
from tests.support.reference import OneStream, note_results, packed
from tests.support.reference_infinity import read_shape
from tests.support.reference_llamagen import PlainCache

grow = partial(PlainCache, lambda *_: True, scale=1.0)
"""A cache of which a scale sees all of itself."""


def transformer(name: str, grid: tuple[int, int] = (6, 6)) -> tuple[Infinity, BSQ]:
    config, vae = read_shape(name, grid)
    model = Infinity(config)
    model.load_state_dict(packed(f"{name}.weights")[0])
    return model.eval(), vae


class Forced(NamedTuple):
    """A tokenizer that takes the given bits [B, h, w, d] of each scale for those drawn."""

    vae: BSQ
    bits: list[Tensor]

    @property
    def config(self) -> BSQConfig:
        return self.vae.config

    def add(self, summed: Tensor, bits: Tensor, scale: int) -> Tensor:
        return self.vae.add(summed, self.bits[scale], scale)


def rerun(
    model: str, case: str, *, rounding: str = "", engine: bool = False
) -> tuple[dict[str, Tensor], Tensor, BSQ]:
    """One case run again: reference tensors, the sum of codes, the tokenizer."""
    expected, meta = packed(f"{model}.{case}")
    sizes = [(height, width) for _, height, width in meta["scale_schedule"]]
    grid = (78, 52) if "r1500" in case else (6, 6) if sizes[-1][0] == sizes[-1][1] else (6, 5)
    net, vae = transformer(model, grid)
    if rounding == "all":
        net.block_chunks.to(torch.bfloat16)
    text = TextFeatures(expected["in.kv_compact"], tuple(expected["in.lens"].tolist()))
    negative = None
    if "in.neg_kv_compact" in expected:
        negative = TextFeatures(expected["in.neg_kv_compact"], tuple(expected["in.neg_lens"].tolist()))
    sampling = Sampling(
        meta["cfg_list"], meta["tau_list"], meta["top_k"], meta["top_p"] or 1.0, meta["cfg_insertion_layer"]
    )
    codes = (
        Forced(vae, [expected[f"s{i}.bits_vae"][:, 0].bool() for i in range(len(sizes))]) if rounding else vae
    )
    noise, segments = OneStream(meta["seed"], len(text.lengths)), next_scale(sizes)
    config = net.config
    spec = ModelSpec("golden", config.depth, config.heads, config.width // config.heads, segments, 2)
    cache = open_cache(Full(), spec, dtype=net.compute) if engine else grow()
    summed = draw_bit_scales(net, codes, text, segments, cache, noise, sampling, negative=negative)
    return expected, summed, vae


@pytest.mark.parametrize(
    ("model", "case"),
    [*product(("ar_2b", "ar_8b"), ("greedy", "sampled")),
     *product(("ar_2b",), ("neg_insert", "nocfg_prefix", "real_r1500_006M"))],
)  # fmt: skip
def test_equals_the_official_program(model: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, seen = (note_results(monkeypatch, generation, name) for name in ("draw_bits", "compute_logits"))
    expected, summed, vae = rerun(model, case)
    for i, (logits, bits) in enumerate(zip(seen, drawn, strict=True)):
        torch.testing.assert_close(logits, expected[f"s{i}.logits"], atol=2e-4, rtol=0)
        assert torch.equal(bits.byte(), expected[f"s{i}.sampled_bits"]), f"bits of scale {i}"
        if f"s{i}.filtered_prob1" in expected:
            sampling = Sampling(top_p=0.97)
            kept = probabilities(logits.unflatten(-1, (-1, 2)), sampling)[..., 1]
            torch.testing.assert_close(kept, expected[f"s{i}.filtered_prob1"], atol=1e-4, rtol=0)
    torch.testing.assert_close(summed, expected["summed_codes"], atol=1e-5, rtol=0)
    with torch.inference_mode():
        image = ((vae.decode(summed) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1).flip(3)
    assert (image.int() - expected["image_u8_bgr"].int()).abs().max() <= 1


def test_text_attention_in_bf16_rounds_officially(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(*given: Any) -> TextKeys:
        return TextKeys(*(part.bfloat16() for part in inner(*given)))

    seen, inner = note_results(monkeypatch, generation, "compute_logits"), cross_attention.project_text
    monkeypatch.setattr(cross_attention, "project_text", project)
    expected, _, _ = rerun("ar_2b", "ca_bf16_forced", rounding="text")
    for i, logits in enumerate(seen):
        torch.testing.assert_close(logits, expected[f"s{i}.logits"], atol=0.05, rtol=0)


@pytest.mark.parametrize("engine", [False, True])
def test_bf16_blocks_follow_the_official_rounding(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = note_results(monkeypatch, generation, "compute_logits")
    expected, _, _ = rerun("ar_2b", "amp_bf16_forced", rounding="all", engine=engine)
    # torch's attention in bf16 rounds its float32 sums by the CPU's vectors: those of AVX2 differ from those that made
    # the tensors from the third scale on, where one bit of bf16 changes a logit by up to a quarter.
    for i, logits in enumerate(seen):
        same = i < (1 if engine else 2)
        torch.testing.assert_close(logits, expected[f"s{i}.logits"], atol=1e-3 if same else 0.35, rtol=0)


SIZES = [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6)]


def random_text(seed: int, lengths: tuple[int, ...]) -> TextFeatures:
    generator = torch.Generator().manual_seed(seed)
    return TextFeatures(torch.randn(sum(lengths), 256, generator=generator), lengths)


@pytest.mark.parametrize("model", ["ar_2b", "ar_8b"])
@given(
    seed=st.integers(0, 10**6),
    later=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
@settings(max_examples=8, deadline=None)
def test_a_pass_equals_steps(model: str, seed: int, later: list[tuple[int, int]], lengths: list[int]) -> None:
    sizes = [(1, 1), *later]
    net, vae = transformer(model)
    segments = next_scale(sizes)
    patch = 2 if model == "ar_8b" else 1
    text = random_text(seed, tuple(lengths))
    generator = torch.Generator().manual_seed(seed)
    forced = [
        torch.rand(len(lengths), h * patch, w * patch, vae.config.bits, generator=generator) < 0.5
        for h, w in sizes
    ]
    with pytest.MonkeyPatch.context() as patched:
        stepped = note_results(patched, generation, "compute_logits")
        noise = PromptNoise(0, range(len(lengths)))
        draw_bit_scales(net, Forced(vae, forced), text, segments, grow(), noise, Sampling(cfg=1.0))
    grid = (sizes[-1][0] * patch, sizes[-1][1] * patch)
    summed = torch.zeros(len(lengths), vae.config.bits, *grid)
    features = [torch.empty(len(lengths), 0, net.config.token_channels)]
    with torch.inference_mode():
        for segment, bits in zip(segments[:-1], forced, strict=False):
            summed = vae.add(summed, bits, segment.index)
            features.append(make_features(summed, segments[segment.index + 1], patch))
        values, mask = text.pad(max(lengths))
        at_once = net(values, mask, torch.cat(features, 1), segments)
    torch.testing.assert_close(at_once, torch.cat(stepped, 1), atol=2e-4, rtol=1e-4)


def test_logits_that_are_not_finite_are_refused() -> None:
    net, vae = transformer("ar_2b")
    text = random_text(1, (4, 2))
    text.values[5] = torch.nan
    with pytest.raises(NotFinite, match="prompt 1 of the batch, segment 0"):
        draw_bit_scales(net, vae, text, next_scale(SIZES), grow(), PromptNoise(0, (0, 1)), Sampling())
