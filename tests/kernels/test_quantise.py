"""Codes against arithmetic on one number at a time."""

from math import floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.quantise import (
    BITS,
    decode_affine,
    decode_book,
    encode_affine,
    encode_book,
    fit_affine,
    fit_book,
    pack,
    round_fp8,
    unpack,
)


@st.composite
def rows_of_numbers(draw: st.DrawFn) -> Tensor:
    """float32 [tokens, channels] with an offset and a spread of its own."""
    tokens, channels = draw(st.integers(1, 9)), draw(st.sampled_from([8, 16, 24]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(tokens, channels, generator=generator)
    return x * draw(st.floats(0, 30)) + draw(st.floats(-100, 100))


def pack_slowly(codes: list[int], bits: int) -> list[int]:
    """One row of codes in bytes, bit after bit."""
    if bits == 3:
        return pack_slowly([c % 4 for c in codes], 2) + pack_slowly([c // 4 for c in codes], 1)
    width = len(codes) * bits // 8
    packed = [0] * width
    for channel, code in enumerate(codes):
        packed[channel % width] += code * 2 ** (channel // width * bits)
    return packed


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_codes_lie_in_bytes_as_described_and_come_back(data: st.DataObject, bits: int) -> None:
    channels = data.draw(st.sampled_from([8, 16, 32, 40]))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=channels, max_size=channels)
    codes = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (len(codes), channels * bits // 8)
    assert packed.tolist() == [pack_slowly(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1])
@settings(max_examples=30, deadline=None)
@given(x=rows_of_numbers())
def test_affine_codes_are_the_nearest_and_reach_from_end_to_end(x: Tensor, bits: int, dim: int) -> None:
    affine = fit_affine(x.amin(dim, keepdim=True), x.amax(dim, keepdim=True), bits)
    codes = encode_affine(x, affine, bits)
    found = decode_affine(codes, affine)
    top = 2**bits - 1
    for (token, channel), value in np.ndenumerate(x.numpy()):
        scale, zero = (float(n) for n in affine[0 if dim == 0 else token, 0 if dim == 1 else channel])
        ends = x[:, channel] if dim == 0 else x[token]
        assert abs(zero - float(ends.min())) <= abs(float(ends.min())) / 1024 + 1e-7
        if scale == 0:
            assert codes[token, channel] == 0
            continue
        assert abs(scale * top - (float(ends.max()) - zero)) <= scale * top / 1024 + top * 6e-8
        exact = (float(value) - zero) / scale
        wanted = min(max(floor(exact + 0.5), 0), top)
        assert abs(int(codes[token, channel]) - wanted) <= (abs(exact - floor(exact) - 0.5) < 1e-3)
        assert float(found[token, channel]) == pytest.approx(
            zero + scale * int(codes[token, channel]), rel=1e-6
        )


def test_nothing_to_store_and_equal_numbers_have_no_scale() -> None:
    smallest, largest = torch.tensor([torch.inf, 2.5, 1e9]), torch.tensor([-torch.inf, 2.5, 1e9])
    affine = fit_affine(smallest, largest, 4)
    assert affine.tolist() == [[0, 0], [0, 2.5], [0, 65504]]
    assert decode_affine(encode_affine(torch.tensor([0.0, 2.5, 1e9]), affine, 4), affine).tolist() == [
        0,
        2.5,
        65504,
    ]


def fit_slowly(samples: Tensor, levels: int) -> Tensor:
    """Lloyd's algorithm by distances, one channel."""
    x = samples.double().sort().values
    book = torch.stack([x[min(int((i + 0.5) * len(x) / levels), len(x) - 1)] for i in range(levels)])
    for _ in range(24):
        nearest = (x[:, None] - book).abs().argmin(1)
        for level in range(levels):
            if (nearest == level).any():
                book[level] = x[nearest == level].mean()
    return book


@pytest.mark.parametrize(("bits", "count"), [(2, 400), (3, 400), (4, 400), (3, 3)])
def test_a_codebook_is_lloyds(bits: int, count: int) -> None:
    """Fewer samples than levels are levels themselves."""
    samples = torch.randn(5, count, generator=torch.Generator().manual_seed(3)) ** 3
    book = fit_book(samples, bits)
    assert (book.diff(dim=-1) >= 0).all()
    for channel, row in enumerate(samples):
        assert torch.allclose(book[channel].double(), fit_slowly(row, 2**bits), rtol=2e-3, atol=2e-3)


def test_a_gaussian_codebook_is_max_s() -> None:
    # Max 1960, Table I: four levels of a normal distribution at +-0.4528 and +-1.510.
    book = fit_book(torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0)), 2)
    assert book[0].tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
@settings(max_examples=20, deadline=None)
@given(x=rows_of_numbers(), seed=st.integers(0, 10**6))
def test_codes_of_a_codebook_name_the_nearest_level(x: Tensor, seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = float(x.std(correction=0)) + 0.1
    levels = torch.randn(2, x.shape[1], 2**bits, generator=generator) * spread + x.mean()
    book = levels.sort(-1).values.half()
    entry = torch.randint(2, (len(x),), generator=generator, dtype=torch.int32)
    codes = torch.stack([encode_book(row[None], book[int(e)])[0] for row, e in zip(x, entry, strict=True)])
    found = decode_book(codes, book, entry)
    for (token, channel), value in np.ndenumerate(x.numpy()):
        own = book[int(entry[token]), channel].double()
        assert float(found[token, channel]) == own[int(codes[token, channel])]
        distances = (own - float(value)).abs()
        assert float(distances[int(codes[token, channel])] - distances.min()) <= 1e-4 * (
            abs(float(value)) + 1
        )


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-1000, 1000, width=32))
def test_fp8_has_four_digits_and_an_end(x: float) -> None:
    found = float(round_fp8(torch.tensor(x)))
    clamped = max(min(x, 448.0), -448.0)
    assert abs(found - clamped) <= max(abs(clamped) / 16, 2**-10)
