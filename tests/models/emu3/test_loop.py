"""Emu3's language model, loop and image tokenizer: equal to the classes of transformers, on the engine and without."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.models.emu3.files import clean_emu3
from kvbench.models.emu3.tokenizer import Emu3VQ
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import check
from kvbench.models.image_loop import draw_image_tokens
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.decoding import round_pixels
from kvbench.models.parts.image_lines import forbid
from kvbench.models.parts.norms import SpatialNorm
from kvbench.models.parts.sampling import TokenSampling, guide, truncate
from kvbench.models.parts.tokens import lay_out
from tests.support.drawing import Recorded, Silence, close
from tests.support.engine import open_cache
from tests.support.reference import OneStream
from tests.support.reference_emu3 import (
    CONFIG,
    FIRST,
    NUMBERS,
    TINY_VQ,
    golden,
    language_model,
    meta,
    official_state,
    part_of,
    prompt_of,
    read_numbers,
    tokenizer,
)
from tests.support.reference_llamagen import PlainCache

RUNS = list(meta()["cases"])
TOKENS = 4 * 7


def engine(capacity: int, branches: int) -> KVCache:
    spec = CONFIG.describe("tiny", CONFIG.segments(capacity), branches, equal_branches=branches == 1)
    return open_cache(Full(), spec)


def forbidden(token: int) -> Tensor:
    return forbid(read_numbers().codes, NUMBERS["<|extra_200|>"], 7)(token)


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain loop"])
@pytest.mark.parametrize("run", RUNS)
def test_prompts_give_the_tokens_of_transformers(
    run: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, expected, model = meta()["cases"][run], golden(), language_model()
    seen, count, greedy = Recorded(model, monkeypatch), given["prompts"], given["seed"] is None
    settings = TokenSampling(given["cfg"], top_k=given["top_k"])
    sampling = replace(settings, top_k=1) if greedy else settings
    guided = sampling.branches > 1
    room = max(len(meta()["prompt"]), guided * len(meta()["negative"])) + 2
    rows, padding = lay_out([prompt_of()] * count, read_numbers(), room, guided=guided)
    cache = PlainCache() if plain else engine(room, sampling.branches)
    noise = Silence(count) if greedy else OneStream(given["seed"], count)
    arguments = (model, model.embed(rows), CONFIG.segments(room), cache, noise, sampling)
    tokens = draw_image_tokens(*arguments, padding=padding, forbidden=forbidden)
    assert torch.equal(tokens, expected[f"{run}.tokens"][:, :TOKENS])
    logits = torch.stack(seen.logits)
    close(logits[:, :count], expected[f"{run}.logits"][:TOKENS])
    if guided:
        close(logits[:, count:], expected[f"{run}.negative_logits"][:TOKENS])
    if not greedy:
        masked = [
            guide(one, settings, token).masked_fill(forbidden(token), -math.inf)
            for token, one in enumerate(logits)
        ]
        kept = torch.stack([truncate(one, settings).isfinite().sum(-1) for one in masked])
        assert torch.equal(kept, expected[f"{run}.kept_counts"][:TOKENS])
    codes = read_numbers().codes[tokens.unflatten(1, (4, 7))[..., :-1]]
    images = tokenizer().decode(tokenizer().codes(codes))
    close(images, expected[f"{run}.pixels"])
    pixels = round_pixels(images, "truncate", half_pixels=False).permute(0, 2, 3, 1)
    official = expected[f"{run}.image_u8"].reshape(pixels.shape)
    assert (pixels.int() - official.int()).abs().max() <= 1
    assert (pixels != official).float().mean() < 1e-2


def test_runs_end_as_the_frame_says() -> None:
    """Transformers draws three tokens more, each of which is the only one allowed."""
    for run in RUNS:
        tokens = golden()[f"{run}.tokens"]
        assert (tokens[:, 6:TOKENS:7] == NUMBERS["<|extra_200|>"]).all()
        assert (tokens[:, :TOKENS].unflatten(1, (4, 7))[..., :-1] >= FIRST).all()
        ends = [NUMBERS[name] for name in ("<|extra_201|>", "<|image end|>", "<|extra_204|>")]
        assert tokens[0, TOKENS:].tolist() == ends


def test_a_rectangle_is_decoded_as_by_transformers() -> None:
    images = tokenizer().decode(tokenizer().codes(golden()["vq.codes"]))
    assert images.shape == (2, 3, 6, 10)
    assert 0.1 < images.std() < 1
    close(images, golden()["vq.pixels"])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("silu", [False, True])
def test_norms_read_the_code_of_each_place(layout: torch.memory_format, silu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = SpatialNorm(64, 4, silu=silu).requires_grad_(False)
    for parameter in norm.parameters():
        parameter.normal_(generator=generator)
    x = torch.randn(2, 64, 6, 12, generator=generator).contiguous(memory_format=layout)
    codes = torch.randn(2, 4, 3, 4, generator=generator)
    spread = F.interpolate(codes, size=(6, 12), mode="nearest")
    expected = norm.norm(x) * norm.scale(spread) + norm.shift(spread)
    out = norm(x, codes)
    assert out.is_contiguous(memory_format=layout)
    close(out, F.silu(expected) if silu else expected, 1e-5)


def test_names_of_older_files_are_read() -> None:
    older = {}
    for name, tensor in official_state().items():
        name = "text_model.lm_head.weight" if name == "lm_head.weight" else name
        name = name.replace("model.text_model.", "text_model.model.")
        older[name.replace("model.vqmodel.", "vqmodel.")] = tensor
    assert not older.keys() & official_state().keys()
    found, expected = (clean_emu3(state, CONFIG.head_dim) for state in (older, official_state()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("transformer", {"lm_head.weight": None}, r"missing output\.weight"),
        ("transformer", {"lm_head.weight": (5, 32)}, r"output\.weight is \(5, 32\), should be \(329, 32\)"),
        (
            "transformer",
            {"model.text_model.layers.1.self_attn.k_proj.weight": None},
            r"missing layers\.1\.att",
        ),
        (
            "transformer",
            {"model.text_model.layers.2.mlp.up_proj.weight": (2,)},
            r"unexpected layers\.2\.feed",
        ),
        (
            "tokenizer",
            {"model.vqmodel.decoder.conv_in.weight": (3, 4, 3, 3)},
            r"conv_in\.conv\.weight is \(3,",
        ),
        (
            "tokenizer",
            {"model.vqmodel.decoder.time_res_stack.0.norm1.running_mean": None},
            r"unexpected time_res_stack\.0\.norm1\.norm\.running_var",
        ),
        (
            "tokenizer",
            {"model.vqmodel.decoder.middle_block.attn_1.k_proj.weight": None},
            r"missing decoder\.mid\.attn_1\.qkv\.weight",
        ),
    ],
)
def test_the_state_of_another_model_does_not_fit(
    part: str, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    changed = {name: None if shape is None else torch.zeros(shape) for name, shape in change.items()}
    state = {k: v for k, v in {**official_state(), **changed}.items() if v is not None}
    module = Decoder(CONFIG) if part == "transformer" else Emu3VQ(TINY_VQ)
    check(part_of(official_state(), part), module, part)
    with pytest.raises(WeightsError, match=message):
        check(part_of(state, part), module, part)
