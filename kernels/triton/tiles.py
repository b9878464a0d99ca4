"""Tiles and splits of attention, by kernel, head dim and queries, for each compute capability.

The table is `tiles.csv`: a cell has queries and keys of a tile, warps and pipeline stages. Tiles of 90 were fastest on
an H200. `python -m benchmarks tiles` compiles candidates for other GPUs and writes the largest without spills.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.layout import Layout
from kvbench.kernels.triton.launch import cdiv

TABLE = Path(__file__).with_suffix(".csv")
KEY = ("kernel", "bits", "channels", "queries")
"""Key columns of the table: kernel, bits of a query element, maximum head dim, and queries per tile at capability 90,
by which `choose_tile` finds a row."""
CARDS = (80, 86, 90, 100, 120)
"""Compute capabilities that have a column in the table."""
TIMED_CAPABILITY = 90
"""Capability of the GPU on which tiles were timed; interpreted kernels use its tiles."""
FALLBACK_CAPABILITY = 86
"""Capability whose tiles are used on GPUs older than all in `CARDS`."""
Kernel = Literal["attention", "past", "quantised", "decode", "mass"]


class Tile(NamedTuple):
    """Compile-time sizes: queries and keys per tile, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    @staticmethod
    def parse(cell: str) -> "Tile":
        """Return the tile of a table's cell, `<queries>x<keys>x<warps>x<stages>`."""
        return Tile(*map(int, cell.split("x")))

    def with_keys(self, keys: int) -> "Tile":
        """Return the tile with `keys` keys; a tile that had 128 gets another stage if they are fewer."""
        return self._replace(keys=keys, stages=self.stages + (keys < self.keys == 128))


@cache
def read_rows() -> tuple[dict[str, str], ...]:
    """Return the rows of the table of tiles, each with its cells by column."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def list_tiles(kernel: Kernel, bits: int, head_dim: int, capability: int) -> dict[int, Tile]:
    """Return the tiles of a kernel by their number of queries at capability 90, ascending.

    A capability that has no column has the tiles of the next lower one.
    """
    rows = [row for row in read_rows() if (row["kernel"], row["bits"]) == (kernel, str(bits))]
    widths = sorted({int(row["channels"]) for row in rows})
    width = next((width for width in widths if head_dim <= width), widths[-1])
    card = str(max((card for card in CARDS if card <= capability), default=FALLBACK_CAPABILITY))
    return {int(row["queries"]): Tile.parse(row[card]) for row in rows if row["channels"] == str(width)}


def choose_tile(
    kernel: Kernel, head_dim: int, dtype: torch.dtype, queries: int, rows: int, device: torch.device
) -> Tile:
    """Return the tile for a head dim and dtype, one of at most four per generation.

    Up to 16 queries have the smallest tile that holds them. More have tiles of 128, or of 64 where rows are too few to
    fill the device with 128. In batch-invariance mode the tile depends on the number of queries and the GPU only.

    Args:
        kernel: the kernel that is launched.
        head_dim: D.
        dtype: dtype of the queries.
        queries: queries per row.
        rows: rows times batch.
        device: device to fill.
    """
    tiles = list_tiles(kernel, 8 * dtype.itemsize, head_dim, find_capability(device))
    if queries <= 16:
        return next(tile for limit, tile in tiles.items() if queries <= limit)
    fills = is_batch_invariant() or rows * cdiv(queries, 128) >= 2 * count_processors(device)
    return tiles[128] if fills else tiles.get(64, tiles[128])


def fit_keys(layout: Layout, tokens: int, largest: int) -> int:
    """Return the number of keys per tile: short rows would leave most of a large tile empty.

    Args:
        layout: layout of the past.
        tokens: current tokens, which have separate tiles.
        largest: keys of a tile for long rows, a power of two of at least 16.

    Returns:
        The largest power of two from 16 to `largest` with at most a quarter of padding over all rows; `largest` in
        batch-invariance mode.
    """
    if is_batch_invariant():
        return largest
    rows, size = len(layout.counts), largest
    keys = layout.total + rows * tokens
    while size > 16:
        padded = sum(group.size * cdiv(group.length, size) for group in layout.groups) + rows * cdiv(
            tokens, size
        )
        if 4 * size * padded <= 5 * keys:
            break
        size //= 2
    return size


def count_splits(programs: int, keys: int, sizes: Tile, device: torch.device) -> int:
    """Return the number of programs that split a row's keys: enough to fill the device, at least four tiles each.

    It is 1 in batch-invariance mode.
    """
    if is_batch_invariant():
        return 1
    return max(1, min(2 * count_processors(device) // max(1, programs), cdiv(keys, sizes.keys) // 4, 32))


@cache
def count_processors(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device; for interpreted kernels, of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def find_capability(device: torch.device) -> int:
    """Return the compute capability of a CUDA device, such as 90; for interpreted kernels, of an H200."""
    if device.type != "cuda":
        return TIMED_CAPABILITY
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor
