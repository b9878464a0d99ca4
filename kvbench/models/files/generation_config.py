"""A model's own settings of generation: `generation_config.json`, or keys of a GGUF file."""

from collections.abc import Callable, Mapping
from pathlib import Path

from kvbench.core.files import parse_json, read_text
from kvbench.models.files.checkpoints import GGUF, WeightsError
from kvbench.models.files.gguf import Gguf, read_gguf
from kvbench.models.files.gguf_tokenizer import make_generation_config
from kvbench.models.files.weights import Source

IGNORED: Mapping[str, object] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "force_words_ids",
                     "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "max_time",
                     "sequence_bias", "stop_strings", "suppress_tokens", "token_healing", "watermarking_config")),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length",
                     "min_new_tokens", "min_p", "no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams", "repetition_penalty", "top_h",
                     "typical_p"), 1),
}  # fmt: skip
"""Unsupported keys that change what transformers' `generate` samples, with their neutral values."""


def read_generation_config(source: Source) -> Mapping[str, object]:
    """Return the contents of a model's `generation_config.json`, after downloading the model; empty without the file.

    For a GGUF file they are the stop tokens of its tokenizer and the sampling that its authors recommend.

    Raises:
        WeightsError: the model is missing, or the file is not a JSON object.
    """
    if (found := read_gguf_keys(source, make_generation_config)) is not None:
        return found
    path = source.locate() / "generation_config.json"
    return read_object(source, path) if path.is_file() else {}


def list_ignored(config: Mapping[str, object], sampling: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a `generation_config.json` that a run ignores.

    Args:
        config: contents of the file.
        sampling: `temperature`, `top_k` and `top_p` of the run; temperature 0 takes the top-1 token.
    """
    samples = bool(config.get("do_sample"))
    effective = {**IGNORED, "do_sample": sampling["temperature"] != 0, **(sampling if samples else {})}
    requested = {"top_k": 50, **config} if samples else config  # transformers' default if it samples
    return {
        key: found
        for key, value in effective.items()
        if (found := requested.get(key)) not in (None, value, []) and not (found is False and value is None)
    }


def read_gguf_keys(
    source: Source, make: Callable[[Gguf], Mapping[str, object]]
) -> Mapping[str, object] | None:
    """Return the result of `make` for the metadata of a GGUF file, which may be downloaded; None for other sources.

    Raises:
        WeightsError: the file is missing or cannot be read, or `make` raised a ValueError.
    """
    if not (source.path or source.file or "").endswith(GGUF):
        return None
    path = source.locate()
    try:
        return make(read_gguf(path))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source.key}: {path}: {error}") from None


def read_object(source: Source, path: Path) -> Mapping[str, object]:
    """Return the JSON object in a file of a model.

    Raises:
        WeightsError: the file cannot be read, or is not a JSON object.
    """
    try:
        values = parse_json(read_text(path))
        if not isinstance(values, Mapping):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{source.key}: {path}: cannot be read ({error}); copy the model's file again"
        ) from None
    return values
