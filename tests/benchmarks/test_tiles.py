"""The benchmark of tiles launches both kernels with the tile that it names; without a GPU it says so."""

import pytest
import torch

from benchmarks import tiles
from benchmarks.__main__ import main
from kvbench.kernels.layout import empty_layout
from kvbench.kernels.triton import past_attention, ragged_attention
from kvbench.kernels.triton.ragged_attention import Tile
from tests.support.triton_device import needs_triton

CPU = torch.device("cpu")


def choose() -> list[Tile]:
    """What both launchers take for short rows of 128 channels."""
    found = []
    for module in (ragged_attention, past_attention):
        sizes = module.tile(128, torch.bfloat16, 4096, 256, CPU)
        keys = module.fit_keys(empty_layout(4, CPU), 20, sizes.keys)
        found.append(sizes._replace(keys=keys))
    sizes = found[1]
    found.append(past_attention.with_keys(sizes, past_attention.max_keys(sizes, 128)))
    return found


@needs_triton
def test_both_kernels_take_the_tile() -> None:
    before = choose()
    with tiles.fixed(Tile(64, 64, 4, 2)):
        assert choose() == [Tile(64, 64, 4, 2)] * 3
    with tiles.fixed(None):
        assert choose() == before
    assert choose() == before


def test_a_machine_without_a_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tiles", "--device", "cpu"])
    assert "device=cpu: tiles are of kernels for GPUs" in str(end.value.code)
