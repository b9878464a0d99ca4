"""LlamaGen's transformer, sampling, loop, tokenizer and captions: equal to the official ones, run by run."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.core.segments import Segment
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.models import token_loop
from kvbench.models.base import Cache, NotFinite
from kvbench.models.llamagen.captions import clean_caption, clean_once
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.tokenizer import VQConfig
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.noise import Noise, PromptNoise
from kvbench.models.parts.sampling import TokenSampling, draw_token, guide, truncate
from tests.support.drawing import Recorded, Silence, close
from tests.support.engine import open_cache
from tests.support.reference import OneStream
from tests.support.reference_llamagen import (
    CONFIGS,
    FULL_VQ,
    GOLDEN,
    TINY_VQ,
    golden,
    meta,
    tokenizer,
    transformer,
)

near = partial(close, atol=2e-4)


def sampling_of(run: str) -> LlamaGenSampling:
    given = meta()["runs"][run]
    top_k = given.get("top_k", 0) if given["sample_logits"] else 1
    rest = {key: given[key] for key in ("cfg_interval", "temperature", "top_p") if key in given}
    return LlamaGenSampling(cfg=given["cfg_scale"], top_k=top_k, **rest)


def segments_of(config: LlamaGenConfig, chunk: int | None = None) -> tuple[Segment, ...]:
    return config.segments(config.condition, chunk)


def engine(
    config: LlamaGenConfig, branches: int, chunk: int | None = None, dtype: torch.dtype = torch.float32
) -> KVCache:
    spec = config.describe("tiny", segments_of(config, chunk), branches)
    return open_cache(Full(), spec, dtype=dtype)


def condition_of(model: LlamaGen, kind: str, guided: bool) -> Tensor:
    return model.cls_embedding(
        golden(kind)["cond"].to(model.norm.weight.dtype if kind == "t2i" else torch.long), guided=guided
    )


def generate(model: LlamaGen, kind: str, run: str, cache: Cache) -> Tensor:
    sampling = sampling_of(f"{kind}.{run}")
    condition = condition_of(model, kind, sampling.branches > 1)
    given = meta()["runs"][f"{kind}.{run}"]
    noise = OneStream(given["seed"], 2) if given["sample_logits"] else Silence(2)
    masked = kind == "t2i" and not run.startswith("nomask")  # else both captions have all tokens
    own = (120 - golden("t2i")["emb_masks"].sum(1)).tolist() if masked else [0, 0]
    padding = own * sampling.branches if kind == "t2i" else None
    return draw(model, condition, cache, noise, sampling, padding=padding)


def draw(
    model: LlamaGen, condition: Tensor, cache: Cache, noise: Noise, sampling: TokenSampling, **more: Any
) -> Tensor:
    segments = more.pop("segments", None) or segments_of(model.config)
    return token_loop.draw_tokens(
        model, condition, segments, cache, noise, token_loop.ImageHead(sampling), **more
    ).tokens


@pytest.mark.parametrize(("kind", "run"), [name.split(".") for name in meta()["runs"] if "bf16" not in name])
def test_conditions_give_tokens(kind: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected, sampling = transformer(kind), golden(kind), sampling_of(f"{kind}.{run}")
    seen = Recorded(model, monkeypatch)
    tokens = generate(model, kind, run, engine(CONFIGS[kind], sampling.branches))
    assert torch.equal(tokens, expected[f"{run}.tokens"])
    raw = torch.cat((expected[f"{run}.logits_prefill_raw"][:, -1:], expected[f"{run}.logits_decode_raw"]), 1)
    near(torch.stack(seen.logits, 1), raw)
    guided = [guide(logits, sampling, token) for token, logits in enumerate(seen.logits)]
    near(torch.stack(guided, 1), expected[f"{run}.logits_combined"])
    codes = tokenizer().codes(tokens.unflatten(1, (6, 6)))
    near(tokenizer().decode(codes), expected[f"{run}.img"])


@pytest.mark.parametrize("backends", [[SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]])
def test_bfloat16_gives_official_tokens(backends: list[SDPBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """The official tokens are fed, since one that is nearly a tie falls otherwise on CPUs with other vectors."""
    expected, choices = golden("c2i_bf16"), []
    raw = torch.cat((expected["logits_prefill_raw"], expected["logits_decode_raw"]), 1)

    def feed(logits: Tensor, sampling: TokenSampling, noise: Noise) -> Tensor:
        choices.append(draw_token(logits, sampling, noise))
        return expected["tokens"][:, len(choices) - 1]

    monkeypatch.setattr(token_loop, "draw_token", feed)
    model = transformer("c2i").bfloat16()
    seen = Recorded(model, monkeypatch)
    with sdpa_kernel(backends):
        generate(model, "c2i", "greedy", engine(CONFIGS["c2i"], 2, dtype=torch.bfloat16))
    near(torch.stack(seen.logits, 1), raw, atol=0.25)
    official = torch.stack(
        [guide(logits, sampling_of("c2i.greedy"), i) for i, logits in enumerate(raw.unbind(1))], 1
    )
    best = official.topk(2).values
    # Guidance makes (2 cfg - 1) times the bound above of it, for each of the two best.
    clear = best[..., 0] - best[..., 1] > 2 * 0.25 * (2 * sampling_of("c2i.greedy").cfg - 1)
    assert clear.any()
    found = torch.stack(choices, 1)
    assert torch.equal(found[clear], expected["tokens"][clear])
    assert (found == expected["tokens"]).float().mean() > 0.9


@pytest.mark.parametrize("setting", range(7))
def test_sampling_is_the_official_one(setting: int) -> None:
    given, expected = dict(meta()["sampler_combos"][setting]), golden("sampler")
    seed = given.pop("seed")
    sampling = LlamaGenSampling(cfg=1.0, **given)
    found = truncate(expected["logits"], sampling)
    assert torch.equal(found, expected[f"filtered.{setting}"])
    near(found.softmax(-1), expected[f"probs.{setting}"], atol=1e-6)
    drawn = draw_token(expected["logits"], sampling, OneStream(seed, 3))
    assert torch.equal(drawn, expected[f"idx.{setting}"][:, 0])


def test_logits_that_are_not_finite_are_named() -> None:
    model = transformer("c2i")
    model.cls_embedding.embedding_table.weight[4] = torch.nan
    condition = model.cls_embedding(torch.tensor([1, 4]), guided=False)
    with pytest.raises(NotFinite, match=r"prompt 1 of the batch, segment 0"):
        draw(model, condition, engine(model.config, 1), PromptNoise(0, (0, 1)), LlamaGenSampling(cfg=1.0))


def test_a_condition_has_no_keys_unless_they_are_kept() -> None:
    """Its factors are 0 as in the official table, or 1, and those of the image stay."""
    table, kept = (replace(CONFIGS["t2i"], condition_keys=keep).rotations(120 + 36) for keep in (False, True))
    assert (table[:120] == 0).all()
    assert (kept[:120] == 1).all()
    assert torch.equal(kept[120:], table[120:])


@pytest.mark.parametrize(
    ("config", "name"), [(TINY_VQ, "vq_tiny"), pytest.param(FULL_VQ, "vq_full", marks=pytest.mark.slow)]
)
def test_equals_the_official_tokenizer(config: VQConfig, name: str) -> None:
    model, expected = tokenizer(config), golden(name)
    latents = model.latents(expected["img_in"])
    close(latents, expected["z"])
    tokens = model.encode(latents)
    assert torch.equal(tokens.flatten(), expected["indices"])
    close(model.codes(tokens), expected["quant"])
    height, width = (side // config.networks.patch for side in expected["code_img"].shape[2:])
    close(model.decode(model.codes(expected["code"].unflatten(1, (height, width)))), expected["code_img"])


def test_captions_become_the_official_ones() -> None:
    pytest.importorskip("ftfy")
    for case in json.loads((GOLDEN / "captions.json").read_text()):
        assert clean_once(case["inp"]) == case["once"]
        assert clean_caption(case["inp"]) == case["out"]
    for caption in ("", "  ", "<b></b>", "@someone #12"):
        assert clean_caption(caption) == ""
