"""Comparison of the `config.json` beside published weights with a model's settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import read_object
from kvbench.models.files.weights import Source
from kvbench.models.parts.decoder import DecoderConfig

FILE = "config.json"
WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Names of weight files that the `config.json` of their folder describes."""


class Expected(NamedTuple):
    """Value that a key of `config.json` must have.

    Attributes:
        value: JSON value.
        key: config key that sets it; None for a value that no setting changes.
    """

    value: object
    key: str | None = None


FIXED = {
    "hidden_act": "silu", "hidden_activation": "silu", "attention_bias": False, "mlp_bias": False,
    "rope_interleaved": False, "partial_rotary_factor": 1, "rope_parameters.partial_rotary_factor": 1,
    "rope_scaling.rope_type": "default", "rope_scaling.type": "default", "rope_parameters.rope_type": "default",
    "rope_parameters.type": "default", "layer_types": "full_attention", "use_sliding_window": False,
    "sliding_window": None, "no_rope_layers": 1, "embedding_multiplier": 1, "residual_multiplier": 1,
    "logits_scaling": 1, "logit_scale": 1, "final_logit_softcapping": None, "attn_logit_softcapping": None,
}  # fmt: skip
"""Required values of keys that no setting changes; every element of a list must have the value."""


def expect_decoder(config: DecoderConfig) -> dict[str, Expected]:
    """Return the values that a decoder needs in a `config.json` of transformers, by dotted key."""
    names = {
        "hidden_size": "width", "intermediate_size": "hidden", "num_hidden_layers": "depth",
        "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
        "vocab_size": "vocabulary", "rms_norm_eps": "eps", "rope_theta": "rope_base",
        "rope_parameters.rope_theta": "rope_base", "rope_scaling.rope_theta": "rope_base", "swin_norm": "norm_after",
    }  # fmt: skip
    shape = {
        file: Expected(getattr(config, name), f"model.transformer.{name}") for file, name in names.items()
    }
    scale = Expected(config.head_dim**-0.5)
    return {**shape, "attention_multiplier": scale, **{key: Expected(value) for key, value in FIXED.items()}}


def check_config(source: Source, expected: Mapping[str, Expected], section: str = "") -> None:
    """Check the `config.json` of a source's local files against a model's settings.

    Keys that the file lacks, and sources without a file, are not checked. `section` is the part of the file that
    describes the language model, the whole file if empty.

    Raises:
        WeightsError: values differ (the message names the file and each key), or the file is not a JSON object.
    """
    weights = source.find()
    path = None if weights is None else _find_config(weights)
    if path is None:
        return
    values = _read_config(source, path, section)
    problems = [
        _describe(f"{section}.{key}".lstrip("."), values[key], wanted)
        for key, wanted in expected.items()
        if key in values and not _is_same(values[key], wanted.value)
    ]
    if problems:
        raise WeightsError(f"{source.key}: {path}: {'; '.join(problems)}")


def _find_config(weights: Path) -> Path | None:
    """Return the `config.json` that describes a folder or file of weights; None if it does not exist."""
    folder = weights if weights.is_dir() else weights.parent if weights.name in WHOLE_NAMES else None
    return folder / FILE if folder is not None and (folder / FILE).is_file() else None


def _read_config(source: Source, path: Path, section: str) -> dict[str, object]:
    """Return the values of a section of `config.json`; keys of nested objects are `outer.inner`."""
    whole = read_object(source, path)
    values = whole.get(section, {}) if section else whole
    if not isinstance(values, Mapping):
        raise WeightsError(f"{source.key}: {path}: {section} is not an object; copy the model's file again")
    found = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    found |= {f"{outer}.{key}": value for outer, inner in nested.items() for key, value in inner.items()}
    if found.get("use_sliding_window") is False:
        found.pop("sliding_window", None)  # files state its width even if it is unused
    return found


def _is_same(found: object, wanted: object) -> bool:
    """Return whether a value of the file, or each element of its list, is the expected one; null is the default."""
    if isinstance(found, list):
        return all(element == wanted for element in found)
    return found is None or found == wanted


def _describe(name: str, found: object, wanted: Expected) -> str:
    if wanted.key is None:
        return f"{name} is {found}, but kvbench computes only {wanted.value}; use a model with that value"
    return f"{name} is {found}, but {wanted.key} is {wanted.value}; set {wanted.key}={found}"
