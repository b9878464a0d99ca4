"""Keys and values as static codebooks decode them, for calibrations that measure the error of storage."""

import torch
from torch import Tensor

from kvbench.engine.coding.codecs import encode_static, name_table
from kvbench.engine.coding.formats import CodebookTensors
from kvbench.kernels.planes import Codes, decode, rotate, unrotate
from kvbench.methods.shared.precision import find_stored_bits


def read_back(
    keys: Tensor, values: Tensor, bits: int, segment: int, codebooks: CodebookTensors, rotation: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a segment as decoded from static codebooks, shaped like `keys`, in its dtype.

    Args:
        keys: [rows, tokens, D].
        values: shaped like keys.
        bits: bits per value, at most 16.
        segment: index of the segment.
        codebooks: codebooks of the layer, [H, sources, D, levels] by name.
        rotation: complex64 [tokens, D/2], factors on neighbouring channels of keys; None without rotation.
    """
    dtype = keys.dtype
    half = dtype if dtype.itemsize == 2 else torch.float16
    if find_stored_bits(bits, keys.shape[1]) == 16:
        return keys.to(half).to(dtype), values.to(half).to(values.dtype)
    decoded = []
    for side, x in (("keys", keys), ("values", values)):
        turns = rotation if side == "keys" else None
        x = x if turns is None else unrotate(x[None], turns)[0]
        codebook = codebooks[f"{side}_{bits}"]
        table = codebook[:, min(segment, codebook.shape[1] - 1)]
        codes = encode_static(x[None], table[:, None], [(0, x.shape[1])], bits)
        entry = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1]) % len(table)
        read = decode(Codes(codes, **name_table(table, bits), entry=entry), bits).unflatten(1, x.shape[:2])
        decoded.append(read[0] if turns is None else rotate(read, turns)[0])
    return decoded[0].to(dtype), decoded[1].to(dtype)
