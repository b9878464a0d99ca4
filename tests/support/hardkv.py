"""Hard-KV the slow way: what the newest queries of a head make of the tokens it holds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.hardkv.calibration import Selector, mark_top_p, solve_temperatures
from kvbench.methods.shared.redundancy import measure_redundancy
from tests.support.engine import Asked

P = 0.9
SPEC = ModelSpec("text", 2, 2, 8, next_token(10, [16, 16, 16, 4]), branches=1, logit_scale=8**-0.5)
ASKS, LATEST, KERNEL, MIX = 6, 5, 3, 0.07


def score_slowly(
    selector: Selector, q: Tensor, k: Tensor, positions: list[int], end: int
) -> tuple[Tensor, Tensor]:
    """Return the last queries' scores of `positions`, raw and as a selector makes them, [ASKS, slots] each.

    `q` [query heads, tokens, 8] belongs to one KV head, whose keys are `k` [tokens, 8], `end` of them so far.
    """
    raw = []
    for asking in range(end - ASKS, end):
        scores = torch.stack([(q[:, asking] @ k[at]).max() * 8**-0.5 for at in positions])
        scores[torch.tensor(positions) > asking] = -torch.inf
        raw.append(scores)
    return torch.stack(raw), torch.stack([alter_slowly(selector, scores, k, positions) for scores in raw])


def alter_slowly(selector: Selector, scores: Tensor, k: Tensor, positions: list[int]) -> Tensor:
    """What a selector makes of the scores [slots] of one query."""
    if selector == "snapkv":
        return torch.stack([scores[max(0, i - 1) : i + 2].max() for i in range(len(positions))])
    if selector == "rkv":
        repeated = measure_redundancy(k[positions][None], torch.ones(1, len(positions)).bool(), 0.5, 1)[0]
        mixed = MIX * scores.softmax(0) - (1 - MIX) * repeated
        mixed = mixed - mixed.min()
        return (mixed / mixed.sum() + 1e-10).log()
    return scores


def expected_marks(
    selector: Selector, q: Tensor, k: Tensor, positions: list[int], end: int, temperature: float | None
) -> tuple[Tensor, float]:
    """Which of `positions` each of the last queries marks, [ASKS, slots], and the head's temperature.

    Arguments are those of `score_slowly`; `temperature` is None if it is not known yet.
    """
    raw, changed = score_slowly(selector, q, k, positions, end)
    counts = torch.tensor([int(mark_top_p(scores.softmax(0), P).sum()) for scores in raw])
    if temperature is None:
        temperature = float(solve_temperatures(changed[None], counts[None], P, "bisection"))
    return torch.stack([mark_top_p((scores / temperature).softmax(0), P) for scores in changed]), temperature


class Row(NamedTuple):
    """A row that was asked: its layer and number, q [query heads, tokens, 8], k [tokens, 8], slots before and after."""

    place: tuple[int, int]
    q: Tensor
    k: Tensor
    shown: list[int]
    kept: list[int]


def rows_of(seen: Sequence[Asked], inputs: Sequence[Sequence[tuple[Tensor, ...]]]) -> Iterator[Row]:
    """Yield the rows of all layers and segments, each with all its queries and keys so far."""
    for asked in seen:
        q, k = (
            torch.cat([segment[asked.layer][n] for segment in inputs[: asked.scale + 1]], 2) for n in (0, 1)
        )
        for row, (position, kept) in enumerate(zip(asked.position.tolist(), asked.ids(), strict=True)):
            sequence, head = divmod(row, 2)
            shown = [at for at in position if at >= 0]
            yield Row(
                (asked.layer, row), q[sequence, 2 * head : 2 * head + 2], k[sequence, head], shown, kept
            )
