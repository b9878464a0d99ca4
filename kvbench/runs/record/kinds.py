"""How a run keeps what its model makes: a file a sample, images as PNG, texts as UTF-8."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from kvbench.models.base import Model
from kvbench.models.outputs import Text


@dataclass(frozen=True)
class Form:
    """How one kind of sample is kept.

    Attributes:
        kind: name of the folder of samples, and what a model says that it makes (`output`).
        suffix: of their files.
        encode: returns the content of a sample's file.
        describe: returns what a sample's line of samples.jsonl says of it alone, JSON values.
    """

    kind: str
    suffix: str
    encode: Callable[[Any], bytes]
    describe: Callable[[Any], Mapping[str, object]]


def _encode_image(pixels: Any) -> bytes:
    """Return an image uint8 [H, W, 3] as PNG."""
    buffer = io.BytesIO()
    # Two to three times as fast as the default level, files a fifth larger.
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _describe_text(text: Text) -> dict[str, object]:
    return {"tokens": text.tokens, "ended": text.ended}


IMAGES = Form("images", ".png", _encode_image, lambda _: {})
TEXTS = Form("texts", ".txt", lambda text: text.text.encode(), _describe_text)
FORMS = {form.kind: form for form in (IMAGES, TEXTS)}


def find_form(model: Model) -> Form:
    """Return the form of a model's samples."""
    return FORMS[model.output]
