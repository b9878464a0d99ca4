"""Ranges of bounded metrics."""

import math
import re
from collections.abc import Mapping

Range = tuple[float, float]

RANGES: Mapping[str, Range] = {
    "ssim": (-1.0, 1.0),  # covariances may be negative
    "dists": (0.0, 2.0),  # its structure may be negative too; ms_ssim counts negative terms as 0
    **dict.fromkeys(("ms_ssim", "vqascore", "oneig"), (0.0, 1.0)),
    **dict.fromkeys(
        ("geneval", "exact", "accuracy", "truncated", "precision", "recall", "same_top1", "retrieved"),
        (0.0, 1.0),
    ),
    **dict.fromkeys(("agreement", "same_text", "string_match"), (0.0, 1.0)),
    **dict.fromkeys(("accuracy_change", "exact_answer_change"), (-1.0, 1.0)),
    **dict.fromkeys(("string_match_all_change", "string_match_part_change"), (-1.0, 1.0)),
    **dict.fromkeys(("kl", "mae", "lpips", "dreamsim", "generated_tokens"), (0.0, math.inf)),
    **dict.fromkeys(
        ("fid", "sfid", "fd", "mind", "cmmd"), (0.0, math.inf)
    ),  # an unbiased kid may be negative
    "diversity": (0.0, 2.0),
    **dict.fromkeys(("perplexity", "is", "vendi"), (1.0, math.inf)),
    **dict.fromkeys(("dpg", "unigenbench", "geneval2"), (0.0, 100.0)),
}
"""Smallest and largest value by name of the metric, or by the first words of the name; an end may be infinite."""


def find_range(name: str) -> Range | None:
    """Return the smallest and largest value of a metric or of its part; None if it has no bounds."""
    words = re.split(r"[/\[]", name)[0].split("_")
    starts = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((RANGES[start] for start in starts if start in RANGES), None)


def find_difference_range(name: str) -> Range | None:
    """Return the smallest and largest difference of two values of a metric; None if it has no bounds."""
    limits = find_range(name)
    return limits and (limits[0] - limits[1], limits[1] - limits[0])
