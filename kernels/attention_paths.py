"""Choice of the kernels for a segment's attention, by a table of measurements or by published rates.

`python -m benchmarks kernels --paths` measures all paths on a GPU and writes the table, `attention_paths.json`: shapes
and the milliseconds of each path, by device name. An unmeasured shape uses the nearest measured one; on an unmeasured
device `estimate_saving` decides.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from math import log2
from pathlib import Path as File
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from kvbench.kernels.attention_choices import AttentionChoice
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.fused_attention import BATCH_DEPENDENT, Backend, Request, choose_backend
from kvbench.kernels.layout import Layout
from kvbench.kernels.past_attention import MIN_FUSED_SLOTS
from kvbench.kernels.varlen_attention import Library, find_varlen_obstacle

Path = Literal["products", "kernel", "parts", "varlen_cudnn", "varlen_flash", "varlen_fa3"]
"""`products`: torch's matrix products on a CPU, rows of one length at a time. `kernel`: one kernel for past and
present. `parts`: torch's fused attention for the present, and for a past of long rows of one length; otherwise a kernel
for the past that resumes from the state of the present. `varlen_*`: fused attention for the present, a library's
variable-length attention for the past."""
PATHS: tuple[Path, ...] = get_args(Path)
LIBRARIES: Mapping[Path, Library] = {
    "varlen_cudnn": "cudnn", "varlen_flash": "flash", "varlen_fa3": "fa3",
}  # fmt: skip
"""Paths that read the past with a library, and the library."""
TABLE = File(__file__).with_suffix(".json")
RATES: Mapping[str, float] = {"kernel": 389e12, "flash": 368e12, "cudnn": 609e12, "FA3": 638e12}
"""Operations per second of forward attention on an H100, 128 channels in 16 bits (arXiv:2407.08608); `kernel` is
for Triton."""
BANDWIDTH = 3.35e12
"""Memory bytes per second of an H100, by its data sheet."""
MIN_SAVING = 20e-6
"""Seconds of device time that a second launch must save to outweigh its cost on the host."""


class Shape(NamedTuple):
    """Shape of an attention call.

    Attributes:
        head_dim: channels of a query, D.
        dtype: torch name of the dtype of the queries.
        rows: heads of all sequences.
        queries: queries per row.
        tokens: current tokens.
        past: mean number of cached slots per row.
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
    """Return the shape of attention from q to k, both [sequences, heads, tokens, D], and a past."""
    sequences, heads, queries, channels = q.shape
    dtype, past = str(q.dtype).removeprefix("torch."), layout.total // len(layout.counts)
    return Shape(channels, dtype, sequences * heads, queries, k.shape[2], past, layout.uniform)


def _make_request(shape: Shape, device: torch.device) -> Request:
    """Return the request of a shape to a library."""
    return Request(shape.head_dim, getattr(torch, shape.dtype), shape.queries, device)


def find_obstacle(path: Path, shape: Shape, device: torch.device) -> str | None:
    """Return why a path cannot serve a shape on a device; None if it can."""
    if path == "products":
        return "reads rows by length, for CPUs" if device.type == "cuda" else None
    if path in LIBRARIES:
        problem = find_varlen_obstacle(LIBRARIES[path], _make_request(shape, device))
    elif device.type != "cuda":
        problem = "needs a GPU"
    else:
        fits = shape.head_dim <= 256 and not shape.head_dim % 4
        problem = None if fits else "needs at most 256 channels, a multiple of 4"
    if problem or path == "kernel":
        return problem
    if is_batch_invariant():
        return BATCH_DEPENDENT
    if path in LIBRARIES:
        return None if shape.past else "there is no past"
    if shape.head_dim % 8:  # tile descriptors need rows of a multiple of 16 bytes
        return "needs a multiple of 8 channels"
    return None if shape.tokens else "there is no present"


def choose_path(shape: Shape, device: torch.device) -> Path:
    """Return the fastest path that can serve a shape on a device.

    Unmeasured paths are not checked: the check of variable-length attention imports torch's compiler.
    """
    if device.type != "cuda":
        return "products"
    times = _find_times(shape, device)
    for path in sorted(times, key=times.__getitem__):
        if find_obstacle(path, shape, device) is None:
            return path
    if find_obstacle("parts", shape, device):
        return "kernel"
    saved = estimate_saving(shape, choose_backend(_make_request(shape, device)))
    return "parts" if saved > MIN_SAVING else "kernel"


def explain_path(shape: Shape, device: torch.device) -> AttentionChoice:
    """Return the path of a shape on a device, and the reason against every other path."""
    chosen = choose_path(shape, device)
    times = _find_times(shape, device) if device.type == "cuda" else {}

    def compare(path: Path) -> str:
        if path in times and chosen in times:
            return f"{times[path]:.4g} ms against {times[chosen]:.4g} ms at the nearest measured shape"
        if times or path in LIBRARIES:
            return "not measured at a comparable shape (python -m benchmarks kernels --paths)"
        return f"saves less than {1e6 * MIN_SAVING:.0f} us by published rates"

    others = [path for path in PATHS if path != chosen]
    reasons = tuple((path, find_obstacle(path, shape, device) or compare(path)) for path in others)
    return AttentionChoice(chosen, reasons)


def _find_times(shape: Shape, device: torch.device) -> Mapping[Path, float]:
    """Return the milliseconds of every path at the nearest measured shape; empty if no comparable shape exists."""
    name = torch.cuda.get_device_properties(device).name
    alike = [line for line in read_table().get(name, ()) if _is_alike(shape, line)]
    if not alike:
        return {}
    times: Mapping[Path, float] = min(alike, key=lambda line: _measure_distance(shape, line))["milliseconds"]
    return times


def describe_paths(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return the basis of the choice in JSON values: the table's digest, and which paths can serve long rows."""
    shape = Shape(head_dim, str(dtype).removeprefix("torch."), 1, 4096, 4096, 4096, uniform=False)
    on_gpu = device.type == "cuda"
    measured = on_gpu and torch.cuda.get_device_properties(device).name in read_table()
    checked = [path for path in PATHS if measured or path not in LIBRARIES]
    return {
        "table_sha256": sha256(TABLE.read_bytes()).hexdigest(),
        "measured": measured,
        "fused": choose_backend(_make_request(shape, device)) if on_gpu else None,
        "paths": dict.fromkeys(PATHS, "not measured on this device")
        | {path: find_obstacle(path, shape, device) or "can serve" for path in checked},
    }


def estimate_saving(shape: Shape, backend: Backend) -> float:
    """Return the seconds that two parts save, by published rates; 0 if a rate is unknown.

    Fused attention computes its part faster, but a second pass over the queries reads and writes the output again,
    and fused attention to the past writes a second output.

    Args:
        shape: shape in 16 bits.
        backend: backend of fused attention.
    """
    name = "FA3" if backend == "flash" and current_flash_attention_impl() else backend
    if shape.head_dim != 128 or name not in RATES:
        return 0.0
    elements = shape.rows * shape.queries * shape.head_dim
    both = shape.uniform and shape.past >= MIN_FUSED_SLOTS
    faster = 4 * elements * (shape.tokens + (shape.past if both else 0))
    moved = 2 * elements * ((4 if both else 2) if shape.past else 0)
    return faster / RATES["kernel"] - faster / RATES[name] - moved / BANDWIDTH


@cache
def read_table() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the measured shapes and the milliseconds of their paths, by device name."""
    table: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads(TABLE.read_text())
    return table


def _is_alike(shape: Shape, line: Mapping[str, Any]) -> bool:
    """Return whether a measured shape differs in its counts only; a call without current tokens is another case."""
    kind = shape.head_dim, shape.dtype, shape.uniform, shape.tokens > 0
    return kind == (line["head_dim"], line["dtype"], line["uniform"], line["tokens"] > 0)


def _measure_distance(shape: Shape, line: Mapping[str, Any]) -> float:
    """Return the sum over all counts of how often a measured shape must be doubled or halved to match."""
    counts = ("rows", "queries", "tokens", "past")
    return sum(abs(log2((getattr(shape, name) + 1) / (line[name] + 1))) for name in counts)
