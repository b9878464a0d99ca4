"""Files of Janus-Pro, Lumina-mGPT and Emu3: names and norms of every published form, and states that do not fit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kvbench.models.emu3.files import clean_emu3
from kvbench.models.emu3.tokenizer import Emu3VQ
from kvbench.models.files.checkpoints import State, WeightsError
from kvbench.models.files.parameters import check
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.transformer import Janus
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.tokenizer import Chameleon
from kvbench.models.lumina.transformer import Lumina
from kvbench.models.parts.autoencoder import SpatialNorm
from kvbench.models.parts.decoder import Decoder
from tests.support import reference_emu3 as emu3
from tests.support import reference_janus as janus
from tests.support import reference_lumina as lumina
from tests.support.drawing import close, halves_as_pairs


def test_names_of_older_files_are_read() -> None:
    older = {}
    for name, tensor in emu3.official_state().items():
        name = "text_model.lm_head.weight" if name == "lm_head.weight" else name
        name = name.replace("model.text_model.", "text_model.model.")
        older[name.replace("model.vqmodel.", "vqmodel.")] = tensor
    assert not older.keys() & emu3.official_state().keys()
    found, expected = (clean_emu3(state, emu3.CONFIG.head_dim) for state in (older, emu3.official_state()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("layout", "silu"), [(torch.contiguous_format, False), (torch.channels_last, True)])
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


def test_norms_of_every_published_form_are_read() -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    for rows in (1, 2, 4):
        values = torch.arange(rows * 8.0).view(rows, 8)
        found = clean_lumina({name: values}, lumina.CONFIGS["lm"])["layers.0.attention.q_norm.weight"]
        expected = halves_as_pairs(values).repeat_interleave(4 // rows, 0)
        assert torch.equal(found.view(4, 8), expected)


def clean_janus_transformer(state: State) -> State:
    cleaned = clean_janus(state, 16)
    return {k.removeprefix("transformer."): v for k, v in cleaned.items() if k.startswith("transformer.")}


PARTS: dict[str, tuple[Callable[[], State], Callable[[State], State], Callable[[], torch.nn.Module]]] = {
    "janus": (partial(janus.official_state, "mha"), clean_janus_transformer, lambda: Janus(janus.CONFIGS["mha"])),
    "lumina": (
        lambda: {**lumina.official_state("lm"), "model.vqmodel.encoder.conv_in.bias": torch.zeros(2)},
        lambda state: clean_lumina(state, lumina.CONFIGS["lm"]),
        lambda: Lumina(lumina.CONFIGS["lm"]),
    ),
    "chameleon": (partial(lumina.official_state, "vqgan"), clean_chameleon, lambda: Chameleon(lumina.TINY_VQ)),
    "emu3": (emu3.official_state, lambda state: emu3.part_of(state, "transformer"), lambda: Decoder(emu3.CONFIG)),
    "emu3's tokenizer": (
        emu3.official_state, lambda state: emu3.part_of(state, "tokenizer"), lambda: Emu3VQ(emu3.TINY_VQ)
    ),
}  # fmt: skip
"""State of a reference model's part, what cleans it, and the module."""
ATTENTION, VQ = "model.layers.0.self_attn", "model.vqmodel.decoder"
JANUS = "language_model.model.layers"
UNFIT: list[tuple[str, dict[str, tuple[int, ...] | None], str]] = [
    ("janus", {f"{JANUS}.1.self_attn.k_proj.weight": None}, "missing layers.1.attention.wqkv.weight"),
    ("janus", {f"{JANUS}.0.self_attn.{part}_proj.weight": (5, 64) for part in "qkv"},
     "layers.0.attention.wqkv.weight is (15, 64)"),
    ("lumina", {f"{ATTENTION}.q_norm.weight": (3, 8)}, "layers.0.attention.q_norm.weight is (3, 8), should be (32,)"),
    ("lumina", {f"{ATTENTION}.q_norm.weight": (1, 16)}, "q_norm.weight is (1, 16)"),
    ("lumina", {f"{ATTENTION}.q_norm.weight": (0, 8)}, "q_norm.weight is (0, 8), should be (32,)"),
    ("lumina", {f"{ATTENTION}.k_proj.weight": ()}, "unexpected layers.0.self_attn.k_proj.weight ()"),
    ("lumina", {"norm.weight": (32,)}, "unexpected norm.weight (outside model.) (32,)"),
    ("lumina", {"lm_head.weight": None}, "missing output.weight"),
    ("chameleon", {f"decoder.mid.attn_1.k.{kind}": None for kind in ("weight", "bias")},
     "missing decoder.mid.attn_1.qkv.bias"),
    ("emu3", {"lm_head.weight": (5, 32)}, "output.weight is (5, 32), should be (329, 32)"),
    ("emu3's tokenizer", {f"{VQ}.conv_in.weight": (3, 4, 3, 3)}, "conv_in.conv.weight is (3,"),
    ("emu3's tokenizer", {f"{VQ}.time_res_stack.0.norm1.running_mean": None},
     "unexpected time_res_stack.0.norm1.norm.running_var"),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_state_of_another_model_does_not_fit(part: str) -> None:
    state, clean, make = PARTS[part]
    check(clean({**state()}), make(), "weights")
    for owner, change, message in UNFIT:
        if owner == part:
            assert all(name in state() for name, shape in change.items() if shape is None)
            new = {name: None if shape is None else torch.zeros(shape) for name, shape in change.items()}
            changed = {name: one for name, one in {**state(), **new}.items() if one is not None}
            with pytest.raises(WeightsError) as caught:
                check(clean(changed), make(), "weights")
            assert message in str(caught.value)
