"""Reading of a batch with forced tokens, and its comparison with the full cache's reading."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.files import check_file
from kvbench.engine.cache import KVCache
from kvbench.eval.files.readings import STATES
from kvbench.models.noise import Noise
from kvbench.models.outputs import ReadText
from kvbench.models.reading.reader import Reader


def read_batch(
    reader: Reader[Any], prompts: Sequence[str], cache: KVCache, noise: Noise, full: Sequence[Path] | None
) -> list[ReadText]:
    """Read a batch and compare it with the full cache's readings.

    Args:
        reader: loaded.
        prompts: prompts of the batch.
        cache: cache of keys and values, under the run's method.
        noise: randomness, per prompt.
        full: files of the full cache's readings; None for its own.

    Raises:
        ConfigError: such a file is damaged, or of another text.
    """
    if full is None:
        return [reader.compare(passed, None) for passed in reader.read(prompts, cache, noise, None)]
    stored = [_read_full(path) for path in full]
    batch = reader.read(prompts, cache, noise, [tokens.long() for tokens, _ in stored])
    for path, passed, (_, states) in zip(full, batch, stored, strict=True):
        if passed.states.shape != states.shape:
            raise ConfigError(f"{path}: is of another text; delete it to read again")
    return [reader.compare(passed, states) for passed, (_, states) in zip(batch, stored, strict=True)]


def _read_full(path: Path) -> tuple[Tensor, Tensor]:
    """Return the tokens and the hidden states of the full cache's reading."""
    try:
        with safe_open(check_file(path), framework="pt") as file:
            return file.get_tensor("tokens"), file.get_tensor(STATES)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: not a reading of the full cache ({error}); delete it to read again"
        ) from None
