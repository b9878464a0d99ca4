"""GGUF files: tensors and configurations as transformers loads them, blocks and keys by hand, refusals in one line."""

import hashlib
import json
import re
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys
from gguf.quants import dequantize

from kvbench.models.files import gguf
from kvbench.models.files.checkpoints import WeightsError, read, split_layers
from kvbench.models.files.gguf import read_gguf
from kvbench.models.files.gguf_decoder import ARCHITECTURES, list_tensors
from kvbench.models.files.gguf_tokenizer import make_generation_config
from kvbench.models.files.weights import Source
from kvbench.models.llama.config_json import find_stop_tokens
from kvbench.models.llama.files import read_config
from kvbench.models.llama.gguf_config import make_config
from tests.support.gguf_file import TINY, Stored, byte_vocabulary, write_gguf
from tests.support.places import GOLDENS

LOADED = json.loads((GOLDENS / "gguf" / "loaded.json").read_text())
ROW = np.arange(32, dtype=np.float32)
EMBEDDING: Stored = ((4, 3), 0, np.arange(12, dtype="<f4").tobytes())
GOOD = {"token_embd.weight": EMBEDDING}
QUERY = "blk.0.attn_q.weight"
each = pytest.mark.parametrize("name", ARCHITECTURES)


@each
def test_tensors_are_those_that_transformers_loads(name: str) -> None:
    raw = read(GOLDENS / "gguf" / f"{name}.gguf")
    unpacked = {key: tensor for group in split_layers(raw) for key, tensor in group.items()}
    assert unpacked.keys() == raw.keys()
    found = {}
    for key, tensor in unpacked.items():
        assert isinstance(tensor, torch.Tensor)
        numbers = tensor.float().contiguous().numpy()
        found[key] = [list(tensor.shape), hashlib.sha256(numbers.tobytes()).hexdigest()]
    assert found == LOADED[name]["tensors"]


@each
def test_configurations_are_those_that_transformers_reads(name: str) -> None:
    file = GOLDENS / "gguf" / f"{name}.gguf"
    config, _ = read_config(Source("model.sources.weights", str(file)))
    expected = LOADED[name]["config"] | {"model_type": name, "rope_theta": LOADED[name]["rope_theta"]}
    epsilon = expected.pop("rms_norm_eps")
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] in (1e-5, 1e-6)  # the decimal of config.json, not the float32
    assert np.float32(config["rms_norm_eps"]) == np.float32(epsilon)


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        (0, ROW.tobytes(), ROW),
        (1, ROW.astype("<f2").tobytes(), ROW),
        (30, (ROW.view("<u4") >> 16).astype("<u2").tobytes(), ROW),
        # Byte j has number j in its low half and number j + 16 in its high one.
        (2, struct.pack("<e", 0.5) + bytes(j | (15 - j) << 4 for j in range(16)),
         [*(0.5 * (j - 8) for j in range(16)), *(0.5 * (7 - j) for j in range(16))]),
        (3, struct.pack("<ee", 0.5, -3) + bytes(j | (15 - j) << 4 for j in range(16)),
         [*(0.5 * j - 3 for j in range(16)), *(0.5 * (15 - j) - 3 for j in range(16))]),
        (8, struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16)), 0.25 * (ROW - 16)),
    ],
    ids=["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"],
)  # fmt: skip
def test_blocks_by_hand(tmp_path: Path, kind: int, block: bytes, expected: list[float]) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": ((32, 2), kind, block * 2), "b": ((32,), kind, block)})
    tensors = read_gguf(path).tensors
    assert tensors["a"].unpack().tolist() == [list(expected)] * 2
    assert tensors["b"].unpack().tolist() == list(expected)


UNPACKED = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS IQ1_M "
    "TQ1_0 TQ2_0 MXFP4"
)


@pytest.mark.parametrize("name", UNPACKED.split())
def test_blocks_of_every_type_are_unpacked_in_place(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    numbers, size = GGML_QUANT_SIZES[kind]
    codes = np.random.default_rng(0).integers(1, 60, (6, size), np.uint8)
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": ((2 * numbers, 3), kind, codes.tobytes())})
    found = read_gguf(path).tensors["a"].unpack()
    assert found.shape == (3, 2 * numbers)
    np.testing.assert_array_equal(
        found.numpy(), np.stack([dequantize(one, kind) for one in codes]).reshape(3, -1)
    )


def test_a_missing_package_is_named_by_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf._find_type.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    path = write_gguf(tmp_path / "x.gguf", TINY, {**GOOD, QUERY: ((32, 4), 2, bytes(72))})
    with pytest.raises(WeightsError, match=rf"{QUERY} is not float16/32 .*'kvbench\[gguf\]' to read it\)$"):
        read(path)
    assert list(read(write_gguf(tmp_path / "y.gguf", TINY, GOOD))) == ["model.embed_tokens.weight"]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    numbers = {f"n{kind}": struct.pack(f"<I{code}", kind, 1) for kind, code in codes.items()}
    lists = {f"l{kind}": struct.pack(f"<IIQ2{code}", 9, kind, 2, 1, 0) for kind, code in codes.items()}
    path = write_gguf(tmp_path / "x.gguf", numbers | lists | {"text": "é", "texts": ["a", ""]}, {}, version=2)
    expected = dict.fromkeys(numbers, 1) | {key: [1, 0] for key in lists}
    assert read_gguf(path).metadata == expected | {"text": "é", "texts": ["a", ""]}


def test_scaling_of_llama_3_is_found_in_its_divisors(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )  # fmt: skip
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    divisors = plain / embedding.inv_freq
    divisors[divisors > 31.99] = 32  # the quotient is rounded
    shape = {**TINY, "llama.embedding_length": 128, "llama.rope.freq_base": 500000.0}
    stored = {"token_embd.weight": EMBEDDING, "rope_freqs.weight": ((32,), 0, divisors.numpy().tobytes())}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", shape, stored))
    assert make_config(file)["rope_scaling"] == scaling
    assert list(list_tensors(file)) == ["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"llama\.rope\.scale_linear is 2\.0 beside rope_freqs"):
        make_config(
            read_gguf(write_gguf(tmp_path / "x.gguf", {**shape, "llama.rope.scale_linear": 2.0}, stored))
        )
    stored["rope_freqs.weight"] = ((32,), 0, (divisors + 1).numpy().tobytes())
    with pytest.raises(ValueError, match="rope_freqs"):
        make_config(read_gguf(write_gguf(tmp_path / "x.gguf", shape, stored)))


def list_keys(group: type) -> Iterator[str]:
    """Keys of an architecture in a table of the package `gguf`, for llama."""
    for name, value in vars(group).items():
        if isinstance(value, type):
            yield from list_keys(value)
        elif not name.startswith("_") and value.startswith("{arch}."):
            yield value.replace("{arch}", "llama")


UNUSED = (
    "llama.vocab_size", "llama.tensor_data_layout", "llama.attention.layer_norm_epsilon",
    "llama.rope.scaling.original_context_length", "llama.rope.scaling.finetuned",
)  # fmt: skip
"""llama.cpp reads them for other architectures or scalings, for a model's name, or not at all."""


@pytest.mark.parametrize("key", [*list_keys(Keys), "llama.rope.scale_linear"])
def test_a_key_of_llama_cpp_is_followed_or_refused(tmp_path: Path, key: str) -> None:
    plain = make_config(read_gguf(write_gguf(tmp_path / "x.gguf", TINY, GOOD)))
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {**TINY, key: 3}, GOOD))
    changed, refusal = None, ""
    try:
        changed = make_config(file)
    except ValueError as error:
        refusal = str(error)
    if changed is None:
        assert re.search(rf"{re.escape(key)} is 3\b", refusal)
    else:
        assert (changed == plain) == (key in UNUSED)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5, "rope.scale_linear": 4.0}, 2.5),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 0.0}, None),
        ({"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0, "attention.causal": True}, None),
    ],
)
def test_linear_scaling_as_in_llama_cpp(
    tmp_path: Path, keys: dict[str, object], factor: float | None
) -> None:
    values = {**TINY, **{f"llama.{key}": value for key, value in keys.items()}}
    config = make_config(read_gguf(write_gguf(tmp_path / "x.gguf", values, GOOD)))
    assert config.get("rope_scaling") == (factor and {"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize(
    "key", ["rope.scaling.factor", "rope.scale_linear", "rope.scaling.type", "logit_scale"]
)
def test_keys_of_the_wrong_type_are_refused_by_name(tmp_path: Path, key: str) -> None:
    for wrong in ("", "yarn", [4.0, 2.0], -2.0, float("nan")):
        file = read_gguf(write_gguf(tmp_path / "x.gguf", {**TINY, f"llama.{key}": wrong}, GOOD))
        with pytest.raises(ValueError, match=rf"^llama\.{key} is "):
            make_config(file)


def test_stop_tokens_are_keys_and_control_tokens_that_end_texts(tmp_path: Path) -> None:
    metadata = byte_vocabulary("smollm", control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    ids = {"tokenizer.ggml.eos_token_id": 259, "tokenizer.ggml.padding_token_id": 258}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", metadata | ids, {}))
    assert find_stop_tokens({}, make_generation_config(file)) == (259, 257)


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


DAMAGED: dict[str, tuple[dict[str, object], dict[str, Stored], Callable[[bytes], bytes], str]] = {
    "header cut": (TINY, GOOD, cut(100), "truncated"),
    "tensors cut": (TINY, GOOD, cut(-40), "truncated"),
    "empty": (TINY, GOOD, cut(0), "begin with GGUF"),
    "magic": (TINY, GOOD, lambda content: b"GGML" + content[4:], "begin with GGUF"),
    "version 1": (TINY, GOOD, lambda content: content[:4] + b"\1" + content[5:], "version 1,"),
    "version 4": (TINY, GOOD, lambda content: content[:4] + b"\4" + content[5:], "version 4,"),
    "twice": (TINY, {**GOOD, "token_embd.weighs": EMBEDDING}, lambda content: content.replace(b"weighs", b"weight"),
              "two tensors token_embd.weight"),
    "Q8_K": (TINY, {QUERY: ((256, 1), 15, bytes(292))}, bytes, "not unpacked (Dequantization for Q8_K is not"),
    "unknown type": (TINY, {QUERY: ((4, 4), 99, bytes(64))}, bytes, f"{QUERY} is of type 99, which is not unpacked"),
    "rows": (TINY, {"token_embd.weight": ((16, 4), 2, bytes(36))}, bytes, "rows of 16"),
    "empty rows": (TINY, {QUERY: ((0, 4), 2, b"")}, bytes, f"{QUERY} has rows of 0"),
    "dimensions": (TINY, {"token_embd.weight": ((1,) * 5, 0, bytes(4))}, bytes, "5 dimensions"),
    "tensor": (TINY, {**GOOD, "blk.0.ssm_a": ((4,), 0, bytes(16))}, bytes, "blk.0.ssm_a"),
    "architecture": ({"general.architecture": "qwen35"}, GOOD, bytes, "general.architecture is 'qwen35'"),
    "no architecture": ({}, GOOD, bytes, "general.architecture is None"),
    "experts": ({**TINY, "llama.expert_count": 8}, GOOD, bytes, "llama.expert_count is 8"),
    "split": ({**TINY, "split.count": 3}, GOOD, bytes, "one of 3 parts"),
    "key of another type": ({**TINY, "llama.attention.head_count": [1, 0]}, GOOD, bytes, "head_count is [1, 0]"),
    "missing key": ({"general.architecture": "llama"}, GOOD, bytes, "llama.embedding_length is missing"),
    "alignment": ({**TINY, "general.alignment": 0}, GOOD, bytes, "general.alignment is 0"),
    "text": ({**TINY, "x": struct.pack("<IQ", 8, 1) + b"\xff"}, GOOD, bytes, "x: "),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    metadata, tensors, damage, message = DAMAGED[name]
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError) as refusal:
        read(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", [key for key in TINY if key not in ("general.architecture",)])
def test_keys_of_a_configuration_must_be_positive_numbers(tmp_path: Path, key: str) -> None:
    for wrong in (0, True, "4", [1, 2], -1.0):
        path = write_gguf(tmp_path / "model.gguf", {**TINY, key: wrong}, GOOD)
        with pytest.raises(WeightsError, match=re.escape(f"{path}: {key} is ")):
            read_config(Source("model.sources.weights", str(path)))


HUGE = 1 << 60
HOSTILE = {
    "keys": ({}, {}, (0, HUGE)),
    "tensors": ({}, {}, (HUGE, 0)),
    "text": ({"x": struct.pack("<IQ", 8, HUGE)}, {}, None),
    "numbers": ({"x": struct.pack("<IIQ", 9, 6, HUGE)}, {}, None),
    "texts": ({"x": struct.pack("<IIQ", 9, 8, HUGE)}, {}, None),
    "lists of lists": ({"x": struct.pack("<IIQ", 9, 9, HUGE)}, {}, None),
    "shape": ({}, {"a": ((HUGE, HUGE), 0, b"")}, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_counts_allocate_nothing(tmp_path: Path, name: str) -> None:
    metadata, tensors, counts = HOSTILE[name]
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors, counts=counts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"truncated|not supported"):
        read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
