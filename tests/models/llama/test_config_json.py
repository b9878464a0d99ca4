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
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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


@pytest.mark.parametrize(
    ("given", "base", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, 5e5, RopeScaling(4.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, SHAPE),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}}, 7.0, SHAPE),
    ],
)
def test_rotary_keys_of_both_versions(given: dict[str, object], base: float, scaling: object) -> None:
    shape = read(**given)
    assert (shape.rope_base, shape.rope_scaling) == (base, scaling)


@pytest.mark.parametrize(
    ("kind", "given", "context"),
    [
        ("llama", {"max_position_embeddings": 2048}, 2048),
        ("mistral", {"max_position_embeddings": 32768}, 4096),
        ("mistral", {"max_position_embeddings": 32768, "sliding_window": None}, 32768),
        ("phi3", {"max_position_embeddings": 4096, "sliding_window": 2047}, 2047),
        ("qwen2", {"max_position_embeddings": 32768, "sliding_window": 131072}, 32768),
        ("qwen2", {"max_position_embeddings": 32768, "sliding_window": 16}, 32768),
        ("qwen2", {"max_position_embeddings": 32768, "sliding_window": 16, "use_sliding_window": True}, 16),
        ("qwen2", {}, None),
    ],
)
def test_a_window_limits_the_sequence(kind: str, given: dict[str, object], context: int | None) -> None:
    assert read(kind, **given).context == context


def test_shapes_of_heads() -> None:
    assert (read(num_key_value_heads=None).kv_heads, read("mistral").kv_heads) == (32, 8)
    assert (read(head_dim=None).head_dim, read(head_dim=20).head_dim, read("qwen3").head_dim) == (8, 20, 128)
    assert read("phi3", partial_rotary_factor=0.75).rotary_dim == 6
    assert read("smollm3", no_rope_layers=[1, 0] * 5).unrotated == (1, 3, 5, 7)
    assert read("smollm3", no_rope_layer_interval=2).unrotated == (1, 3, 5, 7)
    assert [kind for kind in ARCHITECTURES if read(kind).qkv_bias] == ["qwen2"]


ONLY = "kvbench supports only"
REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    *((
        "llama", {"model_type": kind}, f"model_type is '{kind}', but {ONLY} llama, mistral, phi3, qwen2, qwen3, smollm3"
    ) for kind in ("qwen3_next", "qwen3_5_text", "mixtral", "gemma3_text", "qwen3_moe")),
    ("llama", {"model_type": None}, "model_type is None, but"),
    ("llama", {"model_type": ["llama"]}, "model_type is ['llama'], but"),
    ("llama", {"hidden_act": "gelu"}, f"hidden_act is 'gelu', but {ONLY} 'silu'"),
    ("qwen3", {"attention_bias": True}, f"attention_bias is True, but {ONLY} False"),
    ("smollm3", {"mlp_bias": True}, f"mlp_bias is True, but {ONLY} False"),
    ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, but"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, f"rope_scaling.type is 'yarn', but {ONLY} linear"),
    ("qwen2", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic', but"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.type is 'longrope', but"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn', but"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; must be a number above 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "model.transformer.rope_scaling.factor=0.5: "),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling.original_max_position_embeddings is "),
    ("llama", {"rope_theta": "big"}, "rope_theta is 'big', but must be a number above 0"),
    ("llama", {"partial_rotary_factor": 0.5}, f"partial_rotary_factor is 0.5, but {ONLY} 1 for model_type 'llama'"),
    ("phi3", {"partial_rotary_factor": 0.01}, "model.transformer.rotary_dim=0: must be even and at most head_dim=8"),
    ("qwen3", {"layer_types": ["linear_attention"]}, "layer_types is ['linear_attention'], but"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is [1], but must be a list with a value for each of 9 layers"),
    ("smollm3", {"no_rope_layers": [2] * 9}, "no_rope_layers is [2, 2, 2, 2, 2, 2, 2, 2, 2], but must have 1 for"),
    *((kind, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be at most 16777216")
      for kind in ("llama", "smollm3")),
    ("llama", {"hidden_size": None}, "hidden_size is None, but must be a whole number of at least 1"),
    ("llama", {"vocab_size": True}, "vocab_size is True, but must be a whole number of at least 1"),
    ("llama", {"num_key_value_heads": 5}, "model.transformer.kv_heads=5: must divide heads=32"),
    ("llama", {"num_attention_heads": 7}, "num_attention_heads is 7, but must divide hidden_size=256"),
    ("llama", {"head_dim": 5}, "model.transformer.head_dim=5: must be a multiple of 2"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1, but must be a number above 0"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', but must be true or false"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, but must be a whole number of at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "line"), REFUSED, ids=[line[:50] for _, _, line in REFUSED])
def test_what_is_not_supported_is_refused_by_its_key(
    kind: str, change: Mapping[str, object], line: str
) -> None:
    with pytest.raises(WeightsError, match=rf"^key: config\.json: {re.escape(line)}") as caught:
        read(**{"kind": kind, **change})
    assert "\n" not in str(caught.value)


def test_texts_end_with_the_tokens_of_both_files() -> None:
    assert find_stop_tokens({"eos_token_id": 2}, {"eos_token_id": [7, 2]}) == (7, 2)
    assert find_stop_tokens({"eos_token_id": [1, 3]}, {}) == (1, 3)
    assert find_stop_tokens({"eos_token_id": None}, {}) == ()
    for wrong in ("end", [1, "2"], -1, 1.5, True):
        with pytest.raises(WeightsError, match=r"^config\.json: eos_token_id is .*must be a token or a list"):
            find_stop_tokens({"eos_token_id": wrong}, {})
