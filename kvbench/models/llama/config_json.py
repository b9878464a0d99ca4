"""Shape and stop tokens of a language model from the `config.json` and `generation_config.json` of transformers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeGuard

from kvbench.models.base import MAX_SIZE
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.parts.rotary import RopeScaling
from kvbench.models.parts.text_decoder import TextDecoderConfig


class Architecture(NamedTuple):
    """Computation of a `model_type`, and the values of keys that its `config.json` lacks.

    Attributes:
        qk_norm: norm of queries and keys.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        rope_theta: default of the key.
        rms_norm_eps: default of the key.
        num_key_value_heads: default of the key; None for the number of query heads.
        head_dim: default of the key; None for hidden_size / num_attention_heads.
        sliding_window: default of the key.
        use_sliding_window: default of the key; True if transformers has no such key.
        tie_word_embeddings: default of the key.
    """

    qk_norm: Literal["none", "rms"] = "none"
    qkv_bias: bool = False
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = True
    tie_word_embeddings: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(num_key_value_heads=8, sliding_window=4096),
    "phi3": Architecture(rms_norm_eps=1e-5),
    "qwen2": Architecture(
        qkv_bias=True, num_key_value_heads=32, sliding_window=4096, use_sliding_window=False
    ),
    "qwen3": Architecture(
        qk_norm="rms", num_key_value_heads=32, head_dim=128, sliding_window=4096, use_sliding_window=False
    ),
    "smollm3": Architecture(
        rope_theta=2e6, num_key_value_heads=4, use_sliding_window=False, tie_word_embeddings=True
    ),
}
"""Supported values of `model_type`, with the defaults of transformers."""
REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None,
}  # fmt: skip
"""Keys that change the computation and have one supported value, and these values."""
SCALED = ("linear", "llama3")
"""Supported scalings of the rotary frequencies."""
ATTENTION = ("full_attention", "sliding_attention")
"""Supported kinds of attention in `layer_types`."""


def read_shape(config: Mapping[str, object], origin: str) -> TextDecoderConfig:
    """Return the shape of a language model.

    A sliding window limits the sequence's length, so that the window has no effect.

    Args:
        config: contents of `config.json`, with the keys of transformers 4 or 5.
        origin: config key and file, which begin every message.

    Raises:
        WeightsError: a key is missing, or its value has the wrong type or is not supported.
    """
    keys = _Keys(config, origin)
    kind = keys.choose("model_type", ARCHITECTURES)
    architecture = ARCHITECTURES[kind]
    for name, value in REQUIRED.items():
        keys.require(name, value)
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    depth = keys.size("num_hidden_layers")
    rope = keys.merge("rope_scaling", "rope_parameters")
    head_dim = _read_head_dim(keys, architecture, width, heads)
    try:
        return TextDecoderConfig(
            depth=depth,
            width=width,
            heads=heads,
            kv_heads=keys.optional_size("num_key_value_heads", architecture.num_key_value_heads) or heads,
            head_dim=head_dim,
            hidden=keys.size("intermediate_size"),
            vocabulary=keys.size("vocab_size"),
            qk_norm=architecture.qk_norm,
            qkv_bias=architecture.qkv_bias,
            eps=keys.number("rms_norm_eps", architecture.rms_norm_eps),
            rope_base=rope.number("rope_theta", keys.number("rope_theta", architecture.rope_theta)),
            rope_scaling=_read_scaling(keys, rope),
            rotary_dim=_read_rotary_dim(keys, rope, kind, head_dim),
            unrotated=_list_unrotated(keys, depth) if kind == "smollm3" else (),
            context=_read_context(keys, architecture),
            tied=keys.flag("tie_word_embeddings", architecture.tie_word_embeddings),
        )
    except ValueError as error:
        raise WeightsError(f"{origin}: {error}") from None


def find_stop_tokens(
    config: Mapping[str, object], generation_config: Mapping[str, object], origin: str = "config.json"
) -> tuple[int, ...]:
    """Return the tokens that end a text: `eos_token_id` of `generation_config.json`, then of `config.json`.

    Either file may lack the key; the result may be empty.

    Raises:
        WeightsError: a value is neither a token nor a list of tokens; `origin` begins the message.
    """
    stops: list[int] = []
    for contents in (generation_config, config):
        value = contents.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not _is_whole(token) or token < 0:
                raise WeightsError(
                    f"{origin}: eos_token_id is {value!r}, but must be a token or a list of tokens"
                )
            stops.append(token)
    return tuple(dict.fromkeys(stops))


class _Keys:
    """Keys of a part of `config.json`, with a check of their types; null counts as missing unless a docstring says so.

    Raises:
        WeightsError: a value is wrong; the message names the key, the value and what is supported.
    """

    def __init__(self, values: Mapping[str, object], origin: str, prefix: str = "") -> None:
        self._values, self._origin, self._prefix = values, origin, prefix

    def get(self, name: str) -> object:
        return self._values.get(name)

    def refuse(self, name: str, supported: str) -> WeightsError:
        """Return the error of an unsupported value."""
        key, value = self._prefix + name, self.get(name)
        found = f"{key} is {value!r}, but" if name in self._values else f"{key} is missing;"
        return WeightsError(f"{self._origin}: {found} {supported}")

    def size(self, name: str) -> int:
        if not _is_whole(value := self.get(name)) or value < 1:
            raise self.refuse(name, "must be a whole number of at least 1")
        if value > MAX_SIZE:
            raise self.refuse(name, f"must be at most {MAX_SIZE}")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """Return a size, None for null, or the default if the key is missing."""
        if name not in self._values:
            return default
        return None if self.get(name) is None else self.size(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(name, "must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return default if value is None else value

    def choose(self, name: str, choices: Iterable[str]) -> str:
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(name, f"kvbench supports only {', '.join(choices)}")
        return value

    def require(self, name: str, supported: object) -> None:
        """Check that a key is missing, null, or has the one supported value."""
        if self.get(name) not in (None, supported):
            choice = "weights that are not quantised" if supported is None else repr(supported)
            raise self.refuse(name, f"kvbench supports only {choice}")

    def list_of(self, name: str, length: int) -> Sequence[object] | None:
        """Return a list with at least `length` values; None if the key is missing."""
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) < length):
            raise self.refuse(name, f"must be a list with a value for each of {length} layers")
        return value

    def merge(self, *names: str) -> "_Keys":
        """Merge nested objects; messages give the name of the last object that exists."""
        merged: dict[str, object] = {}
        prefix = names[0]
        for name in names:
            value = self.get(name)
            if value is not None and not isinstance(value, Mapping):
                raise self.refuse(name, "must be an object")
            if value:
                merged, prefix = merged | dict(value), name
        return _Keys(merged, self._origin, f"{self._prefix}{prefix}.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_head_dim(keys: _Keys, architecture: Architecture, width: int, heads: int) -> int:
    given = keys.optional_size("head_dim", architecture.head_dim)
    if given is None and width % heads:
        raise keys.refuse(
            "num_attention_heads", f"must divide hidden_size={width}, or head_dim must be given"
        )
    return given or width // heads


def _read_scaling(keys: _Keys, rope: _Keys) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies, whose kind is `rope_type` or, in older files, `type`."""
    name = "rope_type" if rope.get("rope_type") is not None else "type"
    if rope.get(name) in (None, "default"):
        return None
    kind = rope.choose(name, SCALED)
    if kind == "linear":
        return RopeScaling(rope.number("factor"))
    context = keys.optional_size("original_max_position_embeddings") or rope.size(
        "original_max_position_embeddings"
    )
    low, high = (rope.number(f"{band}_freq_factor") for band in ("low", "high"))
    return RopeScaling(rope.number("factor"), low, high, context)


def _read_rotary_dim(keys: _Keys, rope: _Keys, kind: str, head_dim: int) -> int | None:
    """Return the channels of a head that rotate; None for all."""
    name = "partial_rotary_factor"
    owner = rope if rope.get(name) is not None else keys
    share = owner.number(name, 1.0)
    if share > 1 or (share < 1 and kind != "phi3"):
        raise owner.refuse(name, f"kvbench supports only 1 for model_type {kind!r}")
    return None if share == 1 else int(head_dim * share)


def _list_unrotated(keys: _Keys, depth: int) -> tuple[int, ...]:
    """Return layers without RoPE: zeros of `no_rope_layers`, else each `no_rope_layer_interval`-th."""
    flags = keys.list_of("no_rope_layers", depth)
    if flags is None:
        interval = keys.optional_size("no_rope_layer_interval", 4) or 4
        return tuple(range(interval - 1, depth, interval))
    if not set(flags) <= {0, 1}:
        raise keys.refuse("no_rope_layers", "must have 1 for a layer with RoPE and 0 for one without")
    return tuple(layer for layer in range(depth) if not flags[layer])


def _read_context(keys: _Keys, architecture: Architecture) -> int | None:
    """Return the maximum tokens of a sequence, by positions and by a sliding window in use; None without a limit."""
    kinds = keys.list_of("layer_types", 0)
    if kinds is not None and not set(map(str, kinds)) <= set(ATTENTION):
        raise keys.refuse("layer_types", f"kvbench supports only {' and '.join(ATTENTION)}")
    window = keys.optional_size("sliding_window", architecture.sliding_window)
    if not keys.flag("use_sliding_window", architecture.use_sliding_window):
        window = None
    limits = [keys.optional_size("max_position_embeddings"), window]
    return min((limit for limit in limits if limit is not None), default=None)
