"""Kinds of samples and their files: images as PNG, generated texts as UTF-8, scored texts as safetensors."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.core.files import name_sample
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.files.samples import SampleSet
from kvbench.eval.files.texts import TextSet
from kvbench.forced.record import ScoredText

PLUGINS = "kvbench.samples"
"""Entry point group with a package's kinds of samples, each a `SampleKind`."""


@dataclass(frozen=True)
class SampleKind:
    """File format of one kind of sample.

    Attributes:
        samples: class that reads a run's folder; its `kind` is the model's `output`.
        encode: returns the content of a sample's file.
        describe: returns a sample's additional fields in samples.jsonl, JSON values.
    """

    samples: type[SampleSet]
    encode: Callable[[Any], bytes]
    describe: Callable[[Any], Mapping[str, object]] = lambda _: {}

    @property
    def kind(self) -> str:
        """Name of the folder of samples, such as `images`."""
        return self.samples.kind

    @property
    def suffix(self) -> str:
        """Suffix of the samples' file names."""
        return self.samples.suffix

    def find(self, folder: Path, index: int) -> Path:
        """Return the path of a sample in a run's folder."""
        return folder / self.kind / name_sample(index, self.suffix)


def _encode_image(pixels: Any) -> bytes:
    """Return an image uint8 [H, W, 3] as PNG."""
    buffer = io.BytesIO()
    # Two to three times as fast as the default level, files a fifth larger.
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _encode_text(generated: Any) -> bytes:
    return str(generated.text).encode()


def _describe_text(generated: Any) -> Mapping[str, object]:
    return {"tokens": generated.tokens, "ended": generated.ended}


IMAGES = SampleKind(ImageSet, _encode_image)
TEXTS = SampleKind(TextSet, _encode_text, _describe_text)
READINGS = SampleKind(ReadingSet, ScoredText.encode, ScoredText.describe)


@cache
def list_kinds() -> Mapping[str, SampleKind]:
    """Return all kinds of samples, plugins' included, by name; raise ConfigError for a wrong entry of a plugin."""
    kinds = {known.kind: known for known in (IMAGES, TEXTS, READINGS)}
    for entry in entry_points(group=PLUGINS):
        added = entry.load()
        if not isinstance(added, SampleKind) or added.kind in kinds:
            raise ConfigError(f"entry point {entry.name} of {PLUGINS}: {entry.value} is not a new SampleKind")
        kinds[added.kind] = added
    return kinds


def find_kind(output: str) -> SampleKind:
    """Return the kind of samples that a model's `output` names; raise ConfigError if there is no such kind."""
    kinds = list_kinds()
    if output not in kinds:
        raise ConfigError(f"model: its output is {output}; kinds of samples are {', '.join(kinds)}")
    return kinds[output]


def find_stored_kind(folder: Path) -> SampleKind | None:
    """Return the kind of samples in a run's folder; None for other folders."""
    return next((kind for kind in list_kinds().values() if (folder / kind.kind).is_dir()), None)


def open_samples(folder: Path, indices: Sequence[int] | None = None) -> SampleSet:
    """Open a run folder of any kind, as images if it has no samples; raise SampleSetError if it cannot be scored.

    Args:
        folder: the run.
        indices: samples to open, of a run that may be unfinished; None for all of a whole run.
    """
    kind = find_stored_kind(folder) or IMAGES
    return kind.samples(folder) if indices is None else kind.samples(folder, indices)
