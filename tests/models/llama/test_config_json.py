"""Shapes read from config.json: defaults of transformers, keys of both of its versions, and refusals."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.llama.config_json import ARCHITECTURES, find_stop_tokens, read_shape
from kvbench.models.parts.rotary import RopeScaling

SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 9, "num_attention_heads": 32
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
SHAPE = RopeScaling(8.0, 1.0, 4.0, 8192)


def read(kind: str = "llama", **changes: object) -> Any:
    return read_shape({**SIZES, "model_type": kind, **changes}, "key: config.json")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keys_that_a_file_lacks_have_the_values_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoConfig.for_model(kind, **SIZES), read(kind)
    base, tied = theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings
    assert (ours.eps, ours.rope_base, ours.tied) == (theirs.rms_norm_eps, base, tied)
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, getattr(theirs, "head_dim", 8))
    still = [layer for layer, turns in enumerate(getattr(theirs, "no_rope_layers", ())) if not turns]
    assert list(ours.unrotated) == still
    assert ours.context == getattr(theirs, "sliding_window", None)


READ: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": None}, {"rope_base": 5e5, "rope_scaling": None}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_scaling": RopeScaling(4.0)}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": SHAPE}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_base": 7.0}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": SHAPE}),
    ("mistral", {"max_position_embeddings": 32768}, {"context": 4096, "kv_heads": 8}),
    ("mistral", {"max_position_embeddings": 32768, "sliding_window": None}, {"context": 32768}),
    ("qwen2", {"max_position_embeddings": 32768, "sliding_window": 16}, {"context": 32768, "qkv_bias": True}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, {"context": 16}),
    ("qwen2", {}, {"context": None}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 32, "head_dim": 8}),
    ("llama", {"head_dim": 20}, {"head_dim": 20, "qkv_bias": False}),
    ("phi3", {"partial_rotary_factor": 0.75}, {"rotary_dim": 6}),
    ("smollm3", {"no_rope_layers": [1, 0] * 5}, {"unrotated": (1, 3, 5, 7)}),
    ("smollm3", {"no_rope_layer_interval": 2}, {"unrotated": (1, 3, 5, 7)}),
]  # fmt: skip


def test_keys_of_both_versions_of_transformers_are_read() -> None:
    for kind, given, expected in READ:
        shape = read(kind, **given)
        assert {name: getattr(shape, name) for name in expected} == expected, (kind, given)


REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    ("llama", {"model_type": "mixtral"}, "model_type is 'mixtral', but kvbench supports only llama, mistral, phi3, qw"),
    ("llama", {"model_type": ["llama"]}, "model_type is ['llama'], but"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but kvbench supports only 'silu'"),
    ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, but"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.type is 'yarn', but kvbench supports"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn', but"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; must be a number above 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "model.transformer.rope_scaling.factor=0.5: "),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling.original_max_position_embeddings is "),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but kvbench supports only 1 for model_ty"),
    ("phi3", {"partial_rotary_factor": 0.01}, "model.transformer.rotary_dim=0: must be even and at most head_dim=8"),
    ("qwen3", {"layer_types": ["linear_attention"]}, "layer_types is ['linear_attention'], but"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is [1], but must be a list with a value for each of 9 layers"),
    ("smollm3", {"no_rope_layers": [2] * 9}, "no_rope_layers is [2, 2, 2, 2, 2, 2, 2, 2, 2], but must have 1 for"),
    ("smollm3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be at most 16777216"),
    ("llama", {"hidden_size": None}, "hidden_size is None, but must be a whole number of at least 1"),
    ("llama", {"vocab_size": True}, "vocab_size is True, but must be a whole number of at least 1"),
    ("llama", {"num_key_value_heads": 5}, "model.transformer.kv_heads=5: must divide heads=32"),
    ("llama", {"num_attention_heads": 7}, "num_attention_heads is 7, but must divide hidden_size=256"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1, but must be a number above 0"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', but must be true or false"),
]  # fmt: skip


def test_what_is_not_supported_is_refused_by_its_key() -> None:
    for kind, change, line in REFUSED:
        with pytest.raises(WeightsError, match=rf"^key: config\.json: {re.escape(line)}[^\n]*$"):
            read(**{"kind": kind, **change})


def test_texts_end_with_the_tokens_of_both_files() -> None:
    assert find_stop_tokens({"eos_token_id": 2}, {"eos_token_id": [7, 2]}) == (7, 2)
    assert find_stop_tokens({"eos_token_id": [1, 3]}, {}) == (1, 3)
    assert find_stop_tokens({"eos_token_id": None}, {}) == ()
    for wrong in ("end", [1, "2"], -1, True):
        with pytest.raises(WeightsError, match=r"^config\.json: eos_token_id is .*must be a token or a list"):
            find_stop_tokens({"eos_token_id": wrong}, {})
