"""Planes against arithmetic on one slot at a time."""

import torch

from kvbench.kernels.layout import arrange_rows
from kvbench.kernels.planes import list_slots, rotate, unrotate

CHANNELS = 16


def test_a_key_that_is_turned_back_has_even_channels_first() -> None:
    keys, angles = torch.randn(2, 5, CHANNELS), torch.randn(5, CHANNELS // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
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
