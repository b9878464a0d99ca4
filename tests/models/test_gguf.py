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
EMBEDDING: Stored = ((4, 3), 0, np.arange(12, dtype="<f4").tobytes())
GOOD = {"token_embd.weight": EMBEDDING}
QUERY = "blk.0.attn_q.weight"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_and_configurations_are_those_that_transformers_loads(name: str) -> None:
    file = GOLDENS / "gguf" / f"{name}.gguf"
    raw = read(file)
    unpacked = {key: tensor for group in split_layers(raw) for key, tensor in group.items()}
    assert unpacked.keys() == raw.keys()
    found = {}
    for key, tensor in unpacked.items():
        assert isinstance(tensor, torch.Tensor)
        numbers = tensor.float().contiguous().numpy()
        found[key] = [list(tensor.shape), hashlib.sha256(numbers.tobytes()).hexdigest()]
    assert found == LOADED[name]["tensors"]
    config, _ = read_config(Source("model.sources.weights", str(file)))
    expected = LOADED[name]["config"] | {"model_type": name, "rope_theta": LOADED[name]["rope_theta"]}
    epsilon = expected.pop("rms_norm_eps")
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] in (1e-5, 1e-6)  # the decimal of config.json, not the float32
    assert np.float32(config["rms_norm_eps"]) == np.float32(epsilon)


def test_blocks_are_unpacked_in_place(tmp_path: Path) -> None:
    row = np.arange(32, dtype=np.float32)
    floats = {0: row, 1: row.astype("<f2"), 30: (row.view("<u4") >> 16).astype("<u2")}
    blocks = [(kind, stored.tobytes(), row) for kind, stored in floats.items()]
    # Byte j of Q4_0 has number j in its low half and number j + 16 in its high one.
    nibbles = struct.pack("<e", 0.5) + bytes(j | (15 - j) << 4 for j in range(16))
    quarters = [*(0.5 * (j - 8) for j in range(16)), *(0.5 * (7 - j) for j in range(16))]
    for kind, block, expected in (*blocks, (2, nibbles, quarters)):
        stored = {"a": ((32, 2), kind, block * 2), "b": ((32,), kind, block)}
        tensors = read_gguf(write_gguf(tmp_path / "x.gguf", {}, stored)).tensors
        assert tensors["a"].unpack().tolist() == [list(expected)] * 2
        assert tensors["b"].unpack().tolist() == list(expected)
    for name in ("Q6_K", "IQ2_XXS", "MXFP4"):
        kind = GGMLQuantizationType[name]
        numbers, size = GGML_QUANT_SIZES[kind]
        codes = np.random.default_rng(0).integers(1, 60, (6, size), np.uint8)
        stored = {"a": ((2 * numbers, 3), kind, codes.tobytes())}
        found = read_gguf(write_gguf(tmp_path / "x.gguf", {}, stored)).tensors["a"].unpack()
        expected = np.stack([dequantize(one, kind) for one in codes]).reshape(3, -1)
        np.testing.assert_array_equal(found.numpy(), expected)


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


def make(folder: Path, **values: object) -> dict[str, object]:
    """The configuration of the smallest file with more metadata of llama."""
    more = {f"llama.{key}": value for key, value in values.items()}
    return make_config(read_gguf(write_gguf(folder / "x.gguf", TINY | more, GOOD)))


def test_a_key_of_llama_cpp_is_followed_or_refused(tmp_path: Path) -> None:
    plain = make(tmp_path)
    for key in (*list_keys(Keys), "llama.rope.scale_linear"):
        changed, refusal = None, ""
        try:
            changed = make(tmp_path, **{key.removeprefix("llama."): 3})
        except ValueError as error:
            refusal = str(error)
        if changed is None:
            assert re.search(rf"{re.escape(key)} is 3\b", refusal)
        else:
            assert (changed == plain) == (key in UNUSED)


def test_linear_scaling_as_in_llama_cpp(tmp_path: Path) -> None:
    for keys, factor in (
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5, "rope.scale_linear": 4.0}, 2.5),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 0.0}, None),
        ({"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0, "attention.causal": True}, None),
    ):
        expected = factor and {"rope_type": "linear", "factor": factor}
        assert make(tmp_path, **keys).get("rope_scaling") == expected


def test_keys_of_the_wrong_type_are_refused_by_name(tmp_path: Path) -> None:
    for key in ("rope.scaling.factor", "rope.scaling.type", "logit_scale"):
        for wrong in ("yarn", [4.0, 2.0], -2.0, float("nan")):
            with pytest.raises(ValueError, match=rf"^llama\.{key} is "):
                make(tmp_path, **{key: wrong})
    source = Source("model.sources.weights", str(tmp_path / "x.gguf"))
    for key in ("block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"):
        for wrong in (0, True, "4", [1, 2], -1.0):
            write_gguf(tmp_path / "x.gguf", TINY | {f"llama.{key}": wrong}, GOOD)
            with pytest.raises(WeightsError, match=re.escape(f"{source.path}: llama.{key} is ")):
                read_config(source)


def test_stop_tokens_are_keys_and_control_tokens_that_end_texts(tmp_path: Path) -> None:
    metadata = byte_vocabulary("smollm", control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    ids = {"tokenizer.ggml.eos_token_id": 259, "tokenizer.ggml.padding_token_id": 258}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", metadata | ids, {}))
    assert find_stop_tokens({}, make_generation_config(file)) == (259, 257)


DAMAGED: list[tuple[dict[str, object], dict[str, Stored], Callable[[bytes], bytes], str]] = [
    (TINY, GOOD, lambda content: content[:-40], "truncated"),
    (TINY, GOOD, lambda content: b"GGML" + content[4:], "begin with GGUF"),
    (TINY, GOOD, lambda content: content[:4] + b"\4" + content[5:], "version 4,"),
    (TINY, {**GOOD, "token_embd.weighs": EMBEDDING}, lambda content: content.replace(b"weighs", b"weight"),
     "two tensors token_embd.weight"),
    (TINY, {QUERY: ((256, 1), 15, bytes(292))}, bytes, "not unpacked (Dequantization for Q8_K is not"),
    (TINY, {QUERY: ((4, 4), 99, bytes(64))}, bytes, f"{QUERY} is of type 99, which is not unpacked"),
    (TINY, {"token_embd.weight": ((16, 4), 2, bytes(36))}, bytes, "rows of 16"),
    (TINY, {QUERY: ((0, 4), 2, b"")}, bytes, f"{QUERY} has rows of 0"),
    (TINY, {"token_embd.weight": ((1,) * 5, 0, bytes(4))}, bytes, "5 dimensions"),
    (TINY, {**GOOD, "blk.0.ssm_a": ((4,), 0, bytes(16))}, bytes, "blk.0.ssm_a"),
    ({"general.architecture": "qwen35"}, GOOD, bytes, "general.architecture is 'qwen35'"),
    ({**TINY, "llama.expert_count": 8}, GOOD, bytes, "llama.expert_count is 8"),
    ({**TINY, "split.count": 3}, GOOD, bytes, "one of 3 parts"),
    ({"general.architecture": "llama"}, GOOD, bytes, "llama.embedding_length is missing"),
    ({**TINY, "general.alignment": 0}, GOOD, bytes, "general.alignment is 0"),
    ({**TINY, "x": struct.pack("<IQ", 8, 1) + b"\xff"}, GOOD, bytes, "x: "),
]  # fmt: skip


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for metadata, tensors, damage, message in DAMAGED:
        write_gguf(path, metadata, tensors)
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(WeightsError, match=rf"^{path}: [^\n]*{re.escape(message)}[^\n]*$"):
            read(path)


HUGE = 1 << 60
HOSTILE = (
    ({}, {}, (0, HUGE)),
    ({"text": struct.pack("<IQ", 8, HUGE)}, {}, None),
    ({"numbers": struct.pack("<IIQ", 9, 6, HUGE)}, {}, None),
    ({"texts": struct.pack("<IIQ", 9, 8, HUGE)}, {}, None),
    ({"lists of lists": struct.pack("<IIQ", 9, 9, HUGE)}, {}, None),
    ({}, {"shape": ((HUGE, HUGE), 0, b"")}, None),
)


def test_hostile_counts_allocate_nothing(tmp_path: Path) -> None:
    for metadata, tensors, counts in HOSTILE:
        path = write_gguf(tmp_path / "x.gguf", metadata, tensors, counts=counts)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"truncated|not supported"):
            read_gguf(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
