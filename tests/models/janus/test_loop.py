"""Janus-Pro's language model and loop: equal to the official ones, run by run, on the engine, and however padded."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.models.base import Cache
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.llama_files import pair_neighbours
from kvbench.models.files.parameters import check
from kvbench.models.image_loop import draw_image_tokens
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.transformer import Janus, JanusConfig
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.sampling import guide, truncate
from kvbench.models.parts.tokens import lay_out
from tests.support.drawing import Recorded, Silence, close
from tests.support.engine import open_cache
from tests.support.reference import OneStream
from tests.support.reference_janus import (
    CONFIGS,
    golden,
    language_model,
    meta,
    official_state,
    prompt_of,
    read_numbers,
    tokenizer,
)
from tests.support.reference_llamagen import PlainCache

GREEDY = LlamaGenSampling(cfg=5.0, top_k=1)


def engine(config: JanusConfig, capacity: int) -> KVCache:
    return open_cache(Full(), config.describe("tiny", config.segments(capacity), 2))


def draw(
    model: Janus, prompts: Sequence[str], room: int, cache: Cache, noise: object, sampling: LlamaGenSampling
) -> Tensor:
    rows, padding = lay_out(prompts, read_numbers(), room, guided=True)
    condition = model.tok_embeddings(rows)
    return draw_image_tokens(
        model, condition, model.config.segments(room), cache, noise, sampling, padding=padding
    )


def in_turns(x: Tensor, dim: int) -> Tensor:
    """Sequences of both branches in turns, as the official program has them, out of one branch after the other."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


RUNS = [name.split(".") for name in meta()["cases"]]


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_prompts_give_tokens(kind: str, run: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected, model = meta()["cases"][f"{kind}.{run}"], golden(kind), language_model(kind)
    seen = Recorded(model, monkeypatch)
    prompts, room = [prompt_of(kind, run)] * given["B"], len(expected[f"{run}.prompt"])
    greedy = given["mode"] == "greedy"
    sampling = LlamaGenSampling(given["cfg"], temperature=given["temperature"], top_k=int(greedy))
    noise = Silence() if greedy else OneStream(given["seed"], given["B"])
    cache = PlainCache() if plain else engine(CONFIGS[kind], room)
    tokens = draw(model, prompts, room, cache, noise, sampling)
    assert torch.equal(tokens, expected[f"{run}.tokens"])
    guided = [guide(logits, sampling, token) for token, logits in enumerate(seen.logits)]
    close(torch.stack(guided), expected[f"{run}.cfg_logits"])
    for name, parts in (("raw_logits", seen.logits), ("hidden", seen.hidden)):
        if f"{run}.{name}" in expected:
            close(in_turns(torch.stack(parts), 1), expected[f"{run}.{name}"])
    if plain and f"{run}.cache_k0" in expected:
        for layer in (0, 2):
            k, v = (in_turns(part, 0) for part in cache.past[layer])
            close(v, expected[f"{run}.cache_v{layer}"])
            # Channels of a head are in another order here, and every score is the same.
            theirs = expected[f"{run}.cache_k{layer}"]
            close(k, theirs.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))
    if f"{run}.image_u8" in expected:
        images = tokenizer().decode(tokenizer().codes(tokens.unflatten(1, (4, 4)))).clamp(-1, 1)
        if f"{run}.pixels" in expected:
            close(images, expected[f"{run}.pixels"].clamp(-1, 1))
        pixels = ((images + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1)
        assert (pixels.int() - expected[f"{run}.image_u8"].int()).abs().max() <= 1


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_both_branches_are_laid_out_as_officially(kind: str, run: str) -> None:
    expected = golden(kind)[f"{run}.input_rows"]
    prompts = [prompt_of(kind, run)] * (len(expected) // 2)
    rows, padding = lay_out(prompts, read_numbers(), expected.shape[1], guided=True)
    assert torch.equal(in_turns(rows, 0), expected)
    assert padding == [0] * len(expected)
    wider, padding = lay_out(prompts, read_numbers(), expected.shape[1] + 3, guided=True)
    assert torch.equal(wider[:, 3:], rows)
    assert padding == [3] * len(expected)
    assert torch.equal(lay_out(prompts, read_numbers(), expected.shape[1], guided=False)[0], expected[::2])


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize("room", [10, 13])
def test_unequal_prompts_give_tokens(room: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = language_model("mha"), golden("mha")
    seen = Recorded(model, monkeypatch)
    runs = ("greedy_cfg5", "greedy_long")
    cache = PlainCache() if plain else engine(CONFIGS["mha"], room)
    prompts = [prompt_of("mha", run) for run in runs]
    tokens = draw(model, prompts, room, cache, Silence(), GREEDY)
    logits = torch.stack(seen.logits)
    for index, run in enumerate(runs):
        assert torch.equal(tokens[index], expected[f"{run}.tokens"][0])
        close(logits[:, index::2], expected[f"{run}.raw_logits"][:, :2])
    if not plain:
        lengths = [len(expected[f"{run}.prompt"]) + 15 - 3 for run in runs]  # the last row is never held
        assert cache.ledger.peak_tokens == 3 * 4 * max(lengths)


def test_a_method_draws_the_same_of_a_prompt_in_any_batch() -> None:
    model, room = language_model("mha"), 12
    prompts = [prompt_of("mha", run) for run in ("greedy_cfg5", "greedy_long")]
    found = []
    for chosen in ([0, 1], [0], [1]):
        cache = engine(CONFIGS["mha"], room)
        cache = open_cache(H2O(sinks=1), cache.spec, "0.7")
        noise = PromptNoise(0, chosen)
        found.append(
            draw(model, [prompts[i] for i in chosen], room, cache, noise, LlamaGenSampling(5.0, top_k=0))
        )
    assert torch.equal(found[0], torch.cat(found[1:]))


def test_head_and_embedding_are_the_official_ones() -> None:
    model, expected = language_model("mha"), golden("mha")
    close(model.gen_head(expected["head.in"]), expected["head.out"], 1e-5)
    close(model.embed(expected["embed.ids"]), expected["embed.out"], 1e-5)


def test_a_rectangle_is_decoded_as_officially() -> None:
    expected = golden("mha")
    codes = tokenizer().codes(expected["decode.codes"].unflatten(1, (4, 6)))
    close(codes, expected["decode.codebook_entry"], 1e-6)
    close(tokenizer().decode(codes), expected["decode.rect_4x6_fp32"])


def test_guidance_and_softmax_round_as_officially() -> None:
    expected, sampling = golden("mha"), LlamaGenSampling(cfg=5.0, top_k=0)
    blocked = torch.cat((expected["bf16.raw"][::2], expected["bf16.raw"][1::2]))
    mixed = guide(blocked, sampling, 0)
    assert torch.equal(mixed, expected["bf16.mix"])
    assert torch.equal(truncate(mixed, sampling).softmax(-1), expected["bf16.probs"])


@pytest.mark.parametrize("wide", [False, True])
def test_logits_have_the_dtype_of_the_weights_unless_asked_otherwise(wide: bool) -> None:
    model = Janus(replace(CONFIGS["mha"], wide_logits=wide)).bfloat16()
    dtype = torch.float32 if wide else torch.bfloat16
    assert model.logits(torch.zeros(1, 64, dtype=torch.bfloat16)).dtype == dtype


def test_channels_that_turn_together_become_neighbours() -> None:
    rows = torch.arange(2 * 6)[:, None]
    assert pair_neighbours(rows, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def language_state(raw: dict[str, object], head_dim: int = 128) -> dict[str, Tensor]:
    state = clean_janus(raw, head_dim)
    return {k.removeprefix("transformer."): v for k, v in state.items() if k.startswith("transformer.")}


def test_the_state_of_another_model_does_not_fit() -> None:
    lacking = {k: v for k, v in official_state("mha").items() if "layers.1.self_attn.k_proj" not in k}
    with pytest.raises(WeightsError, match=r"missing layers\.1\.attention\.wqkv\.weight"):
        check(language_state(lacking, 16), Janus(CONFIGS["mha"]), "weights")
    odd = {
        f"language_model.model.layers.0.self_attn.{part}_proj.weight": torch.zeros(5, 64) for part in "qkv"
    }
    with pytest.raises(WeightsError, match=r"layers\.0\.attention\.wqkv\.weight is \(15, 64\)"):
        check(language_state({**official_state("mha"), **odd}, 16), Janus(CONFIGS["mha"]), "weights")
