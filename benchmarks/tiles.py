"""Tiles of attention by compute capability: fills `kernels/triton/tiles.csv` by compiling candidates, without a GPU.

A candidate has no more queries, keys and stages than the tile of 90, which an H200 measured as the fastest: so no GPU
compiles more variants in a generation. The largest tile without spills is taken, with the warps of 90 if possible.
Stages are lost only where the block does not fit. Where all spill, the tile that spills least is taken. Candidates are
compiled with every number of keys that short rows may have. A GPU without a column has the tiles of the next lower one.
python -m benchmarks tiles [--arch 80 120] [--only "past bf16 128"] [--write]
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.compiled import SHARED, compile_variant
from benchmarks.support.arguments import Option
from benchmarks.support.kernel_variants import attention, decode, mass, past, quantised
from benchmarks.support.plane_cases import Stored
from benchmarks.support.table import Table, write_csv
from benchmarks.support.triton_launches import Variant
from kvbench.kernels.triton import tiles
from kvbench.kernels.triton.tiles import CARDS, KEY, TABLE, TIMED_CAPABILITY, Tile, read_rows

FORMS = (Stored(4, "channel", "token"), Stored(4, "codebook", "codebook"))
"""Formats that stand for all formats of a plane: those with the most arithmetic per element."""
ROWS = 64
"""Rows of the compiled launches."""
SIZES = (128, 64, 32, 16)
"""Possible queries, and possible keys, of a candidate."""


def list_candidates(row: dict[str, str]) -> Iterator[Tile]:
    """Yield candidates for a row of the table, the best first, with the stages of 90."""
    bound = Tile.parse(row[str(TIMED_CAPABILITY)])
    whole = row["kernel"] == "decode" or bound.queries <= 16  # one tile holds all queries of a row
    queries = [bound.queries] if whole else [size for size in SIZES if size <= bound.queries]
    pairs = product(queries, [size for size in SIZES if size <= bound.keys])
    for size, keys in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]), reverse=True):
        for warps in sorted({bound.warps, 8}):  # fewer warps leave a tile fewer registers
            yield bound.with_keys(keys)._replace(queries=size, warps=warps)


def list_variants(row: dict[str, str], tile: Tile) -> Iterator[Variant]:
    """Yield the variants that stand for a row of the table, with a tile."""
    dtype = torch.bfloat16 if row["bits"] == "16" else torch.float32
    kernel, queries, head_dim = row["kernel"], int(row["queries"]), int(row["channels"])
    short = [tile.with_keys(keys) for keys in SIZES if keys < tile.keys]

    def launch(size: Tile, launcher: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
        with patch.object(tiles, "list_tiles", lambda *_: {128: size}):
            return launcher(dtype, head_dim, *inputs, **more)

    if kernel == "attention":
        yield launch(tile, attention, queries, ROWS)
        yield launch(tile, attention, queries, ROWS, causal=True)
        for shorter in short:
            yield launch(shorter, attention, queries, ROWS)
    elif kernel == "past":
        for size in (tile, *short):
            yield launch(size, past, queries, ROWS)
    elif kernel == "quantised":
        for form, resume in product(FORMS, (True, False)):
            yield launch(tile, quantised, queries, form, resume=resume)
    elif kernel == "decode":
        yield launch(tile, decode, min(queries, 16))
    else:
        yield from launch(tile, mass)


def measure_spills(row: dict[str, str], tile: Tile, arch: int, most: int) -> int:
    """Return the maximum bytes that a variant spills; stop at the first variant that spills `most` or more.

    Raises:
        MemoryError: a block does not fit.
    """
    spilled = 0
    for variant in list_variants(row, tile):
        out = compile_variant(variant, arch)
        if out.shared > SHARED[arch]:
            raise MemoryError
        spilled = max(spilled, out.spilled)
        if spilled >= most:
            break
    return spilled


def find_tile(row: dict[str, str], arch: int) -> tuple[Tile, int]:
    """Return the tile of a row for a capability, and the maximum bytes that it spills."""
    best, least = None, sys.maxsize
    for candidate in list_candidates(row):
        for stages in range(candidate.stages, 0, -1):
            tile = candidate._replace(stages=stages)
            with suppress(MemoryError):
                spilled = measure_spills(row, tile, arch, least)
                if spilled < least:
                    best, least = tile, spilled
                break
        if least == 0:
            break
    if best is None:
        raise ValueError(f"--arch {arch}: no tile of {row['kernel']} fits")
    return best, least


OPTIONS = {
    "only": Option("", "rows whose kernel, channels and queries contain this"),
    "arch": Option(
        [card for card in CARDS if card != TIMED_CAPABILITY], "compute capabilities", choices=CARDS
    ),
    "write": Option(False, "write the table, row by row"),
}


def main(options: argparse.Namespace) -> int:
    """Print found and stored tiles; return 1 if they differ without `--write`."""
    rows, changed = [dict(row) for row in read_rows()], 0
    numbers = dict.fromkeys((*KEY[2:], "sm"), "d")
    table = Table(numbers | {"tile": " >14", "before": " >14", "spills": "d"}, "kernel")
    for arch, row in product(options.arch, rows):
        name = f"{row['kernel']} {'bf16' if row['bits'] == '16' else 'fp32'}"
        if options.only not in f"{name} {row['channels']} {row['queries']}":
            continue
        tile, spilled = find_tile(row, arch)
        cell, before = "x".join(map(str, tile)), row[str(arch)]
        table.add(name, int(row["channels"]), int(row["queries"]), arch, cell, before, spilled)
        changed += cell != before
        if options.write:
            row[str(arch)] = cell
            write_csv(str(TABLE), [row.keys(), *(each.values() for each in rows)])
    return int(changed > 0 and not options.write)
