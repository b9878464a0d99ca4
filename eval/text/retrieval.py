"""Accuracy of answers scored after a context, over all answers and by the position of the statement they repeat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.protocol.base import Result, make_result, read_meta
from kvbench.eval.protocol.scores import MetricSpec, score_parts, share_score
from kvbench.eval.text.forced import ForcedScore
from kvbench.eval.text.full_cache import RETRIEVED, RETRIEVED_FULL

DEPTH, GAP = "depth", "gap"
"""Metadata keys: a statement's depth in % of the context, and the tokens from it to the question."""
BOUNDS = {DEPTH: (0, 20, 40, 60, 80, 100), GAP: (0, 128, 256, 512, 1024, 2048, 4096, 2**30)}
"""Group bounds by key; a group includes its lower bound."""
PROMPTS = "(prompts=passkey and planted_facts do)"


def name_groups(key: str) -> tuple[str, ...]:
    """Return the names of the groups of `depth` or `gap` in ascending order.

    >>> name_groups("gap")[-2:]
    ('gap_2048_4096', 'gap_4096_on')
    """
    bounds = BOUNDS[key]
    names = [f"{key}_{low}_{high}" for low, high in pairwise(bounds)]
    return (*names[:-1], f"{key}_{bounds[-2]}_on" if key == GAP else names[-1])


def find_group(key: str, value: float) -> str:
    """Return the name of a value's group; values from the last bound on are in the last group.

    >>> find_group("gap", 256), find_group("depth", 100)
    ('gap_256_512', 'depth_80_100')
    """
    passed = sum(value >= bound for bound in BOUNDS[key][1:-1])
    return name_groups(key)[passed]


@dataclass(frozen=True)
class Retrieved(ForcedScore):
    """`retrieved`: share of answers whose tokens are all top-1 given the correct tokens before them.

    Greedy decoding would write exactly these answers. Parts are groups of depths and gaps; `retrieved_full` is the
    share under the full cache, the bound of what the model can find.
    """

    name: ClassVar[str] = RETRIEVED
    required_meta: ClassVar[str] = GAP
    meta_keys: ClassVar[tuple[str, ...]] = (DEPTH, GAP)
    metric: ClassVar[str] = RETRIEVED
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)
    part_names: ClassVar[tuple[str, ...]] = (*name_groups(DEPTH), *name_groups(GAP))

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specifications of the share, its groups and the full cache's share."""
        return {**super().metrics, RETRIEVED_FULL: replace(self.spec, detail=True)}

    def run(self, texts: ReadingSet, reference: ReadingSet | None, device: str) -> Result:
        """Return whether the top-1 tokens of every text equal its answer's, and the share."""
        positions = {key: read_meta(texts, key, key, PROMPTS) for key in (DEPTH, GAP)}
        pairs = [
            (reading.likeliest == reading.tokens, reading.likeliest_full == reading.tokens)
            for _, reading in texts.readings()
        ]
        right, full = ([float(side.all()) for side in sides] for sides in zip(*pairs, strict=True))
        graded = (
            (find_group(key, position), value, cluster)
            for key, column in positions.items()
            for position, value, cluster in zip(column, right, texts.clusters, strict=True)
        )
        scores = {
            self.name: share_score(right, texts.clusters),
            **score_parts(self.name, self.part_names, graded, share_score),
            RETRIEVED_FULL: share_score(full, texts.clusters),
        }
        columns: dict[str, Sequence[object]] = {
            "index": texts.indices,
            self.name: right,
            RETRIEVED_FULL: full,
        }
        return make_result(self, scores, columns | positions)
