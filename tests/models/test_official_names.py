"""Names and shapes of published files fit the models, in every published form; other states do not."""

import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from kvbench.core.budget import Budget
from kvbench.models.emu3.files import clean_emu3
from kvbench.models.emu3.tokenizer import Emu3VQ
from kvbench.models.files.checkpoints import State, WeightsError
from kvbench.models.files.official_files import clean_decoder, clean_vqgan
from kvbench.models.files.parameters import check
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.transformer import Janus
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.tokenizer import Chameleon
from kvbench.models.lumina.transformer import Lumina
from kvbench.models.parts.decoder import Decoder
from tests.support import reference_emu3 as emu3
from tests.support import reference_janus as janus
from tests.support import reference_lumina as lumina
from tests.support.drawing import halves_as_pairs
from tests.support.marks import slow_except
from tests.support.places import GOLDENS
from tests.support.published import make_raw_state, read_published
from tests.support.small_models import configured

BF16, FP16 = torch.bfloat16, torch.float16


class Published(NamedTuple):
    """What is known of a published model; a file's key is a golden folder and one name for each source."""

    keys: tuple[str, ...]
    parameters: float  # of transformer and tokenizer, in millions
    shape: tuple[int, int, int, int]  # layers, KV heads, channels of a head, branches
    lengths: tuple[int, int, int, int]  # tokens of the first, second and last segment, and of all
    half: torch.dtype = BF16


def var(depth: int, parameters: float, *lengths: int) -> Published:
    keys = ("var", f"var_d{depth}", "vae_ch160v4096z32")
    return Published(keys, parameters + 108.948355, (depth, depth, 64, 2), (1, 4, *lengths), FP16)


def llamagen(size: str, layers: int, heads: int, head_dim: int, parameters: float) -> Published:
    shape, keys = (layers, heads, head_dim, 2), ("llamagen", f"c2i_{size}", "vq_16")
    return Published(keys, parameters + 71.883403, shape, (1, 24, 23, 576))


def captions(side: int) -> Published:
    lengths = (120, side, side - 1, 119 + side * side)
    # No caption is among the weights.
    parameters = 777.678080 + 0.120 * 2.048 + 71.883403
    keys = ("llamagen", "t2i_XL", "vq_16")
    return Published(keys, parameters, (36, 20, 64, 2), lengths)


def published_janus(size: str, layers: int, heads: int) -> Published:
    keys = read_published("janus")[f"pro_{size}"]["keys"]
    used = [
        key
        for key in keys
        if key.startswith(("language_model.model.", "gen_")) and "codebook_used" not in key
    ]
    parameters = sum(torch.Size(keys[key][0]).numel() for key in used) / 1e6
    return Published(("janus", f"pro_{size}"), parameters, (layers, heads, 128, 2), (64, 24, 23, 639))


def published_lumina(pixels: int) -> Published:
    side, sizes = pixels // 16, read_published("lumina")
    more = 32 * 4 * 31 * 128  # every head has its own norm here, where the file has one for all
    parameters = (sizes["language"]["parameters"] + sizes["tokenizer"]["parameters"] + more) / 1e6
    lengths, keys = (64, side + 1, side, 63 + side * (side + 1)), ("lumina", "language", "tokenizer")
    return Published(keys, parameters, (32, 32, 128, 2), lengths)


def published_emu3() -> Published:
    """Parameters of an image: of a kernel's three planes in time the last, of a batch norm a product and a sum."""
    keys, count = read_published("emu3")["gen"]["keys"], 0
    for name, (shape, _) in keys.items():
        drawing = not re.search(r"vqmodel\.(encoder|quant_conv)\.|running_|num_batches", name)
        count += drawing * torch.Size(shape).numel() // (shape[2] if len(shape) == 5 else 1)
    return Published(("emu3", "gen"), count / 1e6, (32, 8, 128, 2), (128, 91, 90, 8317))


def qwen3(layers: int, parameters: float) -> Published:
    return Published(("qwen3",), parameters, (layers, 8, 128, 1), (512, 128, 127, 33279))


def infinity(size: str, parameters: float, depth: int, heads: int) -> Published:
    keys = ("infinity", f"state_dict_{size}.transformer", f"state_dict_{size}.vae")
    return Published(keys, parameters, (depth, heads, 128, 2), (1, 4, 4096, 10521))


PUBLISHED = {
    "var_d16": var(16, 310.283520, 256, 680),
    "var_d20": var(20, 600.917136, 256, 680),
    "var_d24": var(24, 1033.399360, 256, 680),
    "var_d30": var(30, 2010.020356, 256, 680),
    "var_d36": var(36, 2353.893904, 1024, 2240),
    "llamagen_b": llamagen("B", 12, 12, 64, 110.888448),
    "llamagen_l": llamagen("L", 24, 16, 64, 342.910976),
    "llamagen_xl": llamagen("XL", 36, 20, 64, 774.699520),
    "llamagen_xxl": llamagen("XXL", 48, 24, 64, 1410.972672),
    "llamagen_3b": llamagen("3B", 24, 32, 100, 3096.659200),
    "llamagen_xl_t2i": captions(16),
    "llamagen_xl_t2i_512": captions(32),
    "janus_pro_1b": published_janus("1b", 24, 16),
    "janus_pro_7b": published_janus("7b", 30, 32),
    "lumina_mgpt_7b_512": published_lumina(512),
    "lumina_mgpt_7b_768": published_lumina(768),
    "lumina_mgpt_7b_1024": published_lumina(1024),
    "emu3_gen": published_emu3(),
    "qwen3_4b": qwen3(36, 4022.468096),
    "qwen3_8b": qwen3(36, 8190.735360),
    "qwen3_32b": qwen3(64, 32762.123264),
    "infinity_2b": infinity("2b", 2314.682083, 32, 16),
    "infinity_8b": infinity("8b", 8457.416033, 40, 28),
}

ONE_OF_EACH_FAMILY = (
    "var_d16", "llamagen_b", "llamagen_xl_t2i", "janus_pro_1b", "lumina_mgpt_7b_512", "emu3_gen", "qwen3_4b",
    "infinity_2b",
)  # fmt: skip


def read_raw(family: str, name: str) -> dict[str, object]:
    if family != "infinity":
        return make_raw_state(family, name)
    file, part = name.split(".")
    keys = json.loads(gzip.decompress((GOLDENS / family / f"{file}.json.gz").read_bytes()))[part]
    return {key: torch.empty(shape, device="meta") for key, (shape, _) in keys.items()}


def build(one: Any) -> list[nn.Module]:
    transformer, tokenizer = one._build()
    if len(one._cleans) == 2:
        return [transformer, tokenizer]
    return [nn.ModuleDict({"transformer": transformer, "tokenizer": tokenizer})]


@pytest.mark.parametrize("name", slow_except(ONE_OF_EACH_FAMILY.__contains__, PUBLISHED))
def test_published_shapes(name: str) -> None:
    one, known = configured(f"model={name}"), PUBLISHED[name]
    spec = one.spec
    assert round(one.parameters / 1e6, 6) == round(known.parameters, 6)
    assert (spec.layers, spec.heads, spec.head_dim, spec.branches) == known.shape
    lengths = spec.lengths
    assert (lengths[0], lengths[1], lengths[-1], spec.ends[-1]) == known.lengths
    assert spec.logit_scale == (spec.head_dim**-0.5 if spec.family == "next-token" else 1)
    assert spec.equal_branches != name.startswith(("lumina", "emu3"))
    assert (one.compute_dtype("cpu"), one.compute_dtype("cuda:1")) == (torch.float32, known.half)
    if name.startswith("qwen3"):
        assert Budget.parse(1024, spec).per_head == 1024
        return
    family, *keys = known.keys
    for network, key, (part, clean) in zip(build(one), keys, one._cleans.items(), strict=True):
        check(clean(read_raw(family, key)), network, part)


def test_files_nested_by_a_trainer_fit() -> None:
    transformer, tokenizer = build(configured("model=llamagen_b"))
    tables = {"freqs_cis": torch.zeros(257, 32, 2), "layers.0.attention.kv_cache.k_cache": torch.zeros(1)}
    raw, vq = make_raw_state("llamagen", "c2i_B") | tables, make_raw_state("llamagen", "vq_16")
    for wrapped in ("model", "module", "state_dict"):
        check(clean_decoder({wrapped: raw, "steps": 1}), transformer, "transformer")
    for wrapped in ("model", "state_dict"):
        check(clean_vqgan({wrapped: vq, "epoch": 3}), tokenizer, "tokenizer")


def test_missing_weights_say_how_to_get_them() -> None:
    for name, part, wanted in (
        ("var_d30", "transformer", r"var_d30\.pth"),
        ("janus_pro_1b", "weights", r"pytorch_model\.bin"),
        ("lumina_mgpt_7b_1024", "weights", "the files of Alpha-VLLM"),
        ("qwen3_4b", "weights", "the files of Qwen/Qwen3-4B"),
    ):
        with pytest.raises(WeightsError, match=rf"model\.sources\.{part}: weights missing.*{wanted}"):
            configured(f"model={name}").load("cpu")
    for name in ("janus_pro_1b", "lumina_mgpt_7b_1024", "emu3_gen"):
        with pytest.raises(WeightsError, match=r"model\.sources\.text: weights missing.*tokenizer\.json"):
            configured(f"model={name}").check_prompts(["a red circle"])


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
    ("lumina", {f"{ATTENTION}.q_norm.weight": (0, 8)}, "q_norm.weight is (0, 8), should be (32,)"),
    ("lumina", {f"{ATTENTION}.k_proj.weight": ()}, "unexpected layers.0.self_attn.k_proj.weight ()"),
    ("lumina", {"norm.weight": (32,)}, "unexpected norm.weight (outside model.) (32,)"),
    ("chameleon", {f"decoder.mid.attn_1.k.{kind}": None for kind in ("weight", "bias")},
     "missing decoder.mid.attn_1.qkv.bias"),
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
