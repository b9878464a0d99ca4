"""The simulated allocator against sums done by hand, and what is recorded of a generation that needs no GPU."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.__main__ import main
from benchmarks.support import caching_allocator as simulation
from benchmarks.support.fake_gpu import Recorder

MIB = 1 << 20


def peaks(*steps: int, expandable: bool = False) -> tuple[float, float]:
    """MiB in use and reserved at most, where n bytes are allocated and -n frees the n-th allocation, from 1."""
    events, count = [], 0
    for step in steps:
        count += step > 0
        events.append(simulation.Event(count, step) if step > 0 else simulation.Event(-step, None))
    found = simulation.replay(events, expandable=expandable)
    return found.allocated / MIB, found.reserved / MIB


@pytest.mark.parametrize(
    ("size", "used", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),  # a MiB is too little to be split off
        (19 * MIB - 512, 19 * MIB - 512, 20 * MIB),
        (21 * MIB - 512, 21 * MIB - 512, 22 * MIB),
    ],
)
def test_sizes_are_rounded(size: int, used: int, reserved: int) -> None:
    assert peaks(size) == (used / MIB, reserved / MIB)


@pytest.mark.parametrize(("size", "used", "reserved"), [(MIB, 1, 2), (19 * MIB, 19, 20), (21 * MIB, 21, 40)])
def test_expandable_segments_grow_by_pages_and_split_everything(size: int, used: int, reserved: int) -> None:
    assert peaks(size, expandable=True) == (used, reserved)


def test_a_segment_is_shared_by_blocks_of_its_pool_only() -> None:
    assert peaks(*[MIB // 4] * 8) == (2, 2)
    assert peaks(*[MIB // 4] * 9) == (2.25, 4)
    assert peaks(*[5 * MIB] * 4) == (20, 20)
    assert peaks(2 * MIB, MIB // 2) == (2.5, 22)  # 18 MiB are free, but not for small blocks


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    # 30 go into the 32, or else nothing would be left for 60.
    assert peaks(64 * MIB, 32 * MIB, -1, -2, 30 * MIB, 60 * MIB) == (96, 96)


def test_free_neighbours_merge() -> None:
    quarters = [5 * MIB] * 4
    assert peaks(*quarters, -1, -2, 9 * MIB) == (20, 20)
    assert peaks(*quarters, -2, -1, 9 * MIB) == (20, 20)
    assert peaks(*quarters, -1, -3, 9 * MIB) == (20, 40)
    assert peaks(*quarters, -1, -3, -2, 14 * MIB) == (20, 20)
    assert peaks(10 * MIB, 10 * MIB, -1, -2, 20 * MIB) == (20, 40)  # not across segments


def test_growing_buffers_leave_holes() -> None:
    steps = [10 * MIB, 12 * MIB, -1, 14 * MIB, -2, 16 * MIB]
    assert peaks(*steps) == (30, 10 + 12 + 14 + 16)
    # 10 and 12 take two pages, 14 the end of the second; the 10 and 12 before them merge and hold 16.
    assert peaks(*steps, expandable=True) == (30, 40)


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    # 30 and 2 leave 8 MiB at the end of two pages. 5 would fit there, yet go to the 30: 28 need another page.
    assert peaks(30 * MIB, 2 * MIB, -1, 5 * MIB, 28 * MIB, expandable=True) == (35, 60)
    assert peaks(30 * MIB, 2 * MIB, 5 * MIB, expandable=True) == (37, 40)


@given(
    choices=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), max_size=60),
    expandable=st.booleans(),
)
def test_blocks_never_overlap(choices: list[tuple[int, int]], expandable: bool) -> None:
    pool, live = simulation.Pool(small=False, expandable=expandable), []
    for size, place in choices:
        if size > 150 and live:
            pool.give_back(live.pop(place % len(live)))
        else:
            live.append(pool.take(size * MIB + 512))
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert not spans or spans[-1][1] <= pool.reserved
    for block in live:
        pool.give_back(block)
    if expandable and pool.reserved:
        before = pool.reserved
        assert pool.take(before).size == before == pool.reserved


def test_a_recorder_sees_what_lives_and_how_long() -> None:
    recorder = Recorder()
    with FakeTensorMode(), torch.inference_mode():
        weight = torch.empty(512, 256, device="cuda")
        with recorder:
            x = torch.empty(128, 256, device="cuda")
            y = torch.nn.functional.linear(x.view(2, 64, 256), weight).mul_(2)
            del x
            first = y[0]
            del y
            assert first.cpu().device.type == "cpu"
            del first
            assert torch.isfinite(weight.view(-1)).all()
    assert recorder.events[:4] == [(0, 4 * 128 * 256), (1, 4 * 128 * 512), (0, None), (1, None)]
    assert recorder.events[4].size in (
        512 * 256,
        4 * 512 * 256,
    )  # of the check, by whatever comes first in it
    assert sorted(number for number, size in recorder.events if size is None) == [
        number for number, size in recorder.events if size is not None
    ]


def test_a_recorder_takes_no_new_memory_for_old() -> None:
    recorder = Recorder()
    with FakeTensorMode(), torch.inference_mode():
        for _ in range(50):
            before = torch.empty(64, device="cuda")
            with recorder:
                before.view(8, 8)
            del before  # what comes next may lie at its address
            with recorder:
                torch.empty(64, device="cuda")
    sizes = [size for _, size in recorder.events]
    assert sizes.count(4 * 64) == sizes.count(None) == 50


@pytest.mark.slow
def test_a_whole_generation_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    small = ("model.transformer.depth=1", "model.transformer.block_chunks=1", "model.pixels=0.06M")
    main(["allocator", "--batch", "1", "--method", "snapkv", *small])
    method, budget, used, reserved, ratio, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert (method, budget) == ("snapkv", "0.1")
    assert 0 < float(used) < float(reserved)
    assert float(ratio) == pytest.approx(float(reserved) / float(used), abs=0.05)
