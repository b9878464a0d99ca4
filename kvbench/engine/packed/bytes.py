"""Prediction of the bytes of low-bit storage, and of the tokens that fit a byte budget."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from kvbench.core.budget import Budget, find_capacity
from kvbench.core.segments import ModelSpec
from kvbench.engine.coding.formats import Packing, PlaneFormat, choose_format, list_layer_formats
from kvbench.engine.coding.planes import (
    Placement,
    find_quant_range,
    number_blocks,
    place_no_slots,
    place_slots,
)
from kvbench.engine.packed.store import count_row_bytes
from kvbench.engine.schedule import Ints, build_schedule, predict_row_lengths, sum_tokens
from kvbench.kernels.layout import empty_layout
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact


def bound_token_bytes(spec: ModelSpec, packing: Packing) -> tuple[int, int]:
    """Return the minimum and maximum bytes of one token in one head, with its part of a block's scales.

    A token's part of the scales approaches 0 in large blocks. Blocks too small to save bytes stay in 16 bits, as do the
    newest tokens and exempt layers.

    Args:
        spec: the model's shapes.
        packing: storage format, for a method that sets no precisions.
    """
    plain, channels = PlaneFormat(), spec.head_dim
    formats = {choose_format(packing, None, segment) for segment in spec.segments if not segment.last}
    sizes = [fmt.count_token_bytes(channels) for fmt in formats]
    if (
        packing.storage.residual
        or packing.storage.exempt
        or any(fmt.find_min_tokens(channels) > 1 for fmt in formats)
    ):
        sizes.append(plain.count_token_bytes(channels))
    return min(sizes), max(sizes)


def bound_head_bytes(spec: ModelSpec, packing: Packing) -> list[tuple[int, int]]:
    """Return two pairs a, b such that n tokens of a head take at most a n + b bytes, if its layer is not exempt.

    The first pair assumes scales for every block, and the maximum number of tokens that wait for quantisation; the
    second assumes scales for every token.

    Args:
        spec: the model's shapes.
        packing: format of all tokens, for a method that sets no precisions.
    """
    channels, storage, cached = spec.head_dim, packing.storage, spec.segments[:-1]
    plain = PlaneFormat().count_token_bytes(channels)
    formats = [choose_format(packing, None, segment) for segment in cached]
    token = min(fmt.count_token_bytes(channels) for fmt in formats)
    extra = waiting = 0
    for segment, fmt in zip(cached, formats, strict=True):
        blocks = -(-segment.length // (storage.group or segment.length))
        extra += blocks * fmt.count_block_bytes(channels)
        extra += segment.length * (fmt.count_token_bytes(channels) - token)
        due = find_quant_range(spec, segment, storage.group, storage.residual)
        waiting = max(waiting, segment.end - due.stop)
    alone = [fmt.count_token_bytes(channels) + fmt.count_block_bytes(channels) for fmt in formats]
    return [(token, extra + waiting * (plain - token)), (max(plain, *alone), 0)]


def bound_bytes(spec: ModelSpec, packing: Packing) -> list[tuple[int, int]]:
    """Return pairs a, b such that a sequence of n tokens takes at most a n + b bytes, however heads share them.

    They sum `bound_head_bytes` over all heads, with exempt layers full.
    """
    plain = PlaneFormat().count_token_bytes(spec.head_dim)
    exempt = 2 * packing.storage.exempt * spec.heads
    return [
        (a, (spec.all_heads - exempt) * b + exempt * spec.cached_length * max(0, plain - a))
        for a, b in bound_head_bytes(spec, packing)
    ]


def bound_planned_bytes(spec: ModelSpec, packing: Packing, lengths: Ints) -> Ints:
    """Return upper bounds on the bytes of one sequence in each layer after each cached segment, int64 [K - 1, L].

    Args:
        spec: the model's shapes.
        packing: format of all tokens.
        lengths: tokens of each row after each cached segment, int64 [K - 1, L, H].
    """
    plain = PlaneFormat().count_token_bytes(spec.head_dim)
    bounds = [a * lengths + b * (lengths > 0) for a, b in bound_head_bytes(spec, packing)]
    exempt = np.array([packing.exempts(layer, spec.layers) for layer in range(spec.layers)])
    return np.where(exempt[:, None], plain * lengths, np.minimum(*bounds)).sum(2)


def find_sure_capacity(budget: Budget, spec: ModelSpec, packing: Packing) -> Budget:
    """Return a budget in bytes whose capacity is the maximum number of tokens that always fits."""
    assert budget.bytes is not None, "not a budget in bytes"
    capacity = max((budget.bytes - b) / a for a, b in bound_bytes(spec, packing))
    return replace(budget, capacity=min(capacity, Fraction(spec.full_tokens)))


def predict_bytes(spec: ModelSpec, method: Method, packing: Packing, *, rotates: bool | None = None) -> Ints:
    """Return the bytes of one sequence in each layer after each cached segment, int64 [K - 1, L].

    Args:
        spec: the model's shapes.
        method: static, prepared for that model.
        packing: storage format.
        rotates: whether attention rotates keys, to count what it reads; None counts what is stored.
    """
    branches = spec.branches if rotates is None else 1
    schedule = build_schedule(spec, method, find_free_slots=lambda _: 0)
    blocks = number_blocks(spec, packing.storage.group, "cpu")
    forms = list_layer_formats(spec, method, packing, "cpu")
    empty = empty_layout(spec.heads, "cpu")
    placements = [place_no_slots(empty, len(form.formats)) for form in forms]
    sizes = np.zeros((len(spec.segments) - 1, spec.layers), np.int64)
    for segment in spec.segments[:-1]:
        due = find_quant_range(spec, segment, packing.storage.group, packing.storage.residual)
        known: dict[tuple[int, int, int, bool | None], tuple[Placement, int]] = {}  # shared by equal layers
        after = []
        for layer, (before, form) in enumerate(zip(placements, forms, strict=True)):
            change = schedule[layer, segment.index]
            turned = rotates and layer not in spec.unrotated
            key = id(before), id(change), id(form), turned
            if key not in known:
                placed = place_slots(before, change.layout, change.source, segment, due, blocks, form.rules)
                rows = count_row_bytes(form.formats, placed.after, spec.head_dim, branches, rotates=turned)
                known[key] = placed.after, sum(rows)
            placement, sizes[segment.index, layer] = known[key]
            after.append(placement)
        placements = after
    return sizes


def searches_capacity(method: Method, packing: Packing) -> bool:
    """Return whether more tokens than are sure to fit may fit a budget in bytes, so that `fit_budget` searches."""
    return (method.static or packing.storage.exempt > 0) and not method.uses.precisions


def fit_budget(
    method: Method, spec: ModelSpec, budget: Budget, artifact: Artifact | None, packing: Packing
) -> Budget:
    """Return the budget; a budget in bytes gets as capacity the tokens that fit in low-bit storage.

    These follow from the planned bytes of a static method, or from upper bounds on them if layers are exempt and
    capacities do not depend on data. Other methods, and those that set precisions, get the budget unchanged.

    Args:
        method: the method, which the search prepares for several capacities.
        spec: the model's shapes.
        budget: a budget whose capacity always fits.
        artifact: the method's calibration; None without one.
        packing: format of low-bit storage.

    Raises:
        ValueError, InfeasibleBudget: raised by the method's `prepare`.
    """

    def plan(candidate: Budget) -> int:
        method.prepare(spec, candidate, artifact)
        return _bound_peak(spec, method, packing, candidate)

    if budget.bytes is None or not searches_capacity(method, packing):
        return budget
    return find_capacity(budget, bound_token_bytes(spec, packing)[0], plan)


def _bound_peak(spec: ModelSpec, method: Method, packing: Packing, budget: Budget) -> int:
    """Return the tightest known bound on the peak bytes of one sequence under a prepared method."""
    if method.static:
        sizes = predict_bytes(spec, method, packing)
    elif (lengths := predict_row_lengths(spec, method)) is not None:
        sizes = bound_planned_bytes(spec, packing, lengths)
    else:
        return min(a * budget.tokens + b for a, b in bound_bytes(spec, packing))
    return int(sum_tokens(sizes[..., None]).max(initial=0))
