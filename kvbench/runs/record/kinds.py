"""Kinds of samples and their files: images as PNG, texts as UTF-8, one file per sample."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from kvbench.core.files import name_sample

if TYPE_CHECKING:  # imports torch, which reading runs does not need
    from kvbench.models.base import Model
    from kvbench.models.outputs import Text


@dataclass(frozen=True)
class SampleKind:
    """File format of one kind of sample.

    Attributes:
        kind: name of the folder of samples, and the model's `output`.
        suffix: file name suffix.
        encode: returns the content of a sample's file.
        describe: returns a sample's additional fields in samples.jsonl, JSON values.
    """

    kind: str
    suffix: str
    encode: Callable[[Any], bytes]
    describe: Callable[[Any], Mapping[str, object]]

    def find(self, folder: Path, index: int) -> Path:
        """Return the path of a sample in a run's folder."""
        return folder / self.kind / name_sample(index, self.suffix)


def _encode_image(pixels: Any) -> bytes:
    """Return an image uint8 [H, W, 3] as PNG."""
    buffer = io.BytesIO()
    # Two to three times as fast as the default level, files a fifth larger.
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _describe_text(text: "Text") -> dict[str, object]:
    return {"tokens": text.tokens, "ended": text.ended}


IMAGES = SampleKind("images", ".png", _encode_image, lambda _: {})
TEXTS = SampleKind("texts", ".txt", lambda text: text.text.encode(), _describe_text)
SAMPLE_KINDS = {one.kind: one for one in (IMAGES, TEXTS)}


def find_sample_kind(model: "Model") -> SampleKind:
    """Return the kind of a model's samples."""
    return SAMPLE_KINDS[model.output]
