"""Attention over planes, by torch and by the kernel, against values that are decoded bit by bit in double precision."""

from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.support import reference_attention
from kvbench.kernels.attention_states import merge_pair
from kvbench.kernels.layout import arrange_rows
from kvbench.kernels.planes import Codes, Plane, list_slots, read_plane, to_complex32
from kvbench.kernels.quantised_attention import quantised_attention
from tests.kernels.test_quantise import hadamard, read_code
from tests.support.triton_device import DEVICE, needs_loops, on_device, sharing

SCALE = 0.3
BITS = (8, 4, 3, 2)
SCHEMES = ("slot", "channel", "shared channel", "codebook", "levels", "float8", "half")


class Shape(NamedTuple):
    """What a case is like; `copies` sequences read every stored one."""

    bits: int
    value_bits: int
    keys: str
    values: str
    rotated: bool
    stored: int
    copies: int
    held: list[int]
    queries: int
    channels: int


def read_numbers(codes: Codes, bits: int, channels: int) -> Tensor:
    """Stored values, float64 [stored, slots, D], decoded one at a time; vectors with a gain are rotated back."""
    if codes.affine is None and codes.codebook is None:
        return codes.data.double().cpu()
    stored, slots, _ = codes.data.shape
    data, found = codes.data.tolist(), torch.zeros(stored, slots, channels, dtype=torch.float64)
    entries = range(slots) if codes.entry is None else codes.entry.tolist()
    affine, codebook = (None if table is None else table.tolist() for table in (codes.affine, codes.codebook))
    for sequence in range(stored):
        for slot, entry in zip(range(slots), entries, strict=True):
            line = found[sequence, slot].tolist()
            for channel in range(channels):
                code = read_code(data[sequence][slot], channel, bits, channels)
                if codes.gain is not None:
                    line[channel] = codebook[code] * float(codes.gain[sequence, slot])
                elif affine is not None:
                    pairs = affine[sequence % len(affine)][entry]
                    scale, zero = pairs[channel % len(pairs)]
                    line[channel] = scale * code + zero
                else:
                    line[channel] = codebook[entry][channel][code]
            found[sequence, slot] = torch.tensor(line)
    return found if codes.gain is None else found @ hadamard(channels)


def read_slowly(plane: Plane, channels: int) -> tuple[Tensor, Tensor]:
    """Keys and values float64 [stored, slots, D] as attention reads them."""
    keys = read_numbers(plane.keys, plane.key_bits, channels)
    values = read_numbers(plane.values, plane.value_bits, channels)
    if plane.rotation is None:
        return keys, values
    rotated = torch.empty_like(keys)
    for pair in range(channels // 2):
        numbers = torch.complex(keys[..., pair], keys[..., pair + channels // 2])
        numbers = numbers * plane.rotation[plane.positions, pair].cpu()
        rotated[..., 2 * pair], rotated[..., 2 * pair + 1] = numbers.real, numbers.imag
    return rotated, values


def make(shape: Shape, generator: torch.Generator) -> Plane:
    """A plane of random codes and tables on the device."""
    rows, longest, slots = len(shape.held), max(shape.held), sum(shape.held)
    chosen = torch.rand(rows, longest + 3, generator=generator).argsort(1)[:, :longest].sort(1).values
    ends = torch.tensor(shape.held)[:, None]
    layout = arrange_rows(chosen.masked_fill(torch.arange(longest) >= ends, -1).to(DEVICE), shape.held)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    def codes(scheme: str, bits: int) -> Codes:
        if scheme in ("float8", "half"):
            numbers = normal(shape.stored, slots, shape.channels)
            return Codes(numbers.to(torch.float8_e4m3fn if scheme == "float8" else torch.float16))
        width = shape.channels * bits // 8
        numbers = torch.randint(256, (shape.stored, slots, width), generator=generator).byte().to(DEVICE)
        entry = torch.randint(3, (slots,), generator=generator, dtype=torch.int32).to(DEVICE)
        if scheme == "levels":
            gain = normal(shape.stored, slots).abs().half()
            return Codes(numbers, codebook=normal(1 << bits).sort().values, gain=gain)
        if scheme == "codebook":
            return Codes(numbers, codebook=normal(3, shape.channels, 1 << bits).half(), entry=entry)
        sizes = {"slot": (shape.stored, slots, 1), "channel": (shape.stored, 3, shape.channels)}
        affine = normal(*sizes.get(scheme, (1, 3, shape.channels)), 2)
        affine[..., 0] *= 4 / (1 << bits)
        return Codes(numbers, affine=affine.half(), entry=None if scheme == "slot" else entry)

    rotation = None
    if shape.rotated and shape.keys != "levels":
        angles = normal(longest + 3, shape.channels // 2)
        rotation = torch.polar(torch.ones_like(angles), angles)
        rotation[0] = 0  # as of a condition whose keys vanish
    bits = shape.bits, shape.value_bits
    pair = codes(shape.keys, bits[0]), codes(shape.values, bits[1])
    return Plane(layout, *bits, *pair, list_slots(layout)[1], rotation)


def rounding(q: Tensor, keys: Tensor, values: Tensor) -> tuple[float, float]:
    """How far an output and a log-sum-exp may be off: by keys, values and weights rounded to q's dtype."""
    eps = torch.finfo(q.dtype).eps
    logit = SCALE * float((q.double().abs() @ keys.abs().mT).amax()) if keys.shape[1] else 0.0
    return 8 * eps * (1 + logit) * float(values.abs().amax() if keys.shape[1] else 1.0), 8 * eps * (1 + logit)


def agrees(found: tuple[Tensor, Tensor], q: Tensor, plane: Plane) -> None:
    """Assert that an output and a log-sum-exp equal attention in double precision."""
    keys, values = read_slowly(plane, q.shape[3])
    repeated = len(q) // len(keys)
    keys, values = keys.repeat(repeated, 1, 1), values.repeat(repeated, 1, 1)
    assert (found[0].shape, found[0].dtype) == (q.shape, q.dtype)
    assert (found[1].shape, found[1].dtype) == (q.shape[:3], torch.float32)
    for row, length in enumerate(plane.layout.counts):
        first = int(plane.layout.offsets[row])
        out, lse = (x[:, row].double().cpu() for x in found)
        if not length:
            assert not out.any()
            assert (lse == -torch.inf).all()
            continue
        queries = q[:, row].double().cpu()
        k, v = (x[:, first : first + length] for x in (keys, values))
        expected, sums = reference_attention.attention(queries, (k, v), (k[:, :0], v[:, :0]), SCALE, False)
        off, off_sums = rounding(q[:, row].cpu(), k, v)
        assert (out - expected).abs().max() <= off
        assert (lse - sums).abs().max() <= off_sums


def queries_of(shape: Shape, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Queries as a model leaves them, heads inside tokens."""
    size = (shape.stored * shape.copies, shape.queries, len(shape.held), shape.channels)
    return torch.randn(*size, generator=generator).to(dtype).to(DEVICE).transpose(1, 2)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Cases of all forms; rows are as long as tiles, and one longer and shorter."""
    keys, values = draw(st.sampled_from(SCHEMES)), draw(st.sampled_from(SCHEMES))
    return Shape(
        bits=8 if keys == "float8" else draw(st.sampled_from(BITS)),
        value_bits=8 if values == "float8" else draw(st.sampled_from(BITS)),
        keys=keys,
        values=values,
        rotated=draw(st.booleans()),
        stored=draw(st.integers(1, 2)),
        copies=draw(st.integers(1, 2)),
        held=draw(st.lists(st.sampled_from((0, 1, 5, 31, 32, 33, 70)), min_size=1, max_size=3)),
        queries=draw(st.sampled_from((1, 3, 18))),
        channels=draw(st.sampled_from((16, 24, 32))),
    )


@given(shape=shapes(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_plane_reads_back_what_every_code_stands_for(shape: Shape, seed: int) -> None:
    plane = make(shape, torch.Generator().manual_seed(seed))
    found, expected = read_plane(plane), read_slowly(plane, shape.channels)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=1e-4, check_dtype=False)
    some = slice(shape.stored - 1, None)
    for part, whole in zip(read_plane(plane, some), found, strict=True):
        assert torch.equal(part, whole[some])
    if plane.rotation is not None and sum(shape.held):
        near, _ = read_plane(plane._replace(rotation=to_complex32(plane.rotation)))
        assert torch.allclose(near, found[0], atol=2**-10 * float(found[0].abs().max()))


@given(shape=shapes(), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_torch_attends_to_a_plane(shape: Shape, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, plane = queries_of(shape, generator), make(shape, generator)
    agrees(quantised_attention(q, plane, SCALE), q, plane)


@pytest.mark.slow
@needs_loops
@given(shape=shapes(), half=st.booleans(), share=st.sampled_from((None, 1, 2, 3)), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_kernel_attends_to_a_plane(shape: Shape, half: bool, share: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = queries_of(shape, generator, torch.float16 if half else torch.float32)
    plane = make(shape, generator)
    with sharing(share), on_device():
        found = quantised_attention(q, plane, SCALE)
    agrees(found, q, plane)
    if plane.rotation is not None and half:
        small = plane._replace(rotation=to_complex32(plane.rotation))
        with sharing(share), on_device():
            agrees(quantised_attention(q, small, SCALE), q, plane)


def test_rotated_values_are_not_rounded_before_they_join_a_state() -> None:
    """Queries in 16 bits, which add nothing to a state in float32 but their own rounding."""
    generator = torch.Generator().manual_seed(2)
    shape = Shape(4, 4, "levels", "levels", False, 1, 1, [40, 9], 3, 16)
    q, plane = queries_of(shape, generator, torch.bfloat16), make(shape, generator)
    empty = torch.zeros(q.shape, device=DEVICE), torch.full(q.shape[:3], -torch.inf, device=DEVICE)
    out, _ = quantised_attention(q, plane, SCALE, empty)
    near = quantised_attention(q, plane, SCALE)[0]
    assert (out.dtype, near.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(out.to(torch.bfloat16), near)
    assert not torch.equal(out, near.float())


@needs_loops
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("share", [1, 3])
def test_a_state_is_that_of_all_keys_together(share: int) -> None:
    """By torch and by the kernel; heads inside tokens, or tokens inside heads."""
    generator = torch.Generator().manual_seed(1)
    shape = Shape(4, 3, "channel", "slot", True, 2, 1, [70, 0, 3], 3, 16)
    q, planes = queries_of(shape, generator), [make(shape, generator) for _ in range(2)]
    apart = [quantised_attention(q, plane, SCALE) for plane in planes]
    expected = merge_pair((apart[0][0].clone(), apart[0][1].clone()), apart[1])
    for place, out in product((nullcontext, on_device), (apart[0][0].clone(), apart[0][0].contiguous())):
        tolerance = {} if place is nullcontext else {"atol": 2e-5, "rtol": 1e-4}
        with sharing(share), place():
            found = quantised_attention(q, planes[1], SCALE, (given := out.clone(), apart[0][1].clone()))
        assert found[0] is given
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
