"""Rounding of attention by every path that the device has: distance of outputs from double precision.

One pass rounds an output once. In parts, what a library attends to is rounded before the parts are joined in float32
and rounded again; our own kernels of the past hand on float32. Each row gives the relative root mean square error, and
how many numbers differ from what double precision rounds to.

python -m benchmarks rounding [--device cuda] [--dtype bfloat16] [--tokens 256] [--past 300] [--channels 64]
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.table import Table
from kvbench.kernels.attention_paths import PATHS, WHY_NOT, describe
from kvbench.kernels.layout import Past, arrange_rows
from kvbench.kernels.past_attention import attend_in_parts
from kvbench.kernels.ragged_attention import ragged_attention

HEADS = 8
OPTIONS = {
    "device": "cpu",
    "dtype": Option("bfloat16", "of queries, keys, values and outputs", choices=["bfloat16", "float16"]),
    "tokens": Option(256, "of the present"),
    "past": Option(300, "slots of the longest row; the others have shares of it, the last one none"),
    "channels": Option(64, "of a head"),
}


def main(options: argparse.Namespace) -> None:
    """Print a row per path that can serve the device."""
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
    """Yield each path that can serve and its output; on a CPU parts too, which are not chosen there."""
    shape = describe(q, k, past.layout)
    for path in PATHS:
        if WHY_NOT[path](shape, q.device) is None:
            yield path, ragged_attention(q, k, v, past, scale, path=path)[0]
    if q.device.type == "cpu":
        yield "parts, on a CPU", attend_in_parts(q, k, v, past, scale)[0]


def _attend_exactly(q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float) -> Tensor:
    """Return the output in float64, row by row."""
    out = q.double()
    layout = past.layout
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), layout.counts, strict=True)):
        slots = slice(start, start + length)
        keys, values = (
            torch.cat((stored[:, slots], now[:, row]), 1).double()
            for stored, now in ((past.keys, k), (past.values, v))
        )
        out[:, row] = (q[:, row].double() @ keys.mT * scale).softmax(-1) @ values
    return out


def _compare(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the relative RMS error, and the share in percent of numbers that are not the nearest ones."""
    error = (found.double() - exact).square().mean() / exact.square().mean()
    return float(error.sqrt()), 100 * float((found != exact.to(found.dtype)).double().mean())
