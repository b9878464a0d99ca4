"""Files of task=profile as tests of its tables need them."""

from collections.abc import Mapping
from typing import Any

from kvbench.report.timings import Timing


def make_profile(method: str, share: float, **more: Any) -> dict[str, Any]:
    """What a file has beside its rows."""
    budget = {"unit": "tokens", "fraction": share, "tokens": 1.0, "bytes": None}
    versions = {"versions": {"torch": "2"}, "cuda_graph": "off: no GPU"}
    own: dict[str, Any] = {
        "model": "llamagen_xl",
        "weights": "random",
        "cache_dtype": "float32",
        "largest": None,
    }
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
