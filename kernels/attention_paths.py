"""Choice of the kernels for a segment's attention, by a table of measurements or by published rates.

`benchmarks/kernels.py --paths` measures all paths on a GPU and writes the table, `attention_paths.json`: under the
device's name a list of shapes with the milliseconds of each path. A shape that was not measured is taken for the
nearest one that was; on a device without measurements the estimate of `estimate_saving` decides. Each path has a
function that says why it cannot serve: the choice and its explanation ask the same one.
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

from kvbench.kernels.attention_choices import Choice
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.fused_attention import VARIES, Backend, Request, choose_backend
from kvbench.kernels.layout import Layout
from kvbench.kernels.past_attention import LONG
from kvbench.kernels.varlen_attention import Library, why_not_varlen

Path = Literal["products", "kernel", "parts", "varlen_cudnn", "varlen_flash", "varlen_fa3"]
"""`products`: torch's products, rows of one length at a time, on a CPU. `kernel`: past and present by one kernel.
`parts`: the present by torch's fused attention, and with it a past of long rows of one length; any other past by a
kernel that starts from what the present came to. `varlen_*`: the present by fused attention, the past by torch's
variable-length attention of a library."""
PATHS: tuple[Path, ...] = get_args(Path)
LIBRARIES: Mapping[Path, Library] = {
    "varlen_cudnn": "cudnn", "varlen_flash": "flash", "varlen_fa3": "fa3",
}  # fmt: skip
"""Paths on which a library reads the past."""
TABLE = File(__file__).with_suffix(".json")
RATES: Mapping[str, float] = {"kernel": 389e12, "flash": 368e12, "cudnn": 609e12, "FA3": 638e12}
"""Operations per second of forward attention on an H100, 128 channels in 16 bits (arXiv:2407.08608); `kernel` is what
one in Triton reaches there."""
BANDWIDTH = 3.35e12
"""Bytes per second of that GPU's memory, by its data sheet."""
LAUNCH = 20e-6
"""Seconds of device time that must be saved before a second launch is worth what it costs the host."""


class Shape(NamedTuple):
    """Request for attention.

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


def _request(shape: Shape, device: torch.device) -> Request:
    """Return what a library is asked for; it is told neither how many rows nor how many keys there are."""
    return Request(shape.head_dim, getattr(torch, shape.dtype), shape.queries, device)


def _why_not_kernel(shape: Shape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    return (
        "needs at most 256 channels, a multiple of 8" if shape.head_dim % 8 or shape.head_dim > 256 else None
    )


def _why_not_parts(shape: Shape, device: torch.device) -> str | None:
    if problem := _why_not_kernel(shape, device):
        return problem
    if is_batch_invariant():
        return VARIES
    return None if shape.tokens else "there is no present"


def _why_not_library(library: Library, shape: Shape, device: torch.device) -> str | None:
    if problem := why_not_varlen(library, _request(shape, device)):
        return problem
    if is_batch_invariant():
        return VARIES
    return None if shape.past else "there is no past"


WHY_NOT: Mapping[Path, Callable[[Shape, torch.device], str | None]] = {
    "products": lambda _, device: "reads rows by length, for CPUs" if device.type == "cuda" else None,
    "kernel": _why_not_kernel,
    "parts": _why_not_parts,
    **{path: partial(_why_not_library, library) for path, library in LIBRARIES.items()},
}
"""By path: why it cannot serve a shape on a device; None if it can."""


def choose_path(shape: Shape, device: torch.device) -> Path:
    """Return the path that a shape takes on a device: of those that can serve it the fastest one."""
    return _decide(shape, device)[0]


def explain_path(shape: Shape, device: torch.device) -> Choice:
    """Return the path that a shape takes on a device, and for every other one why it does not."""
    path, reason = _decide(shape, device)
    others = [other for other in PATHS if other != path]
    return Choice(path, tuple((other, WHY_NOT[other](shape, device) or reason(other)) for other in others))


def _decide(shape: Shape, device: torch.device) -> tuple[Path, Callable[[Path], str]]:
    """Return a shape's path, and what says of another one that could serve it why it is not taken.

    Paths that were not measured are not asked: to ask of variable-length attention imports torch's compiler.
    """
    if device.type != "cuda":
        return "products", lambda _: "costs more on a CPU"
    name = torch.cuda.get_device_properties(device).name
    times = _find_times(shape, name)
    for path in sorted(times, key=times.__getitem__):
        if WHY_NOT[path](shape, device) is None:
            return path, partial(_compare, times, times[path])
    saved = 0.0
    if WHY_NOT["parts"](shape, device) is None:
        saved = estimate_saving(shape, choose_backend(_request(shape, device)))
    return "parts" if saved > LAUNCH else "kernel", partial(_estimate, name)


def _compare(times: Mapping[Path, float], best: float, path: Path) -> str:
    if path not in times:
        return "not measured at the nearest shape"
    return f"{times[path]:.4g} ms against {best:.4g} ms at the nearest measured shape"


def _estimate(name: str, path: Path) -> str:
    if path.startswith("varlen"):
        return f"not measured on {name} (python -m benchmarks kernels --paths)"
    if path == "parts":
        return f"saves no {1e6 * LAUNCH:.0f} us by published rates"
    return f"costs {1e6 * LAUNCH:.0f} us more by published rates"


def _find_times(shape: Shape, device: str) -> Mapping[Path, float]:
    """Return the milliseconds of every path at the nearest shape that was measured; empty if none is alike."""
    alike = [line for line in read_table().get(device, ()) if _is_alike(shape, line)]
    if not alike:
        return {}
    times: Mapping[Path, float] = min(alike, key=lambda line: _distance(shape, line))["milliseconds"]
    return times


def describe_paths(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return what decides between paths, in JSON values: the table's digest, and which paths can serve long rows.

    Args:
        head_dim: D.
        dtype: of the queries.
        device: where they live.
    """
    shape = Shape(head_dim, str(dtype).removeprefix("torch."), 1, 4096, 4096, 4096, uniform=False)
    on_gpu = device.type == "cuda"
    measured = on_gpu and torch.cuda.get_device_properties(device).name in read_table()
    asked = [path for path in PATHS if measured or path not in LIBRARIES]
    return {
        "table_sha256": sha256(TABLE.read_bytes()).hexdigest(),
        "measured": measured,
        "fused": choose_backend(_request(shape, device)) if on_gpu else None,
        "paths": dict.fromkeys(PATHS, "not measured on this device")
        | {path: WHY_NOT[path](shape, device) or "can serve" for path in asked},
    }


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
    """Return the measured shapes and the milliseconds of their paths by the device's name."""
    table: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads(TABLE.read_text())
    return table


def _is_alike(shape: Shape, line: Mapping[str, Any]) -> bool:
    """Return whether a measured shape differs in nothing but numbers; without a present it is another case."""
    kind = shape.head_dim, shape.dtype, shape.uniform, shape.tokens > 0
    return kind == (line["head_dim"], line["dtype"], line["uniform"], line["tokens"] > 0)


def _distance(shape: Shape, line: Mapping[str, Any]) -> float:
    """Return how many times a measured shape must be doubled or halved to become another, all numbers together."""
    counts = ("rows", "queries", "tokens", "past")
    return sum(abs(log2((getattr(shape, name) + 1) / (line[name] + 1))) for name in counts)
