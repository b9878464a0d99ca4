"""Change of the log-sum-exp of a segment's last queries by a drop, against sums over tokens one by one."""

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from tests.support.engine import run, tokens_of
from tests.support.plain_cache import GROUP, HEADS, LAYERS, PADDING, TEXT

QUERIES = 3


@dataclass
class Doubling(Method):
    """Drops every third token of the prompt, and doubles the keys of the others if they change."""

    changes: bool = True

    @property
    def uses(self) -> Uses:
        """Other contents, and the queries' sums."""
        return Uses(replaces=self.changes, lse_queries=QUERIES)

    def keep(self, view: View) -> Tensor | None:
        """Drop tokens of the prompt."""
        if view.segment.index:
            return None
        if self.changes:
            view.replace(2 * view.cached_keys(), view.cached_values())
        return view.position % 3 > 0


@pytest.mark.parametrize("changes", [False, True])
def test_the_sums_of_the_last_queries_are_recorded_before_and_after_a_drop(changes: bool) -> None:
    method, inputs = Doubling(changes), tokens_of(TEXT, len(PADDING), groups=GROUP)
    method.prepare(TEXT, Budget(Fraction(TEXT.full_tokens), TEXT.full_tokens, TEXT.all_heads))
    cache = KVCache(TEXT, method, dtype=torch.float32)
    run(cache, inputs, PADDING)
    found, expected = cache.ledger.lse[0], []
    end = TEXT.segments[0].end
    for layer in range(LAYERS):
        q, k, _ = (x.double() for x in inputs[0][layer])
        sides: tuple[list[float], list[float]] = ([], [])
        for sequence, begin in enumerate(PADDING):
            sums: tuple[list[float], list[float]] = ([], [])
            for head in range(HEADS * GROUP):
                for query in range(end - QUERIES, end):
                    scores = {
                        token: float(q[sequence, head, query] @ k[sequence, head // GROUP, token])
                        * TEXT.logit_scale
                        for token in range(begin, query + 1)
                    }
                    factor = 2 if changes else 1
                    stays = [factor * score for token, score in scores.items() if token % 3]
                    for row, values in zip(sums, (scores.values(), stays), strict=True):
                        row.append(math.log(sum(map(math.exp, values))))
            for side, row in zip(sides, sums, strict=True):
                side.append(sum(row) / len(row))
        expected.append(sides)
    for pair, wanted in zip(found, expected, strict=True):
        for numbers, other in zip(pair, wanted, strict=True):
            assert numbers == pytest.approx(other, rel=1e-5)
