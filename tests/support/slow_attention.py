"""Dense attention over what slow storage reads back, and random codebooks and rotations for it."""

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from tests.support.engine import D
from tests.support.slow_storage import SlowStorage


def make_rotation(spec: ModelSpec) -> Tensor:
    angle = torch.arange(spec.segments[-1].end)[:, None] * torch.linspace(0.1, 1, D // 2)
    return torch.polar(torch.ones_like(angle), angle)


def make_codebooks(spec: ModelSpec) -> dict[str, Tensor]:
    """Random levels, ascending, and scales that reach from -4 to 4."""
    generator = torch.Generator().manual_seed(0)
    shape = (spec.layers, spec.heads, len(spec.segments) - 1 if spec.family == "next-scale" else 2, D)
    codebooks = {}
    for name in ("keys", "values"):
        for bits in (4, 3, 2):
            codebooks[f"{name}_{bits}"] = (
                torch.randn(*shape, 2**bits, generator=generator).sort(-1).values.half()
            )
        codebooks[f"{name}_8"] = torch.tensor([8 / 255, -4]).half().expand(*shape, 2).contiguous()
    return codebooks


def check_attention(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check attention against that over slow storage, where numbers halfway between two codes may round otherwise."""
    for one, wanted in zip(found, expected, strict=True):
        wrong = (one - wanted).abs() > 2e-4 + 1e-3 * wanted.abs()
        assert wrong.float().mean() < 0.02


def attend_slowly(
    spec: ModelSpec, inputs: list[list[tuple[Tensor, ...]]], seen: Tensor, slow: Mapping[int, SlowStorage]
) -> tuple[list[Tensor], list[list[list[int]]], list[int]]:
    """Attention over what slow storage reads back, with bytes of each layer and sequence after each segment.

    The last are the bytes that the attention of each sequence reads.
    """
    out, held = [], []
    sequences = len(inputs[0][0][0])
    reads = [0] * sequences
    for at, layers in zip(spec.segments, inputs, strict=True):
        for layer, (q, k, v) in enumerate(layers):
            result = torch.empty_like(q)
            reads = [size + slow[layer].count_bytes(s, read=True) for s, size in enumerate(reads)]
            for place in product(range(sequences), range(spec.heads)):
                past = slow[layer].tokens.get(place, {})
                order = sorted(past)
                keys, values = (
                    torch.cat([*(torch.tensor(getattr(past[p], name))[None] for p in order), new[place]])
                    for name, new in (("key", k), ("value", v))
                )
                scores = q[place].double() @ keys.double().T * spec.logit_scale
                if at.causal:
                    later = torch.ones(at.length, at.length).triu(1).bool()
                    scores[:, len(order) :].masked_fill_(later, -torch.inf)
                result[place] = (scores.softmax(-1) @ values.double()).float()
            out.append(result)
        if at.last:
            break
        for layer, (_, k, v) in enumerate(layers):
            kept = {
                place: [p for p in range(at.end) if seen[at.index + 1, layer, place[1], p]]
                for place in product(range(sequences), range(spec.heads))
            }
            slow[layer].store(k, v, at, kept)
        held.append([[slow[layer].count_bytes(s) for s in range(sequences)] for layer in range(spec.layers)])
    return out, held, reads
