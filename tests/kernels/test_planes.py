"""Planes against arithmetic on one slot at a time."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.layout import arrange_rows
from kvbench.kernels.planes import Codes, Plane, halve, list_slots, read_plane, rotate, unrotate
from kvbench.kernels.quantise import encode_affine, fit_affine, pack

CHANNELS = 16


def make_rotation(positions: int) -> Tensor:
    """Turns that differ by position and channel."""
    angle = torch.arange(positions)[:, None] * torch.linspace(0.1, 1, CHANNELS // 2)
    return torch.polar(torch.ones_like(angle), angle)


def test_a_key_that_is_turned_back_has_even_channels_first() -> None:
    keys, rotation = torch.randn(2, 5, CHANNELS), make_rotation(5)
    stored = unrotate(keys, rotation)
    for slot in range(5):
        for pair in range(CHANNELS // 2):
            number = torch.complex(keys[:, slot, 2 * pair], keys[:, slot, 2 * pair + 1])
            back = number * rotation[slot, pair].conj()
            assert torch.allclose(stored[:, slot, pair], back.real, atol=1e-6)
            assert torch.allclose(stored[:, slot, CHANNELS // 2 + pair], back.imag, atol=1e-6)
    assert torch.allclose(rotate(stored, rotation), keys, atol=1e-6)


def test_every_slot_has_the_position_of_its_row() -> None:
    positions = torch.tensor([[0, 3, -1], [0, 1, 2], [2, -1, -1], [1, 2, 4]])
    layout = arrange_rows(positions, [2, 3, 1, 3])
    rows, found = list_slots(layout)
    for row, count in enumerate(layout.counts):
        own = slice(int(layout.offsets[row]), int(layout.offsets[row]) + count)
        assert rows[own].tolist() == [row] * count
        assert found[own].tolist() == positions[row, :count].tolist()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("form", ["token", "channel", "book"])
def test_a_plane_reads_back_what_every_code_stands_for(bits: int, rotated: bool, form: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    positions = torch.tensor([[0, 3, -1], [0, 1, 2], [2, -1, -1], [1, 2, 4]])
    layout, batch = arrange_rows(positions, [2, 3, 1, 3]), 3
    rotation = make_rotation(5) if rotated else None
    codes = torch.randint(1 << bits, (2, batch, layout.total, CHANNELS), generator=generator).byte()
    entry = torch.randint(4, (layout.total,), generator=generator, dtype=torch.int32)
    table = torch.randn(batch, 4, CHANNELS, 2, generator=generator).half()
    scales = torch.randn(batch, layout.total, 1, 2, generator=generator).half()
    book = torch.randn(4, CHANNELS, 1 << bits, generator=generator).half()
    packed = pack(codes, bits)
    keys = {
        "token": Codes(packed[0], affine=scales),
        "channel": Codes(packed[0], affine=table, entry=entry),
        "book": Codes(packed[0], book=book, entry=entry),
    }[form]
    plane = Plane(layout, bits, keys, Codes(packed[1], affine=scales), list_slots(layout)[1], rotation)
    found_keys, found_values = read_plane(plane)

    wanted = torch.empty(batch, layout.total, CHANNELS, dtype=torch.float64)
    for slot in range(layout.total):
        for channel in range(CHANNELS):
            code = codes[0, :, slot, channel].double()
            scale, zero = scales[:, slot, 0].double().unbind(-1)
            if form == "channel":
                scale, zero = table[:, int(entry[slot]), channel].double().unbind(-1)
            wanted[:, slot, channel] = zero + scale * code
            if form == "book":
                wanted[:, slot, channel] = book[int(entry[slot]), channel, code.long()].double()
    if rotation is not None:
        half = CHANNELS // 2
        pairs = torch.complex(wanted[..., :half], wanted[..., half:])
        pairs = pairs * torch.stack([rotation[int(p)] for p in plane.positions])
        wanted = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    assert torch.allclose(found_keys.double(), wanted, rtol=1e-5, atol=1e-4)
    scale, zero = scales.double().unbind(-1)
    assert torch.allclose(found_values.double(), zero + scale * codes[1].double(), rtol=1e-5, atol=1e-4)
    some = slice(1, 2)
    assert all(
        torch.equal(part, whole[some])
        for part, whole in zip(read_plane(plane, some), (found_keys, found_values), strict=True)
    )
    several = slice(2, 7)
    assert all(
        torch.equal(part, whole[some, several])
        for part, whole in zip(read_plane(plane, some, several), (found_keys, found_values), strict=True)
    )
    if rotation is not None:
        near, _ = read_plane(plane._replace(rotation=halve(rotation)))
        assert torch.allclose(near, found_keys, atol=2**-10 * float(found_keys.abs().max()))


def test_numbers_without_scales_are_themselves() -> None:
    layout = arrange_rows(torch.tensor([[0, 1]]), [2])
    keys, values = torch.randn(2, 1, 2, CHANNELS).half()
    plane = Plane(layout, 16, Codes(keys), Codes(values), list_slots(layout)[1])
    assert all(torch.equal(x, y) for x, y in zip(read_plane(plane), (keys, values), strict=True))
    small = Plane(
        layout,
        8,
        Codes(keys.to(torch.float8_e4m3fn)),
        Codes(values.to(torch.float8_e4m3fn)),
        list_slots(layout),
    )
    assert torch.equal(read_plane(small)[0], keys.to(torch.float8_e4m3fn).float())


def test_affine_codes_survive_a_move() -> None:
    x = torch.randn(1, 6, CHANNELS)
    affine = fit_affine(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), 4)
    packed = pack(encode_affine(x, affine, 4), 4)
    layout = arrange_rows(torch.arange(6)[None], [6])
    plane = Plane(
        layout, 4, Codes(packed, affine=affine), Codes(packed, affine=affine), list_slots(layout)[1]
    )
    some = torch.tensor([1, 4, 5])
    moved = Plane(
        arrange_rows(some[None], [3]), 4, *(Codes(packed[:, some], affine=affine[:, some]),) * 2, some
    )
    assert torch.equal(read_plane(moved)[0], read_plane(plane)[0][:, some])
