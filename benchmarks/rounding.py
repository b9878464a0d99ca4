"""Rounding error of attention on every path of the device, against double precision.

One pass rounds an output once. In parts, a library rounds its output before the parts are merged in float32 and rounded
again; our own kernels for the past return float32. Each row has the relative root mean square error and the share of
numbers that differ from the rounded double-precision result.

python -m benchmarks rounding [--device cuda] [--dtype bfloat16] [--tokens 256] [--past 300] [--channels 64]
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.reference_attention import attention
from benchmarks.support.table import Table
from kvbench.kernels.attention_paths import PATHS, WHY_NOT, describe
from kvbench.kernels.layout import Past, arrange_rows
from kvbench.kernels.past_attention import attend_in_parts
from kvbench.kernels.ragged_attention import ragged_attention

HEADS = 8
OPTIONS = {
    "device": "cpu",
    "dtype": Option(
        "bfloat16", "dtype of queries, keys, values and outputs", choices=["bfloat16", "float16"]
    ),
    "tokens": Option(256, "current tokens"),
    "past": Option(300, "slots of the longest row; lengths decrease linearly to 0"),
    "channels": Option(64, "channels of a head"),
}


def main(options: argparse.Namespace) -> None:
    """Print a row per usable path."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    counts = [round(options.past * share / (HEADS - 1)) for share in range(HEADS)][::-1]
    layout = arrange_rows(torch.zeros(HEADS, counts[0], dtype=torch.int64, device=device), counts)
    shapes = [(1, HEADS, options.tokens, options.channels)] * 3 + [(1, layout.total, options.channels)] * 2
    q, k, v, keys, values = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    past, scale = Past(keys, values, layout), options.channels**-0.5
    exact = _attend_exactly(q, k, v, past, scale)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.dtype}, {HEADS} rows, past of {counts[0]} to 0 slots")
    table = Table({"RMS error": ".3e", "others, %": ".1f"}, "path")
    table.add("rounded once", *_compare(exact.to(dtype), exact))
    for path, out in _attend(q, k, v, past, scale):
        table.add(path, *_compare(out, exact))


def _attend(q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield each usable path and its output; on a CPU also attention in parts, which is not chosen there."""
    shape = describe(q, k, past.layout)
    for path in PATHS:
        if WHY_NOT[path](shape, q.device) is None:
            yield path, ragged_attention(q, k, v, past, scale, path=path)[0]
    if q.device.type == "cpu":
        yield "parts, on a CPU", attend_in_parts(q, k, v, past, scale)[0]


def _attend_exactly(q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float) -> Tensor:
    """Return the output in float64, row by row."""
    out, layout = q.double(), past.layout
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), layout.counts, strict=True)):
        stored = past.keys[:, start : start + length], past.values[:, start : start + length]
        out[:, row], _ = attention(q[:, row], stored, (k[:, row], v[:, row]), scale, False)
    return out


def _compare(out: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the relative RMS error, and the percentage of numbers that are not the nearest ones."""
    error = (out.double() - exact).square().mean() / exact.square().mean()
    return float(error.sqrt()), 100 * float((out != exact.to(out.dtype)).double().mean())
