"""Rotated codes: vLLM's recorded formats, and what the arithmetic promises of any vector."""

import json

import pytest
import torch
from torch import Tensor

from kvbench.kernels.hadamard import encode_rotated, list_levels, rotate_channels
from kvbench.kernels.layout import arrange_rows
from kvbench.kernels.planes import Codes, Plane, decode, encode_tokens, list_slots
from kvbench.kernels.quantise import encode_book, round_fp8, unpack
from kvbench.kernels.quantised_attention import quantised_attention
from tests.support.goldens import load_golden
from tests.support.places import GOLDENS

CASES = json.loads((GOLDENS / "methods" / "nm_rotated.json").read_text())["cases"]
ERRORS = {2: 0.117482, 3: 0.034548, 4: 0.009501}
"""Mean square errors of a standard normal number, relative to its variance, by bits."""


def encode(x: Tensor, bits: int) -> tuple[Codes, Tensor]:
    """Codes of vectors [slots, D], and the vectors that they give back."""
    levels = list_levels(bits)
    numbers, gain = encode_rotated(x[None], levels)
    codes = Codes(numbers, book=levels, gain=gain)
    return codes, rotate_channels(decode(codes, bits)[0])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["preset"] for case in CASES])
def test_recorded_formats(number: int) -> None:
    """Codes, numbers that attention reads and its output; vLLM's levels are not exactly Lloyd-Max levels."""
    case, golden = CASES[number], load_golden("nm_rotated")
    tensors = {name.partition(".")[2]: x for name, x in golden.items() if name.startswith(f"case{number}.")}
    keys, values, keys_read, values_read = (
        tensors[name].transpose(0, 1) for name in ("keys", "values", "keys_read", "values_read")
    )
    heads, tokens, channels = keys.shape
    if case["key_bits"] == 8:
        key_codes = Codes(round_fp8(keys))
    else:
        levels = tensors["levels"] * channels**0.5
        numbers, gain = encode_rotated(keys, levels)
        key_codes = Codes(numbers, book=levels, gain=gain)
        codes = unpack(numbers, case["key_bits"])
        assert torch.equal(codes.transpose(0, 1).long(), tensors["key_codes"])
    assert relative(decode(key_codes, case["key_bits"]), keys_read) < 1e-3
    value_codes = encode_tokens(values, case["value_bits"])
    codes = unpack(value_codes.numbers, case["value_bits"]).transpose(0, 1).long()
    assert (codes != tensors["value_codes"]).sum() <= 2  # here a scale is rounded before it is used
    layout = arrange_rows(torch.arange(tokens)[None], [tokens])
    plane = Plane(layout, case["key_bits"], 16, key_codes, Codes(values_read.half()), list_slots(layout)[1])
    queries = tensors["query"][0].view(heads, 1, -1, channels)  # of the heads that read a KV head
    out, _ = quantised_attention(queries, plane, channels**-0.5)
    assert relative(out.view(-1, channels), tensors["output"][0]) < 1e-3
    bytes_ = sum(x.nbytes for x in (*key_codes, *value_codes) if x is not None)
    levels_ = 0 if key_codes.book is None else key_codes.book.nbytes
    assert bytes_ - levels_ == heads * tokens * case["slot_size"]


@pytest.mark.parametrize("channels", [16, 24, 32, 128])
def test_a_rotation_is_its_own_inverse_and_leaves_products(channels: int) -> None:
    mixed, groups = channels & -channels, channels // (channels & -channels)
    signs = [[(-1) ** (i & j).bit_count() for j in range(mixed)] for i in range(mixed)]
    matrix = torch.kron(torch.tensor(signs) / mixed**0.5, torch.eye(groups))  # interleaved channels
    assert torch.allclose(rotate_channels(torch.eye(channels)), matrix, atol=1e-6)
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
        assert torch.equal(scaled.numbers, codes.numbers[:, 20:])
        assert torch.equal(other, factor * read[20:])
    mirrored, _ = encode(-x, bits)
    assert torch.equal(unpack(mirrored.numbers, bits), (1 << bits) - 1 - unpack(codes.numbers, bits))
    twice, _ = encode(x[[0, 3, 3]], bits)
    assert torch.equal(twice.numbers[:, 1], twice.numbers[:, 2])
    assert torch.equal(twice.numbers, codes.numbers[:, [0, 3, 3]])


@pytest.mark.parametrize(
    ("channels", "errors"),
    [(16, (0.103, 0.0279, 0.0077)), (32, (0.112, 0.031, 0.0084)), (128, (0.119, 0.0338, 0.0092))],
)
def test_errors_of_normal_vectors(channels: int, errors: tuple[float, ...]) -> None:
    """Of a number alone, from tables of Lloyd-Max levels; of vectors with gains, from another implementation."""
    x = torch.randn(20000, channels, generator=torch.Generator().manual_seed(0))
    for bits, expected in zip(ERRORS, errors, strict=True):
        _, read = encode(x, bits)
        assert (read - x).square().sum() / x.square().sum() == pytest.approx(expected, rel=0.02)
        levels = list_levels(bits)
        alone = levels[encode_book(x, levels[None]).long()]
        assert (alone - x).square().mean() == pytest.approx(ERRORS[bits], rel=0.02)


def test_vectors_of_zeros_and_of_the_largest_numbers() -> None:
    for x in (torch.zeros(1, 16), torch.full((1, 16), 65504.0)):
        codes, read = encode(x, 4)
        assert codes.gain is not None
        assert codes.gain.isfinite().all()
        assert read.isfinite().all()
    assert not encode(torch.zeros(1, 16), 2)[1].any()
