"""Attention paths of one generation by segment, with the reasons against other paths."""

from collections.abc import Callable, Sequence

from kvbench.engine.cache import KVCache
from kvbench.kernels.attention_choices import AttentionChoice, watch_choices


def watch_paths(cache: KVCache, work: Callable[[], object]) -> list[dict[str, object]]:
    """Run some work and return the attention paths that it used, ordered by their first segments.

    Returns:
        For each path with its reasons: `path`, `segments` (ascending indices), `calls` (over all layers), and `others`
        (reason against each other path, by its name).
    """
    calls: dict[AttentionChoice, list[int]] = {}
    with watch_choices(lambda choice: calls.setdefault(choice, []).append(cache.segment.index)):
        work()
    return [
        {
            "path": choice.path,
            "segments": sorted(set(indices)),
            "calls": len(indices),
            "others": dict(choice.others),
        }
        for choice, indices in sorted(calls.items(), key=lambda pair: min(pair[1]))
    ]


def format_segments(indices: Sequence[int]) -> str:
    """Return ascending indices as ranges: `0-3, 5`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
