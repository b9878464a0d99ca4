"""Building blocks of methods that score tokens: windows of queries, smoothing, the best slots of each row."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.hook_results import NotANumber
from kvbench.methods.shared.limits import Limit
from kvbench.methods.shared.view import View

Capacity = TypeVar("Capacity", int, Tensor)
Window = Literal["grid", "last", "uniform"]
Pool = Literal["max", "avg"]
BranchMode = Literal["per_row", "mean", "conditional"]
"""Scores that decide: each sequence's own, the mean of a prompt's branches, or the conditional branch's for both."""

LineAttention = Literal["prob", "logit"]
"""Score of a slot from the queries of a line: mean probability, or mean logit before the softmax."""


def choose_window(kind: Window, segment: Segment, count: int) -> Tensor:
    """Return the indices of up to `count` tokens of a segment, int64 [min(count, segment.length)] in raster order.

    `grid` takes the centres of a square grid of patches (ScaleKV; the remainder of a side that the grid does not divide
    is not covered), or the last tokens of a single row or of a map smaller than the grid; `count` is a square number.
    `last` takes the last tokens in raster order, `uniform` evenly spaced tokens.
    """
    return torch.tensor(_list_window(kind, segment, count))


@lru_cache(256)
def _list_window(kind: Window, segment: Segment, count: int) -> Sequence[int]:
    side, length = int(count**0.5), segment.length
    if kind == "uniform":
        return [number * length // min(count, length) for number in range(min(count, length))]
    if kind == "last" or min(segment.height, segment.width) < max(side, 2):
        return range(max(0, length - count), length)
    steps = segment.height // side, segment.width // side
    rows, columns = (range((step - 1) // 2, side * step, step) for step in steps)
    return [row * segment.width + column for row in rows for column in columns]


def fit_window(wanted: int, capacity: int) -> int:
    """Return `wanted` tokens of a window, or if these exceed half of the capacity, the largest square up to it."""
    return wanted if wanted <= capacity // 2 else int(max(1, capacity // 2) ** 0.5) ** 2


def find_slots(view: View, chosen: Tensor) -> Tensor:
    """Return the slots of the tokens `chosen` of the current segment, int64 [n]: bool [rows, slots]."""
    # The segment has the last slots. `isin` would sort long lists, and then wait for the device.
    slots = view.position.shape[1]
    mask = torch.zeros(slots, dtype=torch.bool).index_fill_(0, chosen + (slots - view.segment.length), True)
    inside = mask.to(view.position.device, non_blocking=True).expand_as(view.position)
    return inside if view.padding is None or view.segment.index else inside & (view.position >= 0)


def find_valid_queries(view: View, chosen: Tensor) -> Tensor | None:
    """Return which rows have the tokens `chosen` of the current segment, int64 [n]: bool [rows, n]; None for all."""
    if view.padding is None or view.segment.index:
        return None
    return chosen.to(view.padding.device, non_blocking=True) >= view.padding[:, None]


def find_sinks(view: View, sinks: int, leading: int = 0) -> Tensor:
    """Return the slots that are never evicted, bool [rows, slots].

    They hold the first `sinks` segments, and the first `leading` tokens of a sequence after its padding.
    """
    inside = (view.segment_ids >= 0) & (view.segment_ids < sinks)
    return inside | find_leading(view, leading) if leading else inside


def count_sinks(spec: ModelSpec, sinks: int, leading: int = 0) -> int:
    """Return the number of tokens per head that `find_sinks` finds in a sequence that has them all."""
    return max(spec.leading_tokens(sinks), leading)


def average_attention(
    scores: Tensor,
    inside: Tensor,
    *,
    softmax: Literal["all", "prefix"],
    group: Literal["mean", "max"],
    asking: Tensor | None = None,
) -> Tensor:
    """Return the mean attention that slots receive from a window's queries, float32 [rows, slots].

    Args:
        scores: [rows, query heads per KV head, queries, slots] (`View.scores`).
        inside: bool [rows, slots], slots of the window.
        softmax: over `all` slots, or over the slots outside the window, which then get 0 inside.
        group: `mean` of the probabilities or `max` of the scores of the query heads that share a KV head.
        asking: bool [rows, queries], queries in the mean (`find_valid_queries`); None for all.
    """
    if group == "max":
        scores = scores.amax(1, keepdim=True)
    if softmax == "prefix":
        scores = scores.masked_fill(inside[:, None, None], -torch.inf)
    if asking is None:
        return scores.softmax(-1).mean((1, 2))
    attention = scores.softmax(-1).mean(1).masked_fill(~asking[..., None], 0)
    return attention.sum(1) / asking.sum(1, keepdim=True).clamp(min=1)


def smooth(scores: Tensor, kind: Pool, size: int, exists: Tensor | None = None) -> Tensor:
    """Pool scores [rows, slots] along the slots, padded with zeros, for `max` with -inf.

    The result is the maximum or the mean of `size` neighbours, an odd number; 1 changes nothing. Slots that a row does
    not have (`exists`, bool [rows, slots], None for all) are skipped, and their result is arbitrary.
    """
    pool = F.max_pool1d if kind == "max" else F.avg_pool1d
    if exists is None:
        return pool(scores[:, None], size, stride=1, padding=size // 2)[:, 0]
    rank = exists.cumsum(1) - 1
    closed = scores.new_full((len(scores), scores.shape[1] + 1), -torch.inf if kind == "max" else 0)
    closed.scatter_(1, torch.where(exists, rank, scores.shape[1]), scores)
    closed[:, -1] = -torch.inf if kind == "max" else 0  # this column received missing slots
    return smooth(closed[:, :-1], kind, size).gather(1, rank.clamp_(min=0))


def smooth_outside(
    scores: Tensor,
    inside: Tensor,
    kind: Pool,
    size: int,
    *,
    exists: Tensor | None = None,
    spread_blank: bool = False,
) -> Tensor:
    """Pool scores [rows, slots] along the slots like `smooth`, without the slots of the window.

    These slots are `inside`, bool [rows, slots]. In the mean of their neighbours they count as 0, or as -inf with
    `spread_blank`, as in ScaleKV's released code.
    """
    blank = -torch.inf if spread_blank or kind == "max" else 0
    return smooth(scores.masked_fill(inside, blank), kind, size, exists)


def score_line(view: View, attention: LineAttention, window: int | None) -> Tensor:
    """Return the attention of slots from the newest queries of the line that just ended, float32 [rows, slots].

    It is a mean over the line's last `window` queries (None for all) and over the query heads that share a KV head;
    tokens unseen by a query count as 0. `logit` takes scores before the softmax (HeadKV Eq. 6 as printed).
    """
    count = min(window or view.segment.length, view.segment.length)
    chosen = torch.arange(view.segment.length - count, view.segment.length)
    return view.mass(chosen) if attention == "prob" else view.logits(chosen) / count


def sum_attention(view: View, queries: Tensor | None = None) -> Tensor:
    """Return the summed attention of the segment's queries to each slot, float32 [rows, slots].

    The mean over `queries`, int64 [n] (None for all), represents all queries.
    """
    count: int | Tensor = view.segment.length
    if view.padding is not None and not view.segment.index:
        count = (count - view.padding)[:, None]
    return view.mass(queries) * count


def find_latest(view: View, share: float, capacities: Sequence[int]) -> Tensor:
    """Return the slots of the latest tokens, a share in 0..1 of the capacity: bool [rows, slots].

    There is a capacity for each sequence, or one for all; charged padding reduces it.
    """
    if len(capacities) == 1 and view.padding_charge is None:
        return view.position >= view.segment.end - int(share * capacities[0])
    capacity = expand_to_rows(view, capacities)
    if view.padding_charge is not None:
        capacity = (capacity - view.padding_charge).clamp(min=1)
    count = (share * capacity.double())[:, None].long()
    return view.position >= view.segment.end - count


def sum_by_segment(view: View) -> Tensor:
    """Return the attention that each segment's slots receive in total, float32 [rows, segment.index + 1]."""
    mass = view.mass()
    # No scatter: the result of atomic additions depends on their order.
    sums = [(mass * (view.segment_ids == source)).sum(1) for source in range(view.segment.index + 1)]
    return torch.stack(sums, 1)


def merge_branches(scores: Tensor, mode: BranchMode, branches: int) -> Tensor:
    """Return scores [rows, slots], equal in all branches of a prompt unless `mode` is `per_row`.

    The branches of a prompt have equal padding, and the rows of conditional sequences come first.
    """
    if mode == "per_row":
        return scores
    parts = scores.unflatten(0, (branches, -1))
    shared = parts.mean(0) if mode == "mean" else parts[0]
    return shared.repeat(branches, 1)


def check_branch_mode(mode: BranchMode, spec: ModelSpec) -> None:
    """Refuse a common decision of branches if the model's branches have tokens at different positions (ValueError)."""
    if mode != "per_row" and not spec.equal_branches:
        raise ValueError(
            f"method.branch_mode={mode}: the branches of {spec.name} have prompts of unequal length; use "
            "method.branch_mode=per_row"
        )


def require_numbers(scores: Tensor) -> None:
    """Check that no score is NaN; on a GPU the check runs on the device without a wait.

    Raises:
        NotANumber: some score is NaN, on a CPU.
    """
    message = "scores of a method are NaN; device=cpu names method and layer"
    numbers = ~scores.isnan().any()
    if scores.is_cuda:
        torch._assert_async(numbers, message)
        return
    try:
        torch._assert_async(numbers, message)  # recorded work may not read the result on the host
    except RuntimeError:
        raise NotANumber("scores are NaN, so they order no tokens") from None


def softmax_seen(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, 0 where all scores are -inf; NaN stays NaN."""
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    usual = not scores.is_cuda and bool(seen.all())  # saves two passes on a CPU; a GPU is not waited for
    return scores.softmax(-1) if usual else scores.masked_fill(~seen, 0).softmax(-1).masked_fill(~seen, 0)


def choose_best(scores: Tensor, capacity: int | Tensor) -> Tensor:
    """Return the highest-scored slots of each row, the earlier slot on ties: bool [rows, slots].

    Scores are [rows, slots]; -inf ranks last. The capacity is an int for all rows, or int64 [rows].

    Raises:
        NotANumber: some score is NaN.
    """
    require_numbers(scores)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    if not isinstance(capacity, Tensor):
        return chosen.scatter_(1, order[:, :capacity], True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    return chosen.scatter_(1, order, ranks < capacity[:, None])


def find_leading(view: View, count: int) -> Tensor:
    """Return the slots of the first `count` tokens of each row after its padding, bool [rows, slots]."""
    first = count if view.padding is None else count + view.padding[:, None]
    return (view.position >= 0) & (view.position < first)


def find_begin(view: View) -> int | Tensor:
    """Return the position of each row's first token, int64 [rows, 1]; 0 without padding, or if it counts as held."""
    if view.padding is None or view.padding_charge is not None:
        return 0
    return view.padding[:, None]


def expand_to_rows(view: View, values: Sequence[int]) -> Tensor:
    """Repeat each sequence's value for its rows, int64 [rows]; a common value of all sequences stays int64 [1]."""
    rows = values if len(values) == 1 else [value for value in values for _ in range(view.heads)]
    return to_view_device(view, rows)


def to_view_device(view: View, values: Sequence[int]) -> Tensor:
    """Copy values to the view's device, int64 or bool [len(values)]."""
    return torch.tensor(values).to(view.position.device, non_blocking=True)


def split_even_odd(keys: Tensor) -> Tensor:
    """Reorder the channels of keys [..., D], whose pairs are neighbours: even channels first, then odd channels."""
    return keys.unflatten(-1, (-1, 2)).mT.flatten(-2)


def spread_capacity(capacity: int | tuple[int, ...], view: View) -> int | Tensor:
    """Return the capacity of each row, int64 [rows], or a common capacity as an int.

    Padding that counts as held reduces the capacity of its rows, to at least one slot; the result is then a tensor.
    """
    if isinstance(capacity, int):
        return capacity if view.padding_charge is None else (capacity - view.padding_charge).clamp_(min=1)
    # A copy from pageable memory does not wait for the device.
    capacities = torch.tensor(capacity * view.sequences).to(view.position.device, non_blocking=True)
    return capacities if view.padding_charge is None else (capacities - view.padding_charge).clamp_(min=1)


def fits(view: View, capacity: int) -> bool:
    """Return whether each row can certainly hold all of its slots; reads nothing from the device."""
    return view.padding_charge is None and view.position.shape[1] <= capacity


def max_recent_tokens(capacity: Capacity) -> Capacity:
    """Return the maximum tokens of the newest lines, two thirds of a capacity without the condition."""
    return 2 * capacity // 3


DEFAULT_WINDOW = 16
"""Default number of tokens of a window; a smaller segment is the whole window."""


def check_window(size: int, kernel: int, kind: Window = "grid", max_size: int | None = None) -> None:
    """Raise a ValueError that names the setting for an empty window, a non-square grid, or an even kernel.

    Only the default window may exceed `max_size`, the tokens of the largest segment; None for no limit.
    """
    if size < 1:
        raise ValueError(f"method.window={size}: must be at least 1")
    if max_size is not None and size > max(max_size, DEFAULT_WINDOW):
        raise ValueError(f"method.window={size}: the largest segment has {max_size} tokens; use fewer")
    if kind == "grid" and int(size**0.5) ** 2 != size:
        raise ValueError(f"method.window={size}: a grid needs a square number, such as 16")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"method.kernel={kernel}: must be odd and positive")


def check_capacity(
    spec: ModelSpec, budget: Budget, sinks: int = 0, more: int = 0, *, leading: int = 0
) -> None:
    """Refuse more sinks than the model has, and budgets too small for them or for one token per head.

    A head must be able to hold the first segments (`sinks`), the first tokens of a sequence (`leading`) and `more`
    tokens.

    Raises:
        ValueError: the model has too few segments, or `leading` is negative.
        InfeasibleBudget: the budget is too small; the message names the smallest budget that works.
    """
    if not 0 <= sinks < len(spec.segments):
        raise ValueError(
            f"sinks={sinks}: {spec.name} has {len(spec.segments)} segments; use 0 to {len(spec.segments) - 1}"
        )
    Limit(0).check("leading", leading)
    needed = count_sinks(spec, sinks, leading) + more or 1
    if budget.head_tokens >= needed:
        return
    if needed == spec.leading_tokens(sinks):
        raise InfeasibleBudget.of_sinks(budget, sinks, needed, spec)
    if needed == leading:
        raise InfeasibleBudget.of_leading(budget, leading, spec)
    raise InfeasibleBudget.of(budget, needed, spec, "the method's tokens")
