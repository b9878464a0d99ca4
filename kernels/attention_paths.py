"""Choice of the kernels for a segment's attention on a GPU, by a table of measurements or by published rates.

`benchmarks/kernels.py --paths` measures both ways on a GPU and writes the table, `attention_paths.json`: under the
device's name a list of shapes with the faster way. A shape that was not measured goes the way of the nearest one that
was; on a device without measurements the estimate of `estimate_saving` decides.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import log2
from pathlib import Path as File
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from kvbench.kernels.fused_attention import Backend, choose_backend
from kvbench.kernels.layout import Layout
from kvbench.kernels.past_attention import LONG

Path = Literal["kernel", "parts"]
"""`kernel`: past and present by one kernel. `parts`: the present by torch's fused attention, and with it a past of long
rows of one length; any other past by a kernel that starts from what the present came to."""
TABLE = File(__file__).with_suffix(".json")
RATES: Mapping[str, float] = {"kernel": 389e12, "flash": 368e12, "cudnn": 609e12, "FA3": 638e12}
"""Operations per second of forward attention on an H100, 128 channels in 16 bits (arXiv:2407.08608); `kernel` is what
one in Triton reaches there."""
BANDWIDTH = 3.35e12
"""Bytes per second of that GPU's memory, by its data sheet."""
LAUNCH = 20e-6
"""Seconds of device time that must be saved before a second launch is worth what it costs the host."""


class Shape(NamedTuple):
    """What attention is asked for.

    Attributes:
        head_dim: channels of a query, D.
        dtype: of the queries, as torch names it.
        rows: heads of all sequences.
        queries: of a row.
        tokens: of the present.
        past: cached slots of a row, a mean.
        uniform: whether all rows are equally long.
    """

    head_dim: int
    dtype: str
    rows: int
    queries: int
    tokens: int
    past: int
    uniform: bool


def describe(q: Tensor, k: Tensor, layout: Layout) -> Shape:
    """Return the shape of attention from q and to k, both [sequences, heads, tokens, D], and to a past."""
    sequences, heads, queries, channels = q.shape
    dtype, past = str(q.dtype).removeprefix("torch."), layout.total // len(layout.counts)
    return Shape(channels, dtype, sequences * heads, queries, k.shape[2], past, layout.uniform)


def choose_path(shape: Shape, device: torch.device) -> Path:
    """Return the way that a shape goes on a CUDA device."""
    if not shape.tokens:
        return "kernel"
    measured = read_table().get(torch.cuda.get_device_properties(device).name, ())
    alike = [line for line in measured if (line["head_dim"], line["dtype"], line["uniform"]) == _kind(shape)]
    if alike:
        path: Path = min(alike, key=lambda line: _distance(shape, line))["path"]
        return path
    dtype = getattr(torch, shape.dtype)
    backend = choose_backend(shape.head_dim, dtype, shape.queries, device)
    return "parts" if estimate_saving(shape, backend) > LAUNCH else "kernel"


def estimate_saving(shape: Shape, backend: Backend, rates: Mapping[str, float] = RATES) -> float:
    """Return the seconds that two parts save, by published rates; 0 where none is known.

    Fused attention does its share faster, but a second pass over the queries reads and writes the output once more,
    and of a past that it does too there is a second output.

    Args:
        shape: what is asked for, in 16 bits.
        backend: whose fused attention would be used.
        rates: operations per second.
    """
    name = "FA3" if backend == "flash" and current_flash_attention_impl() else backend
    if shape.head_dim != 128 or name not in rates:
        return 0.0
    numbers = shape.rows * shape.queries * shape.head_dim
    both = shape.uniform and shape.past >= LONG
    faster = 4 * numbers * (shape.tokens + (shape.past if both else 0))
    moved = 2 * numbers * ((4 if both else 2) if shape.past else 0)
    return faster / rates["kernel"] - faster / rates[name] - moved / BANDWIDTH


@cache
def read_table() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the measured shapes and their ways by the device's name."""
    table: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads(TABLE.read_text())
    return table


def _kind(shape: Shape) -> tuple[int, str, bool]:
    return shape.head_dim, shape.dtype, shape.uniform


def _distance(shape: Shape, line: Mapping[str, Any]) -> float:
    """Return how many times a measured shape must be doubled or halved to become another, all numbers together."""
    counts = ("rows", "queries", "tokens", "past")
    return sum(abs(log2((getattr(shape, name) + 1) / (line[name] + 1))) for name in counts)
