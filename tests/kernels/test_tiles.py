"""Tiles by capability: every tile of the table in the interpreter, and what the table may hold."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.past_attention import attend_past
from kvbench.kernels.quantised_attention import quantised_attention
from kvbench.kernels.ragged_attention import ragged_attention
from tests.kernels import test_quantised_attention as planes
from tests.kernels.test_decode_attention import check_token
from tests.support.fake_device import Device
from tests.support.marks import slow_except
from tests.support.ragged_rows import HALF, check, check_mass, make
from tests.support.triton_device import needs_loops, on_device, sharing

tiles = pytest.importorskip("kvbench.kernels.triton.tiles")

KERNELS = (
    ("attention", 128),
    ("attention", 256),
    ("past", 64),
    ("past", 128),
    ("quantised", 64),
    ("quantised", 128),
)
"""Kernels and channels of heads."""


def list_sizes() -> list[Any]:
    """Every kernel, number of queries and number of keys of a tile that some GPU takes for long or short rows."""
    found = set()
    for row, card in product(tiles.read_rows(), tiles.CARDS):
        tile, kernel = tiles.Tile.parse(row[str(card)]), row["kernel"]
        least = 16 if kernel in ("attention", "past") else tile.keys
        found |= {(kernel, tile.queries, keys) for keys in (16, 32, 64, 128) if least <= keys <= tile.keys}
    return slow_except(lambda size: size[1] <= 16 or size[2] in (16, 64), sorted(found))


@needs_loops
@pytest.mark.parametrize(("kernel", "queries", "keys"), list_sizes())
def test_a_tile_agrees_with_double_precision(
    kernel: str, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end inside a tile and at its end, heads do not fill it, two programs share a row.

    With few queries, a row is empty, and two branches keep different slots.
    """
    monkeypatch.setattr(tiles, "list_tiles", lambda *_: {128: tiles.Tile(queries, keys, 4, 1)})
    few = queries <= 16
    held = [2 * keys + 3, keys, *[0] * few]
    if kernel == "decode":
        one = make(2, held, 1 if queries == 1 else 5, 1, 24, dtype=HALF, free_slots=3)
        check_token(one, filled=2, share=2, scale=0.3)
    elif kernel == "quantised":
        shape = planes.Shape(4, 4, "channel", "slot", True, 1, 1 + few, held, queries + queries // 8, 24)
        generator = torch.Generator().manual_seed(0)
        q, plane = planes.queries_of(shape, generator), planes.make(shape, generator)
        with sharing(2), on_device():
            found = quantised_attention(q, plane, planes.SCALE)
        planes.agrees(found, q, plane)
    else:
        case = make(1 + few, held, 1, queries + 5, 24, dtype=HALF, apart=few)
        attend = {
            "attention": partial(ragged_attention, *case, path="kernel"),
            "past": partial(attend_past, case.q, case.stored),
            "mass": partial(attention_mass, case.q, case.k, case.stored),
        }[kernel]
        with sharing(2), on_device():
            found = attend(scale=0.3)
        if kernel == "mass":
            check_mass(found, case, 0.3, 1, False)
        elif kernel == "past":
            nothing = case._replace(k=case.k[:, :, :0], v=case.v[:, :, :0])
            check((found[0].to(case.q.dtype), found[1]), nothing, 0.3)
        else:
            check(found, case, 0.3)


@pytest.mark.parametrize(
    ("head_dim", "queries", "rows", "cell"),
    [
        (64, 16, 999, "16x64x4x3"), (64, 17, 999, "128x64x8x3"), (64, 17, 263, "64x64x4x3"),
        (65, 128, 264, "128x128x8x2"), (128, 129, 132, "128x128x8x2"), (128, 129, 131, "64x64x4x3"),
        (129, 1, 1, "16x32x4x3"), (300, 17, 264, "128x32x8x2"),
    ],
)  # fmt: skip
def test_tiles_follow_queries_rows_and_channels(head_dim: int, queries: int, rows: int, cell: str) -> None:
    """132 multiprocessors are full with two programs each."""
    found = tiles.choose_tile("past", head_dim, torch.bfloat16, queries, rows, torch.device("cpu"))
    assert found == tiles.Tile.parse(cell)
    fewer = 3 if found.keys == 128 else found.stages
    assert found.with_keys(16) == found._replace(keys=16, stages=fewer)
    assert found.with_keys(found.keys) == found


@pytest.mark.parametrize(
    ("major", "minor", "card"),
    [(7, 5, 86), (8, 0, 80), (8, 6, 86), (8, 9, 86), (9, 0, 90), (10, 3, 100), (12, 1, 120)],
)
def test_a_card_without_a_column_has_the_tiles_of_an_older_one(
    major: int, minor: int, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(major=major, minor=minor)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    found = tiles.find_capability.__wrapped__(torch.device("cuda:0"))
    assert found == 10 * major + minor
    for kernel, head_dim in KERNELS:
        assert tiles.list_tiles(kernel, 16, head_dim, found) == tiles.list_tiles(kernel, 16, head_dim, card)
    assert tiles.find_capability(torch.device("cpu")) == tiles.TIMED_CAPABILITY
