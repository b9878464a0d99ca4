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
from kvbench.engine.schedule import Ints, build_schedule, sum_tokens
from kvbench.kernels.layout import empty_layout
from kvbench.methods.shared.base import Artifact, Method
from kvbench.methods.shared.capabilities import mixes_precisions


def bound_token_bytes(spec: ModelSpec, packing: Packing) -> tuple[int, int]:
    """Return the bytes of the smallest and of the largest token in one head, with its part of what a block shares.

    What a block shares is nothing in the largest blocks, and a block so small that it does not pay stays in 16 bits, as
    do tokens that are too young.

    Args:
        spec: the model's shapes.
        packing: how numbers are stored, by a method without forms of its own.
    """
    plain, channels = PlaneFormat(), spec.head_dim
    formats = {choose_format(packing, None, at) for at in spec.segments if not at.last}
    sizes = [fmt.count_token_bytes(channels) for fmt in formats]
    if packing.storage.residual or any(fmt.find_min_tokens(channels) > 1 for fmt in formats):
        sizes.append(plain.count_token_bytes(channels))
    return min(sizes), max(sizes)


def bound_bytes(spec: ModelSpec, packing: Packing) -> list[tuple[int, int]]:
    """Return pairs a, b such that no sequence that holds n tokens takes more than a n + b bytes.

    In the first pair every block of every head has its scales, whatever it holds, and all that may wait for being
    quantised does; in the second every token has scales of its own.

    Args:
        spec: the model's shapes.
        packing: how all tokens are stored; a method that has forms of its own knows their bytes.
    """
    channels, storage, cached = spec.head_dim, packing.storage, spec.segments[:-1]
    plain = PlaneFormat().count_token_bytes(channels)
    formats = [choose_format(packing, None, at) for at in cached]
    token = min(fmt.count_token_bytes(channels) for fmt in formats)
    beside = waiting = 0
    for at, fmt in zip(cached, formats, strict=True):
        blocks = -(-at.length // (storage.group or at.length))
        beside += blocks * fmt.count_block_bytes(channels)
        beside += at.length * (fmt.count_token_bytes(channels) - token)
        waiting = max(waiting, at.end - find_quant_range(spec, at, storage.group, storage.residual).stop)
    alone = [fmt.count_token_bytes(channels) + fmt.count_block_bytes(channels) for fmt in formats]
    return [(token, spec.all_heads * (beside + waiting * (plain - token))), (max(plain, *alone), 0)]


def find_sure_capacity(budget: Budget, spec: ModelSpec, packing: Packing) -> Budget:
    """Return a budget in bytes whose capacity is the most tokens that surely fit in them."""
    assert budget.bytes is not None, "of a budget in bytes"
    capacity = max((budget.bytes - b) / a for a, b in bound_bytes(spec, packing))
    return replace(budget, capacity=min(capacity, Fraction(spec.full_tokens)))


def predict_bytes(spec: ModelSpec, method: Method, packing: Packing) -> Ints:
    """Return the bytes of one sequence in each layer after each segment that is cached, int64 [K - 1, L].

    Args:
        spec: the model's shapes.
        method: static, prepared for that model.
        packing: how numbers are stored.
    """
    schedule = build_schedule(spec, method, find_free_slots=lambda _: 0)
    blocks = number_blocks(spec, packing.storage.group, "cpu")
    forms = list_layer_formats(spec, method, packing, "cpu")
    empty = empty_layout(spec.heads, "cpu")
    lying = [place_no_slots(empty, len(form.formats)) for form in forms]
    found = np.zeros((len(spec.segments) - 1, spec.layers), np.int64)
    for at in spec.segments[:-1]:
        due = find_quant_range(spec, at, packing.storage.group, packing.storage.residual)
        known: dict[tuple[int, int, int], tuple[Placement, int]] = {}  # layers that are alike
        after = []
        for layer, (before, form) in enumerate(zip(lying, forms, strict=True)):
            change = schedule[layer, at.index]
            alike = id(before), id(change), id(form)
            if alike not in known:
                placed = place_slots(before, change.layout, change.source, at, due, blocks, form.rules)
                rows = count_row_bytes(form.formats, placed.after, spec.head_dim, spec.branches)
                known[alike] = placed.after, sum(rows)
            now, found[at.index, layer] = known[alike]
            after.append(now)
        lying = after
    return found


def prepare_to_fit(
    method: Method, spec: ModelSpec, budget: Budget, artifact: Artifact | None, packing: Packing | None
) -> None:
    """Prepare a method; of a budget in bytes with as many tokens as fit in few bits, where that is known beforehand.

    Methods that look at data, and those with forms of their own, get the budget as it is.

    Args:
        method: not yet prepared.
        spec: the model's shapes.
        budget: whose capacity is sure to fit.
        artifact: the method's calibration.
        packing: how numbers are stored in few bits; None where they are not.

    Raises:
        ValueError, InfeasibleBudget: what the method's `prepare` raises.
    """

    def plan(one: Budget) -> int:
        method.prepare(spec, one, artifact)
        assert packing is not None
        return int(sum_tokens(predict_bytes(spec, method, packing)[..., None]).max(initial=0))

    if packing is not None and budget.bytes is not None and method.static and not mixes_precisions(method):
        budget = find_capacity(budget, bound_token_bytes(spec, packing)[0], plan)
    method.prepare(spec, budget, artifact)
