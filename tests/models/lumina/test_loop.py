"""Lumina-mGPT's language model and loop: equal to the official ones, run by run, on the engine, and however padded."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.kernels.qk_norm_rope import rotate
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.headkv import HeadKV
from kvbench.methods.snapkv import SnapKV
from kvbench.models.base import Cache
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import check
from kvbench.models.image_loop import draw_image_tokens
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.sampling import LuminaSampling
from kvbench.models.lumina.tokenizer import Chameleon
from kvbench.models.lumina.transformer import Lumina, LuminaConfig
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.image_lines import forbid
from kvbench.models.parts.rotary import rotate_line
from kvbench.models.parts.sampling import guide, truncate
from kvbench.models.parts.tokens import lay_out
from tests.support.drawing import Recorded, Silence, close
from tests.support.engine import open_cache, prepared
from tests.support.reference import OneStream
from tests.support.reference_llamagen import PlainCache
from tests.support.reference_lumina import (
    CONFIGS,
    TINY_VQ,
    golden,
    language_model,
    meta,
    official_state,
    prompt_of,
    read_numbers,
    tokenizer,
)

RUNS = list(meta()["cases"])
TOKENS = 4 * 7
GREEDY = LuminaSampling(cfg=4.0, top_k=1)


def spec_of(config: LuminaConfig, capacity: int, branches: int = 2) -> ModelSpec:
    return config.describe("tiny", config.segments(capacity), branches, equal_branches=branches == 1)


def engine(capacity: int, branches: int = 2) -> KVCache:
    return open_cache(Full(), spec_of(CONFIGS["lm"], capacity, branches))


def forbidden(token: int) -> Tensor:
    codes = F.pad(golden()["bpe2img"], (0, 8832 - 8196), value=-1)
    return forbid(codes, 8803, 7)(token)


def draw(
    model: Lumina, prompts: Sequence[str], room: int, cache: Cache, noise: object, sampling: LuminaSampling
) -> Tensor:
    rows, padding = lay_out(prompts, read_numbers(), room, guided=sampling.branches > 1)
    given = (model, model.embed(rows), model.config.segments(room), cache, noise, sampling)
    return draw_image_tokens(*given, padding=padding, forbidden=forbidden)


def halves_as_pairs(x: Tensor) -> Tensor:
    """Channels in the order of this project: every score is the same."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize("run", RUNS)
def test_prompts_give_the_official_tokens(run: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected, model = meta()["cases"][run], golden(), language_model()
    seen = Recorded(model, monkeypatch)
    prompt, start = prompt_of(run), len(given["forced"])
    room, greedy = len(prompt.split()), given["mode"] == "greedy"
    settings = LuminaSampling(given["cfg"], temperature=given["temperature"], top_k=given["image_top_k"])
    sampling = replace(settings, top_k=1) if greedy else settings
    noise = Silence() if greedy else OneStream(given["seed"], 1)
    cache = PlainCache() if plain else engine(room, sampling.branches)
    tokens = draw(model, [prompt], room, cache, noise, sampling)
    assert torch.equal(tokens[0], expected[f"{run}.tokens"][start : start + TOKENS])
    guided = [guide(logits, settings, token) for token, logits in enumerate(seen.logits)]
    masked = [one.masked_fill(forbidden(token), -math.inf) for token, one in enumerate(guided)]
    kept = torch.stack([truncate(one, settings).isfinite().sum() for one in masked])
    assert torch.equal(kept, expected[f"{run}.kept_counts"][start : start + TOKENS])
    hidden = torch.stack(seen.hidden, 1)
    for row, branch in enumerate(("cond", "uncond")):
        if f"{run}.{branch}_hidden" in expected:
            close(hidden[row], expected[f"{run}.{branch}_hidden"][start : start + TOKENS], 1e-5)
    for step in (0, 7):
        if f"{run}.step{step}.raw" in expected:
            close(seen.logits[step][0], expected[f"{run}.step{step}.raw"])
            close(guided[step][0], expected[f"{run}.step{step}.cfg"])
            best = expected[f"{run}.step{step}.topk"]
            found = truncate(masked[step], settings)[0]
            assert torch.equal(found.isfinite(), best.isfinite())
            close(found[found.isfinite()], best[best.isfinite()])
    if plain and f"{run}.cond.cache_k0" in expected:
        check_cached(cache.past, run, room)
    images = tokenizer().decode(tokenizer().codes(golden()["bpe2img"][tokens.view(1, 4, 7)[..., :-1]]))
    pixels = ((images.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (pixels[0].int() - expected[f"{run}.image_u8"].int()).abs().max() <= 1


def check_cached(past: dict[int, tuple[Tensor, Tensor]], run: str, room: int) -> None:
    """What was cached is official; the other branch, whose positions begin where its tokens do, has been turned on."""
    table = rotate_line(room, 8, 10000.0)
    for row, (branch, padding) in enumerate((("cond", 0), ("uncond", room - 3))):
        for layer in (0, 1):
            k, v = (part[row : row + 1, :, padding:] for part in past[layer])
            count = k.shape[2]
            close(v, golden()[f"{run}.{branch}.cache_v{layer}"][:, :, :count], 1e-5)
            turned_back = rotate(k.transpose(1, 2), table[padding : padding + 1, None].conj()).transpose(1, 2)
            close(
                turned_back, halves_as_pairs(golden()[f"{run}.{branch}.cache_k{layer}"][:, :, :count]), 1e-5
            )


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize("kind", ["mp2_gqa", "swin"])
def test_rarer_models_give_the_official_logits(kind: str, plain: bool) -> None:
    model, config = language_model(kind), CONFIGS[kind]
    ids, found = golden()[f"{kind}.ids"], []
    segments = next_token(4, [3, 2])
    spec = config.describe("rare", segments, 1)
    cache = PlainCache() if plain else open_cache(Full(), spec)
    cache.reset(len(ids))
    rotation = model.rotations(9)
    for segment in segments:
        cache.begin(segment)
        size = 1 if segment.index else segment.length
        for start in range(segment.start, segment.end, size):
            part = slice(start, start + size)
            found.append(model.logits(model(model.embed(ids[:, part]), rotation[part], cache.attend)))
    close(torch.cat(found, 1), golden()[f"{kind}.logits"], 1e-5)


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize("room", [14, 17])
def test_unequal_prompts_are_drawn_as_alone(room: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    seen = Recorded(model, monkeypatch)
    official = prompt_of("greedy_cfg4")
    words = official.split()
    prompts = [" ".join(words[:2] + words[6:]), official, " ".join(words[:5] * 2 + words[6:])]
    assert [len(prompt.split()) for prompt in prompts] == [6, 10, 14]
    tokens = draw(model, prompts, room, PlainCache() if plain else engine(room), Silence(), GREEDY)
    together = torch.stack(seen.logits)
    assert torch.equal(tokens[1], golden()["greedy_cfg4.tokens"][:TOKENS])
    for index, prompt in enumerate(prompts):
        seen.logits.clear()
        own = len(prompt.split())
        alone = draw(model, [prompt], own, PlainCache(), Silence(), GREEDY)
        assert torch.equal(alone[0], tokens[index])
        close(together[:, index::3], torch.stack(seen.logits))


def test_a_method_draws_the_same_of_a_prompt_in_any_batch() -> None:
    model, room, found = language_model(), 12, []
    words = prompt_of("greedy_cfg4").split()
    prompts = [" ".join(words), " ".join(words[:3] + words[6:])]
    for chosen in ([0, 1], [0], [1]):
        spec = spec_of(CONFIGS["lm"], room)
        cache = open_cache(H2O(sinks=1), spec, "0.7")
        noise = PromptNoise(0, chosen)
        found.append(draw(model, [prompts[i] for i in chosen], room, cache, noise, LuminaSampling()))
    assert torch.equal(found[0], torch.cat(found[1:]))


def test_deciders_for_both_branches_are_refused() -> None:
    spec = spec_of(CONFIGS["lm"], 12)
    for method in (
        SnapKV(branch_mode="mean"),
        H2O(branch_mode="conditional"),
        HeadKV(sinks=1, branch_mode="mean"),
    ):
        message = (
            rf"^method\.branch_mode={method.branch_mode}: .*unequal length; use method\.branch_mode=per_row$"
        )
        with pytest.raises(ValueError, match=message):
            prepared(method, spec, "0.7")
    unguided = spec_of(CONFIGS["lm"], 12, branches=1)
    prepared(SnapKV(branch_mode="mean"), unguided, "0.7")


def test_a_rectangle_is_decoded_as_officially() -> None:
    codes = tokenizer().codes(golden()["vq.codes_4x6"].view(1, 4, 6))
    close(tokenizer().decode(codes), golden()["vq.pixels"], 1e-5)


def test_truncation_comes_before_the_temperature() -> None:
    logits = torch.tensor([[4 - 2**-21, 4 - 3 * 2**-22, 1.0]])  # equal once divided by 3
    assert logits[0, 0] > logits[0, 1]
    assert (logits / 3)[0, 0] == (logits / 3)[0, 1]
    kept = truncate(logits, LuminaSampling(temperature=3.0, top_k=1))
    assert kept.isfinite().tolist() == [[True, False, False]]
    assert kept[0, 0] == logits[0, 0] / 3


def test_queries_and_keys_are_rounded_once() -> None:
    model = Lumina(replace(CONFIGS["lm"], depth=1)).requires_grad_(False).bfloat16()
    generator = torch.Generator().manual_seed(0)
    attention = model.layers[0].attention
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data = (1 + 0.3 * torch.randn(32, generator=generator)).bfloat16()
        norm.bias.data = (0.3 * torch.randn(32, generator=generator)).bfloat16()
    x, seen = torch.randn(2, 9, 32, generator=generator).bfloat16(), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, plain: object) -> Tensor:
        seen.extend((q, k, v))
        return torch.zeros_like(q)

    attention(x, 0, model.rotations(9), attend)
    projected = (x @ attention.wqkv.weight.T).unflatten(-1, (3, 4, 8))
    angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (part.bfloat16().float()[:, None] for part in (angles.cos(), angles.sin()))
    for found, part, norm in ((seen[0], 0, attention.q_norm), (seen[1], 1, attention.k_norm)):
        one = projected[:, :, part].float()
        one = (one - one.mean(-1, keepdim=True)) * torch.rsqrt(one.var(-1, keepdim=True, correction=0) + 1e-5)
        one = one * norm.weight.float().view(4, 8) + norm.bias.float().view(4, 8)
        even, odd = one[..., ::2], one[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        assert found.dtype == torch.bfloat16
        # Rounded at every step they would differ by several units in the last place.
        torch.testing.assert_close(found.transpose(1, 2), turned.bfloat16(), rtol=2**-7, atol=0)
        assert (found.transpose(1, 2) == turned.bfloat16()).float().mean() > 0.99
    assert torch.equal(seen[2].transpose(1, 2), projected[:, :, 2])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_norms_of_every_published_form_are_read(rows: int) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    values = torch.arange(rows * 8.0).view(rows, 8)
    found = clean_lumina({name: values}, CONFIGS["lm"])["layers.0.attention.q_norm.weight"].view(4, 8)
    for head in range(4):
        assert torch.equal(found[head], halves_as_pairs(values[head * rows // 4]))


def test_the_state_of_another_model_does_not_fit() -> None:
    config = CONFIGS["lm"]
    model = Lumina(config)
    state = official_state("lm")
    check(
        clean_lumina({**state, "model.vqmodel.encoder.conv_in.bias": torch.zeros(2)}, config),
        model,
        "weights",
    )
    norm = "model.layers.0.self_attn.q_norm.weight"
    key = "model.layers.0.self_attn.k_proj.weight"
    for change, message in (
        ({norm: torch.zeros(3, 8)}, r"layers\.0\.attention\.q_norm\.weight is \(3, 8\), should be \(32,\)"),
        ({norm: torch.zeros(1, 16)}, r"q_norm\.weight is \(1, 16\)"),
        ({norm: torch.zeros(0, 8)}, r"q_norm\.weight is \(0, 8\), should be \(32,\)"),
        ({key: torch.zeros(32, 31)}, r"unexpected layers\.0\.self_attn\.k_proj\.weight \(32, 31\)"),
        ({key: torch.zeros(())}, r"unexpected layers\.0\.self_attn\.k_proj\.weight \(\)"),
        ({"norm.weight": torch.zeros(32)}, r"unexpected norm\.weight \(outside model\.\) \(32,\)"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}, r"unexpected layers\.2\.feed_forward\.w3"),
        ({"lm_head.weight": torch.zeros(5, 32)}, r"output\.weight is \(5, 32\)"),
    ):
        with pytest.raises(WeightsError, match=message):
            check(clean_lumina({**state, **change}, config), model, "weights")
    for lacking in ("lm_head.weight", norm, "model.layers.1.self_attn.k_proj.weight"):
        left = clean_lumina({name: tensor for name, tensor in state.items() if name != lacking}, config)
        with pytest.raises(WeightsError, match="missing"):
            check(left, model, "weights")
    vq = {name: tensor for name, tensor in official_state("vqgan").items() if "mid.attn_1.k" not in name}
    with pytest.raises(WeightsError, match=r"missing decoder\.mid\.attn_1\.qkv\.bias"):
        check(clean_chameleon(vq), Chameleon(TINY_VQ), "tokenizer")
