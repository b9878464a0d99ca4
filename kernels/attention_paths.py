"""Choice of the kernels for a segment's attention, by a table of measurements or by published rates.

`python -m benchmarks kernels --paths` measures all paths on a GPU and writes the table, `attention_paths.json`: shapes
and the milliseconds of each path, by device name. An unmeasured shape uses the nearest measured one; on an unmeasured
device `estimate_saving` decides. `WHY_NOT` has a function for each path that returns why it cannot serve; the choice
and its explanation both call it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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
from kvbench.kernels.varlen_attention import Library, why_not_varlen

Path = Literal["products", "kernel", "parts", "varlen_cudnn", "varlen_flash", "varlen_fa3"]
"""`products`: torch's matrix products on a CPU, rows of one length at a time. `kernel`: one kernel for past and
present. `parts`: torch's fused attention for the present, and for a past of long rows of one length; otherwise a kernel
for the past that resumes from the state of the present. `varlen_*`: fused attention for the present, a library's
variable-length attention for the past."""
PATHS: tuple[Path, ...] = get_args(Path)
LIBRARIES: Mapping[Path, Library] = {
    "varlen_cudnn": "cudnn", "varlen_flash": "flash", "varlen_fa3": "fa3",
}  # fmt: skip
"""Paths that read the past with a library."""
TABLE = File(__file__).with_suffix(".json")
RATES: Mapping[str, float] = {"kernel": 389e12, "flash": 368e12, "cudnn": 609e12, "FA3": 638e12}
"""Operations per second of forward attention on an H100, 128 channels in 16 bits (arXiv:2407.08608); `kernel` is
for Triton."""
BANDWIDTH = 3.35e12
"""Memory bytes per second of that GPU, by its data sheet."""
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
    """Return the request to a library, without the numbers of rows and keys."""
    return Request(shape.head_dim, getattr(torch, shape.dtype), shape.queries, device)


def _why_not_kernel(shape: Shape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    return (
        "needs at most 256 channels, a multiple of 4" if shape.head_dim % 4 or shape.head_dim > 256 else None
    )


def _why_not_parts(shape: Shape, device: torch.device) -> str | None:
    if problem := _why_not_kernel(shape, device):
        return problem
    if is_batch_invariant():
        return BATCH_DEPENDENT
    if shape.head_dim % 8:  # tile descriptors need rows of a multiple of 16 bytes
        return "needs a multiple of 8 channels"
    return None if shape.tokens else "there is no present"


def _why_not_library(library: Library, shape: Shape, device: torch.device) -> str | None:
    if problem := why_not_varlen(library, _make_request(shape, device)):
        return problem
    if is_batch_invariant():
        return BATCH_DEPENDENT
    return None if shape.past else "there is no past"


WHY_NOT: Mapping[Path, Callable[[Shape, torch.device], str | None]] = {
    "products": lambda _, device: "reads rows by length, for CPUs" if device.type == "cuda" else None,
    "kernel": _why_not_kernel,
    "parts": _why_not_parts,
    **{path: partial(_why_not_library, library) for path, library in LIBRARIES.items()},
}
"""Functions that return why a path cannot serve a shape on a device, or None if it can."""


def choose_path(shape: Shape, device: torch.device) -> Path:
    """Return the fastest path that can serve a shape on a device."""
    return _decide(shape, device)[0]


def explain_path(shape: Shape, device: torch.device) -> AttentionChoice:
    """Return the path of a shape on a device, and the reason against every other path."""
    path, reason = _decide(shape, device)
    others = [other for other in PATHS if other != path]
    return AttentionChoice(
        path, tuple((other, WHY_NOT[other](shape, device) or reason(other)) for other in others)
    )


def _decide(shape: Shape, device: torch.device) -> tuple[Path, Callable[[Path], str]]:
    """Return a shape's path, and a function that explains why another usable path is slower.

    Unmeasured paths are not checked: the check of variable-length attention imports torch's compiler.
    """
    if device.type != "cuda":
        return "products", lambda _: "costs more on a CPU"
    name = torch.cuda.get_device_properties(device).name
    times = _find_times(shape, name)
    for path in sorted(times, key=times.__getitem__):
        if WHY_NOT[path](shape, device) is None:
            return path, partial(_explain_measured, times, times[path])
    saved = 0.0
    if WHY_NOT["parts"](shape, device) is None:
        saved = estimate_saving(shape, choose_backend(_make_request(shape, device)))
    return "parts" if saved > MIN_SAVING else "kernel", partial(_explain_estimated, name)


def _explain_measured(times: Mapping[Path, float], best: float, path: Path) -> str:
    if path not in times:
        return "not measured at the nearest shape"
    return f"{times[path]:.4g} ms against {best:.4g} ms at the nearest measured shape"


def _explain_estimated(name: str, path: Path) -> str:
    if path.startswith("varlen"):
        return f"not measured on {name} (python -m benchmarks kernels --paths)"
    if path == "parts":
        return f"saves no {1e6 * MIN_SAVING:.0f} us by published rates"
    return f"costs {1e6 * MIN_SAVING:.0f} us more by published rates"


def _find_times(shape: Shape, device: str) -> Mapping[Path, float]:
    """Return the milliseconds of every path at the nearest measured shape; empty if no comparable shape exists."""
    alike = [line for line in read_table().get(device, ()) if _is_alike(shape, line)]
    if not alike:
        return {}
    times: Mapping[Path, float] = min(alike, key=lambda line: _measure_distance(shape, line))["milliseconds"]
    return times


def describe_paths(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return the basis of the choice in JSON values: the table's digest, and which paths can serve long rows.

    Args:
        head_dim: D.
        dtype: dtype of the queries.
        device: device of the queries.
    """
    shape = Shape(head_dim, str(dtype).removeprefix("torch."), 1, 4096, 4096, 4096, uniform=False)
    on_gpu = device.type == "cuda"
    measured = on_gpu and torch.cuda.get_device_properties(device).name in read_table()
    checked = [path for path in PATHS if measured or path not in LIBRARIES]
    return {
        "table_sha256": sha256(TABLE.read_bytes()).hexdigest(),
        "measured": measured,
        "fused": choose_backend(_make_request(shape, device)) if on_gpu else None,
        "paths": dict.fromkeys(PATHS, "not measured on this device")
        | {path: WHY_NOT[path](shape, device) or "can serve" for path in checked},
    }


def estimate_saving(shape: Shape, backend: Backend, rates: Mapping[str, float] = RATES) -> float:
    """Return the seconds that two parts save, by published rates; 0 if a rate is unknown.

    Fused attention computes its part faster, but a second pass over the queries reads and writes the output again,
    and fused attention to the past writes a second output.

    Args:
        shape: shape in 16 bits.
        backend: backend of fused attention.
        rates: operations per second.
    """
    name = "FA3" if backend == "flash" and current_flash_attention_impl() else backend
    if shape.head_dim != 128 or name not in rates:
        return 0.0
    numbers = shape.rows * shape.queries * shape.head_dim
    both = shape.uniform and shape.past >= MIN_FUSED_SLOTS
    faster = 4 * numbers * (shape.tokens + (shape.past if both else 0))
    moved = 2 * numbers * ((4 if both else 2) if shape.past else 0)
    return faster / rates["kernel"] - faster / rates[name] - moved / BANDWIDTH


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
