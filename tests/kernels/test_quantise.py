"""Values in few bits: codes lie in bytes as described, rotations keep lengths, and errors are as recorded."""

import json
from math import floor, isclose

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.hadamard import encode_rotated, list_levels, rotate_channels
from kvbench.kernels.layout import arrange_rows
from kvbench.kernels.planes import Codes, Plane, decode, encode_tokens, list_slots
from kvbench.kernels.quantise import (
    BITS,
    decode_affine,
    decode_codebook,
    encode_affine,
    encode_codebook,
    fit_affine,
    fit_codebook,
    pack,
    round_fp8,
    unpack,
)
from kvbench.kernels.quantised_attention import quantised_attention
from tests.support.goldens import load_golden
from tests.support.places import GOLDENS


@st.composite
def rows_of_numbers(draw: st.DrawFn) -> Tensor:
    """float32 [tokens, channels] with an offset and a spread of its own."""
    tokens, channels = draw(st.integers(1, 9)), draw(st.sampled_from([8, 16, 24]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(tokens, channels, generator=generator)
    return x * draw(st.floats(0, 30)) + draw(st.floats(-100, 100))


def read_code(data: list[int], channel: int, bits: int, channels: int) -> int:
    """The code of a channel in a row's bytes, bit by bit as `kernels/quantise.py` describes them."""
    code = low = start = 0
    for width in (2, 1) if bits == 3 else (bits,):
        row = channels * width // 8
        byte, shift = data[start + channel % row], width * (channel // row)
        for bit in range(width):
            code += (byte >> (shift + bit) & 1) << (low + bit)
        low, start = low + width, start + row
    return code


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_codes_lie_in_bytes_as_described_and_come_back(data: st.DataObject, bits: int) -> None:
    channels = data.draw(st.sampled_from([8, 16, 32, 40]))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=channels, max_size=channels)
    codes = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (len(codes), channels * bits // 8)
    for row, expected in zip(packed.tolist(), codes.tolist(), strict=True):
        assert [read_code(row, channel, bits, channels) for channel in range(channels)] == expected
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
        expected = zero + scale * int(codes[token, channel])
        assert isclose(found[token, channel], expected, abs_tol=1e-12, rel_tol=1e-6)


def test_nothing_to_store_and_equal_numbers_have_no_scale() -> None:
    smallest, largest = torch.tensor([torch.inf, 2.5, 1e9]), torch.tensor([-torch.inf, 2.5, 1e9])
    affine = fit_affine(smallest, largest, 4)
    assert affine.tolist() == [[0, 0], [0, 2.5], [0, 65504]]
    codes = encode_affine(torch.tensor([0.0, 2.5, 1e9]), affine, 4)
    assert decode_affine(codes, affine).tolist() == [0, 2.5, 65504]


def fit_slowly(samples: Tensor, levels: int) -> Tensor:
    """Lloyd's algorithm by distances, one channel."""
    x = samples.double().sort().values
    codebook = torch.stack([x[min(int((i + 0.5) * len(x) / levels), len(x) - 1)] for i in range(levels)])
    for _ in range(24):
        nearest = (x[:, None] - codebook).abs().argmin(1)
        for level in range(levels):
            if (nearest == level).any():
                codebook[level] = x[nearest == level].mean()
    return codebook


@pytest.mark.parametrize(("bits", "count"), [(2, 400), (3, 400), (4, 400), (3, 3)])
def test_a_codebook_is_lloyds(bits: int, count: int) -> None:
    """Fewer samples than levels are levels themselves."""
    samples = torch.randn(5, count, generator=torch.Generator().manual_seed(3)) ** 3
    codebook = fit_codebook(samples, bits)
    assert (codebook.diff(dim=-1) >= 0).all()
    for channel, row in enumerate(samples):
        assert torch.allclose(codebook[channel].double(), fit_slowly(row, 2**bits), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
@settings(max_examples=20, deadline=None)
@given(x=rows_of_numbers(), seed=st.integers(0, 10**6))
def test_codes_of_a_codebook_name_the_nearest_level(x: Tensor, seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = float(x.std(correction=0)) + 0.1
    levels = torch.randn(2, x.shape[1], 2**bits, generator=generator) * spread + x.mean()
    codebook = levels.sort(-1).values.half()
    entry = torch.randint(2, (len(x),), generator=generator, dtype=torch.int32)
    codes = torch.cat([encode_codebook(x[[at]], codebook[int(one)]) for at, one in enumerate(entry)])
    found = decode_codebook(codes, codebook, entry)
    for (token, channel), value in np.ndenumerate(x.numpy()):
        own, code = codebook[int(entry[token]), channel].double(), int(codes[token, channel])
        assert float(found[token, channel]) == own[code]
        distances = (own - float(value)).abs()
        assert float(distances[code] - distances.min()) <= 1e-4 * (abs(float(value)) + 1)


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-1000, 1000, width=32))
def test_fp8_has_four_digits_and_an_end(x: float) -> None:
    found = float(round_fp8(torch.tensor(x)))
    clamped = max(min(x, 448.0), -448.0)
    assert abs(found - clamped) <= max(abs(clamped) / 16, 2**-10)


CASES = json.loads((GOLDENS / "methods" / "nm_rotated.json").read_text())["cases"]
ERRORS = {2: 0.117482, 3: 0.034548, 4: 0.009501}
"""Mean square errors of a standard normal variable, relative to its variance, by bits."""


def encode(x: Tensor, bits: int) -> tuple[Codes, Tensor]:
    """Codes of vectors [slots, D], and the vectors that they give back."""
    levels = list_levels(bits)
    numbers, gain = encode_rotated(x[None], levels)
    codes = Codes(numbers, codebook=levels, gain=gain)
    return codes, rotate_channels(decode(codes, bits)[0])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["preset"] for case in CASES])
def test_recorded_formats(number: int) -> None:
    """Codes, values that attention reads and its output; vLLM's levels are not exactly Lloyd-Max levels."""
    case, golden = CASES[number], load_golden("nm_rotated")
    tensors = {name.partition(".")[2]: x for name, x in golden.items() if name.startswith(f"case{number}.")}
    names = ("keys", "values", "keys_read", "values_read")
    keys, values, keys_read, values_read = (tensors[name].transpose(0, 1) for name in names)
    heads, tokens, channels = keys.shape
    if case["key_bits"] == 8:
        key_codes = Codes(round_fp8(keys))
    else:
        levels = tensors["levels"] * channels**0.5
        numbers, gain = encode_rotated(keys, levels)
        key_codes = Codes(numbers, codebook=levels, gain=gain)
        codes = unpack(numbers, case["key_bits"])
        assert torch.equal(codes.transpose(0, 1).long(), tensors["key_codes"])
    assert relative(decode(key_codes, case["key_bits"]), keys_read) < 1e-3
    value_codes = encode_tokens(values, case["value_bits"])
    codes = unpack(value_codes.data, case["value_bits"]).transpose(0, 1).long()
    assert (codes != tensors["value_codes"]).sum() <= 2  # here a scale is rounded before it is used
    layout = arrange_rows(torch.arange(tokens)[None], [tokens])
    plane = Plane(layout, case["key_bits"], 16, key_codes, Codes(values_read.half()), list_slots(layout)[1])
    queries = tensors["query"][0].view(heads, 1, -1, channels)  # of the heads that read a KV head
    out, _ = quantised_attention(queries, plane, channels**-0.5)
    assert relative(out.view(-1, channels), tensors["output"][0]) < 1e-3
    bytes_ = sum(x.nbytes for x in (*key_codes, *value_codes) if x is not None)
    levels_ = 0 if key_codes.codebook is None else key_codes.codebook.nbytes
    assert bytes_ - levels_ == heads * tokens * case["slot_size"]


def hadamard(channels: int) -> Tensor:
    """The rotation [D, D] by its definition: signs of common bits, in blocks of interleaved channels."""
    mixed, groups = channels & -channels, channels // (channels & -channels)
    signs = [[(-1) ** (i & j).bit_count() for j in range(mixed)] for i in range(mixed)]
    return torch.kron(torch.tensor(signs, dtype=torch.float64) / mixed**0.5, torch.eye(groups))


@pytest.mark.parametrize("channels", [16, 24, 32, 128])
def test_a_rotation_is_its_own_inverse_and_leaves_products(channels: int) -> None:
    assert torch.allclose(rotate_channels(torch.eye(channels)).double(), hadamard(channels), atol=1e-6)
    q, k = torch.randn(2, 50, channels)
    products = rotate_channels(q) @ rotate_channels(k).mT
    assert torch.allclose(products, q @ k.mT, atol=1e-5 * channels)
    assert torch.allclose(rotate_channels(rotate_channels(q)), q, atol=1e-5)


@pytest.mark.parametrize("bits", ERRORS)
def test_any_vector_keeps_its_length_and_codes_know_directions_only(bits: int) -> None:
    x = torch.randn(40, 32) * torch.logspace(-2, 2, 40)[:, None]
    codes, read = encode(x, bits)
    lengths = x.norm(dim=-1)
    assert ((read.norm(dim=-1) - lengths).abs() <= 2**-10 * lengths).all()
    for factor in (0.25, 8.0):
        scaled, other = encode(factor * x[20:], bits)
        assert torch.equal(scaled.data, codes.data[:, 20:])
        assert torch.equal(other, factor * read[20:])
    mirrored, _ = encode(-x, bits)
    assert torch.equal(unpack(mirrored.data, bits), (1 << bits) - 1 - unpack(codes.data, bits))
    twice, _ = encode(x[[0, 3, 3]], bits)
    assert torch.equal(twice.data[:, 1], twice.data[:, 2])
    assert torch.equal(twice.data, codes.data[:, [0, 3, 3]])


@pytest.mark.parametrize(
    ("channels", "errors"),
    [(16, (0.103, 0.0279, 0.0077)), (32, (0.112, 0.031, 0.0084)), (128, (0.119, 0.0338, 0.0092))],
)
def test_errors_of_normal_vectors(channels: int, errors: tuple[float, ...]) -> None:
    """Errors of scalars, from tables of Lloyd-Max levels; of vectors with gains, from another implementation."""
    x = torch.randn(320_000 // channels, channels, generator=torch.Generator().manual_seed(0))
    for bits, expected in zip(ERRORS, errors, strict=True):
        _, read = encode(x, bits)
        assert (read - x).square().sum() / x.square().sum() == pytest.approx(expected, rel=0.02)
        levels = list_levels(bits)
        alone = levels[encode_codebook(x, levels[None]).long()]
        assert (alone - x).square().mean() == pytest.approx(ERRORS[bits], rel=0.02)


def test_vectors_of_zeros_and_of_the_largest_numbers() -> None:
    for x in (torch.zeros(1, 16), torch.full((1, 16), 65504.0)):
        codes, read = encode(x, 4)
        assert codes.gain.isfinite().all()
        assert read.isfinite().all()
        assert read.any() == x.any()
