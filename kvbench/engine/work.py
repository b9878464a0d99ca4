"""Minimum operations and bytes of a generation's steps in transformer, attention and cache, from shapes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.core.segments import ModelSpec

HALF = 2
"""Bytes of a 16-bit weight or activation."""
Numbers = NDArray[np.int64]


class Steps(NamedTuple):
    """Steps of a generation, each the tokens that one pass of the model takes.

    Attributes:
        segment: index of each step's segment, int64 [steps].
        before: tokens of the segment before the step, int64 [steps].
        tokens: tokens of the step, int64 [steps].
    """

    segment: Numbers
    before: Numbers
    tokens: Numbers


class Held(NamedTuple):
    """Contents of one sequence at the beginning of each segment, over all layers and heads.

    Attributes:
        tokens: number of tokens, int64 [K].
        bytes: bytes that attention reads, int64 [K].
        pending_bytes: bytes of a token in one head before its segment is stored.
    """

    tokens: Numbers
    bytes: Numbers
    pending_bytes: int


class Work(NamedTuple):
    """Operations of one sequence and bytes of a batch in each step [steps], or of the whole phase [1].

    A multiplication and an addition are two operations.
    """

    operations: NDArray[np.floating]
    bytes: NDArray[np.floating]


def list_steps(spec: ModelSpec, *, at_once: bool = False) -> Steps:
    """Return a generation's steps: one per segment; unless `at_once`, one per token in later causal segments."""
    rows = []
    for segment in spec.segments:
        single = segment.causal and segment.index > 0 and not at_once
        count, tokens = (segment.length, 1) if single else (1, segment.length)
        rows += [(segment.index, before, tokens) for before in range(count)]
    return Steps(*np.array(rows, np.int64).T)


def hold(lengths: Numbers, stored: Numbers, pending_bytes: int) -> Held:
    """Return the contents of one sequence.

    Args:
        lengths: tokens of each row after each cached segment, int64 [K - 1, L, H].
        stored: bytes of each layer after each cached segment, as attention reads them, int64 [K - 1, L].
        pending_bytes: bytes of a token in one head before its segment is stored.
    """
    tokens, sizes = (np.pad(table, (1, 0)) for table in (lengths.sum((1, 2)), stored.sum(1)))
    return Held(tokens, sizes, pending_bytes)


def list_reads(spec: ModelSpec, steps: Steps, held: Held) -> Numbers:
    """Return the bytes that a sequence's attention reads from the cache in each step (`Reads`), int64 [steps]."""
    return held.bytes[steps.segment] + steps.before * spec.all_heads * held.pending_bytes


def measure_attention(spec: ModelSpec, steps: Steps, held: Held, sequences: int) -> Work:
    """Return the work of softmax(q k^T) v: reads of the cache, of the step's tokens, and its output."""
    causal = np.array([segment.causal for segment in spec.segments])[steps.segment]
    past = held.tokens[steps.segment] + spec.all_heads * steps.before
    current = spec.all_heads * np.where(causal, steps.tokens * (steps.tokens + 1) // 2, steps.tokens**2)
    pairs = spec.group * (past * steps.tokens + current)
    moved = HALF * spec.head_dim * spec.all_heads * (2 + 2 * spec.group) * steps.tokens
    return Work(
        4.0 * spec.head_dim * sequences * pairs, 1.0 * sequences * (list_reads(spec, steps, held) + moved)
    )


def measure_products(spec: ModelSpec, steps: Steps, layers: int, head: int, sequences: int) -> Work:
    """Return the work of a transformer's matrix products, whose weights are read once in each step.

    `layers` counts weights that every token passes, `head` weights that only tokens with a sampled successor pass.
    """
    drawing = steps.tokens if spec.family == "next-scale" else np.ones_like(steps.tokens)
    operations = 2.0 * sequences * (layers * steps.tokens + head * drawing)
    return Work(operations, np.full(len(operations), HALF * float(layers + head)))


def measure_writes(spec: ModelSpec, held: Held, sequences: int) -> Work:
    """Return the bytes written in each segment: what the cache grows by, or all pending tokens of a causal one."""
    grown = np.diff(held.bytes).clip(min=0)
    causal = [segment.length if segment.causal else 0 for segment in spec.segments[:-1]]
    written = np.maximum(grown, spec.all_heads * held.pending_bytes * np.array(causal))
    return Work(np.zeros(len(written)), 1.0 * sequences * written)
