"""Tiles of ragged attention: milliseconds at a model's scales by the tile that the launcher chooses, and by others.

Rows are as HeatKV leaves them in the middle layer. `kernel` reads past and present in one pass, `parts` the past alone
(`kernels/attention_paths.py`).
python -m benchmarks tiles --device cuda [--model infinity_2b] [--budget 0.1] [--batch 8] [--last 4]
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.support import floors
from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.kernel_cases import Case, Held, Timer
from benchmarks.support.table import Table
from kvbench.core.budget import Budget
from kvbench.kernels.attention_paths import Path
from kvbench.kernels.layout import Layout
from kvbench.kernels.triton import past_attention, ragged_attention
from kvbench.kernels.triton.ragged_attention import Tile

PATHS: tuple[Path, ...] = ("kernel", "parts")
TILES = (
    Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 64, 4, 3), Tile(128, 32, 8, 4),
    Tile(128, 128, 8, 2), Tile(128, 128, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 128, 4, 3),
)  # fmt: skip
OPTIONS = {
    "device": "auto", "model": "infinity_2b", "budget": "0.1", "batch": 8, "repeats": 5,
    "last": Option(4, "scales, the last ones of the model"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a row per path and tile.

    Raises:
        ValueError: there is no GPU.
    """
    timer = Timer(options.device, options.repeats)
    if not timer.gpu:
        raise ValueError("device=cpu: tiles are of kernels for GPUs; take device=cuda on a machine with one")
    model = build_model(options.model)
    spec = model.spec
    schedule, _ = floors.heatkv(spec, Budget.parse(options.budget, spec), model.default_sinks)
    held, scales = Held(spec, schedule, options.device), spec.segments[-options.last :]
    sequences = options.batch * spec.branches
    cases = [Case(spec, at, sequences, torch.bfloat16, timer) for at in scales]
    layouts = [held.layout(spec.layers // 2, at) for at in scales]
    print(f"{torch.cuda.get_device_name(options.device)}, torch {torch.__version__}, {spec.name}")
    print("tile: queries x keys, warps, stages; milliseconds of a layer at each scale")
    table = Table({f"{at.height}x{at.width}": ".4f" for at in scales}, width=28)
    with torch.inference_mode():
        for path in PATHS:
            for tile in (None, *TILES):
                with fixed(tile):
                    times = [measure(case, layout, path) for case, layout in zip(cases, layouts, strict=True)]
                shown = (
                    "chosen" if tile is None else f"{tile.queries} x {tile.keys}, {tile.warps}, {tile.stages}"
                )
                table.add(f"{path}: {shown}", *times)


def measure(case: Case, layout: Layout, path: Path) -> float | None:
    """Return the milliseconds of attention; None where a tile does not fit the card."""
    try:
        return 1e3 * case.ragged(layout, path)
    except OutOfResources:
        return None


@contextmanager
def fixed(tile: Tile | None) -> Iterator[None]:
    """Have both kernels launched with one tile, however long rows are; None: as they choose."""
    replaced = {
        "tile": lambda *_: tile,
        "fit_keys": lambda *given: given[2],
        "max_keys": lambda sizes, _: sizes.keys,
        "with_keys": lambda sizes, _: sizes,
    }
    with ExitStack() as stack:
        for module in (ragged_attention, past_attention) if tile else ():
            for name in replaced.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, replaced[name]))
        yield
