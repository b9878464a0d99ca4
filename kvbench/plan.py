"""`task=plan`: schedule, memory and largest batch, computed from a model's shapes."""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvbench.core.budget import Budget
from kvbench.core.cards import Card
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.coding.formats import Packing, choose_format
from kvbench.engine.memory import MIB
from kvbench.engine.packed.bytes import bound_planned_bytes, fit_budget, predict_bytes
from kvbench.engine.schedule import Ints, predict_ring_slots, predict_row_lengths, sum_tokens
from kvbench.engine.work import (
    HALF,
    Held,
    Steps,
    Work,
    hold,
    list_steps,
    measure_attention,
    measure_products,
    measure_writes,
)
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.models.base import LeastWork, Model


@dataclass(frozen=True)
class PlannedSegment:
    """Predicted contents of one sequence around one segment.

    Attributes:
        segment: the segment.
        held: peak tokens after a layer of the segment.
        held_bytes: peak bytes of stored keys and values after a layer of the segment.
        pruned: heads that lose a source at this segment (N_k); None without a HeatKV schedule.
        early: atoms evicted before the segment starts (|E_k|); None without a HeatKV schedule.
    """

    segment: Segment
    held: int
    held_bytes: int
    pruned: int | None = None
    early: int | None = None


@dataclass(frozen=True)
class Plan:
    """Predicted memory of a run.

    Attributes:
        spec: the model.
        budget: capacity B of the prepared method.
        batch: prompts per batch.
        segments: contents of one sequence by segment.
        peak_tokens: peak tokens of one sequence between layers.
        peak_bytes: peak bytes of keys and values of one sequence between layers.
        token_bytes: maximum bytes of a stored token in one head.
        at_once: upper bound of a batch's bytes (`count_at_once`), by `full` and `method`; empty for low-bit storage.
        largest_batch: prompts that fit `gpu_gib`, by `full` and `method`.
        dtypes: dtypes of keys and values without low-bit storage: as configured, and on a GPU (for `largest_batch`).
        contents: contents of a `full` cache without low-bit storage, and of the `method` unless it selects what it
            reads; an upper bound for low-bit storage of a method that reads data.
        steps: steps of a generation.
        samples: 1 for an image; for a text the tokens of the longest one, generated or scored.
        calibration: origin of the calibration.
    """

    spec: ModelSpec
    budget: Budget
    batch: int
    segments: tuple[PlannedSegment, ...]
    peak_tokens: int
    peak_bytes: int
    token_bytes: int
    at_once: dict[str, int]
    largest_batch: dict[str, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    contents: dict[str, Held]
    steps: Steps
    samples: int
    calibration: str


def make_plan(
    model: Model,
    budget: Budget,
    method: Method,
    batch: int,
    gpu_gib: float,
    token_bytes: int,
    flight_bytes: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    packing: Packing | None = None,
    longest: int | None = None,
    scored: int | None = None,
) -> Plan:
    """Predict the memory of a run from shapes.

    A method that needs a calibration gets zeros, and ranks heads or layers by index. This changes which of them keep
    fewer tokens, but hardly the total.

    Args:
        model: shapes, parameters and activations.
        budget: capacity B.
        method: not yet prepared.
        batch: prompts per batch.
        gpu_gib: memory to fill, GiB, positive.
        token_bytes: maximum bytes of a stored token in one head.
        flight_bytes: bytes of a token in one head as the model computes it.
        dtypes: see `Plan`.
        packing: low-bit storage, if any.
        longest: tokens of the longest prompt; None for the maximum that the model takes.
        scored: scored tokens of the longest text under forced decoding; None if the model generates.

    Raises:
        ConfigError: the contents of the cache depend on data.
    """
    spec, needs = model.spec, method.needs()
    spec = spec if longest is None else spec.with_prompt(longest)
    blank = None
    if isinstance(needs, Observer):
        needs.prepare(spec)
        blank = Artifact(needs.kind, needs.average())  # zeros, as from a calibration without prompts
    if packing is not None:
        budget = fit_budget(method, spec, budget, blank, packing)
    method.prepare(spec, budget, blank)
    lengths = predict_row_lengths(spec, method)
    if lengths is None:
        raise ConfigError(
            f"task=plan: how much method={method.title} holds depends on data; measure it with task=run"
        )
    held = sum_tokens(lengths).max(1)
    stored = held * token_bytes
    if packing is not None and method.static:
        stored = sum_tokens(predict_bytes(spec, method, packing)[..., None]).max(1)
    everything = _list_full_lengths(spec)
    pending_bytes = token_bytes if packing is None else flight_bytes
    contents = {"full": hold_everything(spec, pending_bytes)}
    if packing is not None:
        read = _bound_packed_reads(model, method, lengths, packing)
        contents["method"] = hold(lengths, read, pending_bytes)
    elif not method.uses.sparse_reads:
        contents["method"] = hold(lengths, token_bytes * lengths.sum(2), pending_bytes)
    schedule = getattr(method, "schedule", None)
    counts = () if schedule is None else (schedule.pruned, schedule.early)
    return Plan(
        spec,
        method.budget,
        batch,
        tuple(
            PlannedSegment(segment, *map(int, values))
            for segment, *values in zip(spec.segments, held, stored, *counts, strict=True)
        ),
        int(held.max()),
        int(stored.max()),
        token_bytes,
        {
            name: count_at_once(spec, rows, token_bytes, flight_bytes) * spec.branches * batch
            for name, rows in (("full", everything), ("method", lengths))
            if packing is None
        },
        {
            "full": find_largest_batch(model, everything, gpu_gib, dtypes[1].itemsize),
            "method": find_largest_batch(model, lengths, gpu_gib, dtypes[1].itemsize),
        },
        dtypes,
        contents,
        list_steps(spec, at_once=scored is not None),
        scored or (spec.drawn_tokens if spec.writes_text else 1),
        "not needed" if needs is None else "none, heads and layers in order" if blank else str(needs),
    )


class Floor(NamedTuple):
    """Minimum work and time of a phase of one batch: operations, bytes and seconds."""

    operations: float
    bytes: float
    seconds: float


def find_floors(
    spec: ModelSpec, steps: Steps, held: Held, batch: int, least: LeastWork, card: Card
) -> dict[str, Floor]:
    """Return the floor of each phase of a batch on a GPU.

    In each step a phase takes the time of its operations or of its bytes at the GPU's rates, whichever is longer.
    """
    sequences = batch * spec.branches
    size = 4 if least.arithmetic in ("float32", "tf32") else HALF
    phases = {
        "transformer": measure_products(spec, steps, least.layers, least.head, sequences),
        "attention": measure_attention(spec, steps, held, sequences),
        "cache writes": measure_writes(spec, held, sequences),
    }
    floors = {phase: _bound(work, "bfloat16", card) for phase, work in phases.items()}
    if least.decoding:
        decoding = Work(np.array([batch * float(least.decoding)]), np.array([float(size * least.decoder)]))
        floors["decoder"] = _bound(decoding, least.arithmetic, card)
    return floors


def hold_everything(spec: ModelSpec, token_bytes: int) -> Held:
    """Return the contents of one sequence of the full cache, with `token_bytes` per token and head."""
    lengths = _list_full_lengths(spec)
    return hold(lengths, token_bytes * lengths.sum(2), token_bytes)


def _list_full_lengths(spec: ModelSpec) -> Ints:
    """Return the tokens of each row of the full cache after each cached segment, int64 [K - 1, L, H]."""
    ends = np.array(spec.ends[:-1])
    return np.broadcast_to(ends[:, None, None], (len(ends), spec.layers, spec.heads))


def _bound(work: Work, arithmetic: str, card: Card) -> Floor:
    seconds = np.maximum(work.operations / card.find_rate(arithmetic), work.bytes / (1e9 * card.giga))
    return Floor(*(float(values.sum()) for values in (*work, seconds)))


def count_at_once(spec: ModelSpec, lengths: Ints, token_bytes: int, flight_bytes: int) -> int:
    """Return an upper bound of the cache's bytes per sequence, without a method's state.

    It adds the peak of storage during a rebuild, when a layer's old and new keys (then values) coexist, and the largest
    segment in flight, in one layer if its tokens come in one step, else in all layers.

    Args:
        spec: the model's shapes.
        lengths: tokens of each row after each cached segment, int64 [K - 1, L, H].
        token_bytes: bytes of a stored token in one head.
        flight_bytes: bytes of a token in one head as the model computes it.
    """
    after = np.pad(lengths.sum(2), ((1, 0), (0, 0)))
    old, new = after[:-1], after[1:]
    others = sum_tokens(lengths)[:-1] - new
    rebuilt = (2 * others + old + new + np.maximum(old, new)).max(initial=0) * token_bytes // 2
    flights = (
        segment.length * spec.heads * (spec.layers * token_bytes if segment.causal else flight_bytes)
        for segment in spec.segments
    )
    return int(rebuilt) + max(flights)


def _bound_packed_reads(model: Model, method: Method, lengths: Ints, packing: Packing) -> Ints:
    """Return a bound, exact if static, on the bytes that attention reads of low-bit storage, int64 [K - 1, L]."""
    rotates = packing.storage.before_rotation and model.key_rotation() is not None
    if method.static:
        return predict_bytes(method.spec, method, packing, rotates=rotates)
    formats = {choose_format(packing, None, segment) for segment in method.spec.segments[:-1]}
    index = max(fmt.count_index_bytes(rotates=rotates) for fmt in formats)
    return bound_planned_bytes(method.spec, packing, lengths) + index * lengths.sum(2)


def count_ring_bytes(spec: ModelSpec, lengths: Ints, batch: int, itemsize: int = 2) -> int:
    """Return the bytes of a generation's ring of keys and values; values have `itemsize` bytes."""
    return batch * spec.branches * itemsize * spec.head_dim * predict_ring_slots(spec, lengths)


def find_largest_batch(model: Model, lengths: Ints, gpu_gib: float, itemsize: int = 2) -> int:
    """Return the number of prompts that fit in `gpu_gib` GiB with 16-bit weights.

    `lengths` are the tokens of each row after each cached segment, int64 [K - 1, L, H]; values have `itemsize` bytes.
    """
    free = gpu_gib * 1024 * MIB - 2 * model.parameters
    per_prompt = count_ring_bytes(model.spec, lengths, 1, itemsize)
    batches = range(1, max(0, int(free // per_prompt)) + 1)

    def count(batch: int) -> float:
        return max(batch * per_prompt + model.activation_bytes(batch), model.decoding_bytes(batch))

    return bisect_right(batches, free, key=count)


def export(path: Path, spec: ModelSpec, budget: Budget, method: Method) -> None:
    """Write a HeatKV schedule as .npz: A, G bool [K, K, L, H], N [K], cached_after [K, L], B, t, c, s, budget.

    Raises:
        ConfigError: the method has no schedule, or the file cannot be written.
    """
    schedule = getattr(method, "schedule", None)
    if schedule is None:
        raise ConfigError(
            f"plan.export={path}: method={method.title} has no schedule to export; set method=heatkv"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            A=schedule.absent,
            G=schedule.gone,
            N=schedule.pruned.astype(np.int32),
            cached_after=schedule.cached_after,
            B=float(budget.capacity),
            t=np.array(spec.lengths),
            c=np.array(spec.ends),
            s=method.sinks,  # type: ignore[attr-defined]
            budget=float(budget.share),
        )
    except OSError as error:
        raise ConfigError(f"plan.export={path}: cannot be written ({error})") from None
