"""Keys and values as static codebooks decode them, for calibrations that measure the error of storage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.core.storage import find_stored_bits
from kvbench.engine.coding.formats import CodebookTensors, encode_static, name_table
from kvbench.engine.coding.scale_residuals import SIDES, interpolate, list_parents
from kvbench.kernels.planes import Codes, decode, rotate, unrotate


def predict_scale(
    decoded: tuple[Tensor, Tensor],
    before: Segment,
    segment: Segment,
    books: CodebookTensors,
    rotation: Tensor | None,
) -> list[Tensor]:
    """Return the predictions of a scale, keys before rotation and values: float32 [rows, tokens, D].

    Args:
        decoded: keys and values of the scale before, [rows, tokens, D].
        before: the scale before.
        segment: the scale.
        books: of the layer, with factors [H, K - 1] by name.
        rotation: complex64 [tokens, D/2] of the scale before; None without a rotation.
    """
    parents, weights = (part.to(decoded[0].device) for part in list_parents(before, segment))
    keys = decoded[0] if rotation is None else unrotate(decoded[0][None], rotation)[0]
    found = []
    for side, x in zip(SIDES, (keys, decoded[1]), strict=True):
        factor = books[f"{side}_factor"][:, segment.index]
        found.append(
            factor.repeat(len(x) // len(factor))[:, None, None] * interpolate(x.float(), parents, weights)
        )
    return found


def read_back(
    keys: Tensor,
    values: Tensor,
    bits: int,
    segment: int,
    books: CodebookTensors,
    rotation: Tensor | None,
    *,
    guesses: Sequence[Tensor] | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a segment as static codebooks would store them, in their dtype.

    Args:
        keys: [rows, tokens, D].
        values: shaped like keys.
        bits: of a number, 16 or fewer.
        segment: index of the segment.
        books: of the layer, [H, sources, D, levels] by name; codebooks of differences have the suffix `_residual`.
        rotation: complex64 [tokens, D/2], factors on neighbouring channels of keys; None without a rotation.
        guesses: predictions of `predict_scale`, whose differences are encoded; None to encode the numbers themselves.
        shared: the second half of the rows decodes the codes of the first half, with its own predictions.
    """
    dtype = keys.dtype
    half = dtype if dtype.itemsize == 2 else torch.float16
    if find_stored_bits(bits, keys.shape[1]) == 16:
        stored = (x.to(half).to(x.dtype) for x in (keys, values))
        first, second = (_share(x) if shared else x for x in stored)
        return first, second
    found = []
    for number, (side, x) in enumerate(zip(SIDES, (keys, values), strict=True)):
        x = unrotate(x[None], rotation)[0] if rotation is not None and number == 0 else x
        book = books[f"{side}_{bits}"]
        source = min(segment, book.shape[1] - 1)
        table = book[:, source]
        if guesses is not None:
            predicted = books[f"{side}_factor"][:, segment, None, None] != 0
            table = torch.where(predicted, books[f"{side}_{bits}_residual"][:, source], table)
            x = x.float() - guesses[number]
        x = _share(x) if shared else x
        numbers = encode_static(x[None], table[:, None], [(0, x.shape[1])], bits)
        entry = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1]) % len(table)
        read = decode(Codes(numbers, **name_table(table, bits), entry=entry), bits).unflatten(1, x.shape[:2])
        read = read[0] if guesses is None else read[0] + guesses[number]
        found.append(rotate(read[None], rotation)[0] if rotation is not None and number == 0 else read)
    return found[0].to(dtype), found[1].to(dtype)


def _share(rows: Tensor) -> Tensor:
    """Give the second half of the rows the contents of the first half."""
    return rows[: len(rows) // 2].repeat(2, *[1] * (rows.dim() - 1))
