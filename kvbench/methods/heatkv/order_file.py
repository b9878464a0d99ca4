"""Reader and writer of HeatKV's order files: all (head, layer) pairs per source scale, least important first."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.core.files import parse_json, read_text, write_whole
from kvbench.core.segments import ModelSpec


def read_orders(path: Path, spec: ModelSpec, sinks: int) -> NDArray[np.int64]:
    """Read ranks, int64 [K, L, H], from a list of orders or from {"metadata", "orders"}.

    The orders are for the last sources before the final scale. A file for fewer sinks is valid for more sinks, because
    the order of a source does not depend on the sinks.

    Raises:
        ValueError: the file is not readable, has too few sources, or an order is not a permutation of all heads.
    """
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"method.orders={path}: cannot be read ({error})") from None
    lists = content.get("orders") if isinstance(content, dict) else content
    scales, needed = len(spec.segments), len(spec.segments) - 1 - sinks
    if not isinstance(lists, list) or len(lists) < needed:
        count = len(lists) if isinstance(lists, list) else "no"
        raise ValueError(
            f"method.orders={path}: {count} orders, {spec.name} with sinks={sinks} needs {needed}"
        )
    ranks = np.zeros((scales, spec.layers, spec.heads), np.int64)
    first = scales - 1 - len(lists)
    for source, pairs in enumerate(lists, start=first):
        if source < 0:
            raise ValueError(
                f"method.orders={path}: {len(lists)} orders, but {spec.name} has fewer sources; give the model's file"
            )
        ranks[source] = _parse_order(path, source, pairs, spec)
    return ranks


def write_orders(path: Path, ranks: NDArray[np.int64], sinks: int, metadata: Mapping[str, object]) -> None:
    """Write the ranks, int64 [K, L, H], of the sources after the sinks, in the published format with metadata."""
    heads = ranks.shape[2]
    lists = []
    for source in range(sinks, len(ranks) - 1):
        order = ranks[source].reshape(-1).argsort(kind="stable")
        lists.append([[int(index % heads), int(index // heads)] for index in order])
    write_whole(path, json.dumps({"metadata": dict(metadata), "orders": lists}))


def _parse_order(path: Path, source: int, pairs: object, spec: ModelSpec) -> NDArray[np.int64]:
    try:
        head, layer = np.array(pairs, np.int64).T
        flat = np.ravel_multi_index((layer, head), (spec.layers, spec.heads))
    except (TypeError, ValueError, OverflowError):
        flat = np.empty(0, np.int64)
    if flat.shape != (spec.all_heads,) or (np.sort(flat) != np.arange(spec.all_heads)).any():
        raise ValueError(
            f"method.orders={path}: the order of source scale {source} is not a permutation of the {spec.all_heads} "
            f"[head, layer] pairs of {spec.name}; give the model's file"
        )
    return flat.argsort().reshape(spec.layers, spec.heads)
