"""Results of runs that never ran, for tables and figures, and the text of what is printed of them."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from kvbench.eval.protocol.scores import Metric
from kvbench.report.timings import Timing
from kvbench.runs.record.results import Latency, Memory, Results

PSNR = Metric(None, "higher", "dB", evaluator="psnr", digits=2, needs_reference=True)
LPIPS = Metric(None, "lower", evaluator="lpips", needs_reference=True)


def made_up(
    method: str,
    budget: float,
    metrics: Mapping[str, Metric],
    model: str = "infinity_tiny",
    tokens: int = 1000,
    **more: object,
) -> Results:
    """A run of `method` at a fraction of a full cache of so many tokens; `more` are fields of `Results`."""
    values: dict[str, object] = {
        "run": f"{method}-{budget:g}-0123456789",
        "reference": None if method == "full" else "full-0",
        "method": method,
        "n": 96,
        "config": {
            "model": {"name": model},
            "method": {"sinks": 1},
            "cache_dtype": "auto",
            "noise": "stream",
        },
        "provenance": None,
        "memory": Memory(
            budget_tokens=tokens * budget,
            peak_tokens=int(0.99 * tokens * budget),
            full_tokens=tokens,
            peak_bytes=2**21,
            full_bytes=2**22,
            rebuild_bytes=2**20,
            transient_bytes=2**19,
            state_bytes=0,
            gpu_peak_bytes=0,
            batch=16,
            paper_full_mib=24.69,
            paper_peak_mib=12.3456,
            last_tokens=int(0.99 * tokens * budget),
            least_share=0.99,
            sequence_bytes=2**17,
            full_sequence_bytes=2**18,
            last_bytes=2**17,
        ),
        "latency": Latency(
            seconds_per_image=0.125,
            seconds_per_image_median=0.125,
            images_per_second=3.0,
            batch=16,
            device="cpu",
            machine="a processor",
            samples=96,
        ),
        "metrics": metrics,
    }
    return Results(**{**values, **more})


FULL_BYTES = 64_000
"""Of a full cache of 1000 tokens, of 64 bytes each in 16 bits."""


def hold(one: Results, budget: float, dtype: str, unit: str = "tokens") -> Results:
    """The run with a cache that holds nearly all of its budget, of 1000 tokens or of 64 000 bytes."""
    size, in_bytes = {"float32": 128, "int4": 16}.get(dtype, 64), unit == "bytes"
    held = int(0.99 * FULL_BYTES * budget) if in_bytes else one.memory.peak_tokens * size
    memory = replace(
        one.memory,
        budget_unit=unit,
        budget_bytes=budget * FULL_BYTES if in_bytes else None,
        budget_tokens=budget * FULL_BYTES / size if in_bytes else one.memory.budget_tokens,
        peak_tokens=held // size,
        sequence_bytes=held,
        last_bytes=held,
        full_sequence_bytes=FULL_BYTES,
    )
    return replace(one, memory=memory, run=f"{one.method}-{budget}-{unit}-{dtype}")


def printed(width: int, show: Callable[..., object], *arguments: object) -> str:
    """Return what a function prints on a terminal of so many columns, which it takes first."""
    text = io.StringIO()
    show(Console(file=text, width=width), *arguments)
    return text.getvalue()


def make_profile(method: str, share: float, **more: Any) -> dict[str, Any]:
    """What a file of task=profile has beside its rows."""
    budget = {"unit": "tokens", "fraction": share, "tokens": 1.0, "bytes": None}
    versions = {"versions": {"torch": "2"}, "cuda_graph": "off: no GPU"}
    own = {"model": "llamagen_xl", "weights": "random", "cache_dtype": "float32", "largest": None}
    machine = {"gpu": None, "cpu": "cpu", "threads": 1, **versions}
    return {**own, "method": method, "budget": budget, "config": {}, "provenance": machine} | more


def make_timing(
    method: str,
    share: float,
    *,
    batch: int = 1,
    seconds: float = 1.0,
    decode: float = 0.0,
    reserved: int | None = None,
    peak: int = 1000,
    status: str = "ok",
    dtype: str = "float32",
    largest: int | None = None,
    model: str = "llamagen_xl",
    config: Mapping[str, object] | None = None,
) -> Timing:
    """One cache at one batch size."""
    profile = make_profile(method, share, model=model, cache_dtype=dtype, config=config or {})
    profile["largest"] = None if largest is None else {method: largest}
    row: dict[str, Any] = {"batch": batch, "cache": method, "status": status}
    if status == "ok":
        row |= {
            "latency": {"median": seconds},
            "images_per_second": batch / seconds,
            "tokens_per_second": 7 * batch / seconds,
            "kv": {"peak_bytes": peak},
            "allocator": None if reserved is None else {"reserved_bytes": reserved},
            "phases": {"seconds": {"decode": decode}},
        }
    return Timing(profile, row)
