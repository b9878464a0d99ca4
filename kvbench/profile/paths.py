"""The attention paths of one generation by segment, with the reasons against the others."""

from collections.abc import Callable, Sequence

from kvbench.engine.cache import KVCache
from kvbench.kernels.attention_choices import Choice, watch_choices


def watch_paths(cache: KVCache, work: Callable[[], object]) -> list[dict[str, object]]:
    """Do some work and return the paths that attention took in it, in the order of their first segments.

    Returns:
        Per path and reasons: `path`, `segments` (indices, ascending), `calls` (of all layers), and `others` (name and
        reason of each path that was not taken).
    """
    calls: dict[Choice, list[int]] = {}
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
    """Return ascending numbers as ranges: `0-3, 5`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
