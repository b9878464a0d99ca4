"""Batch invariance: settings of torch, choices of kernels, and bytes of interpreted kernels in batches of 1 and n."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.support.cuda_branches import on_cuda_branches
from kvbench.kernels.batch_invariance import FLAGS, MATMUL, is_batch_invariant, set_batch_invariant
from kvbench.kernels.decode_attention import decode_token
from kvbench.kernels.layout import Past, locate_rows
from kvbench.kernels.ragged_attention import dense_attention, ragged_attention
from tests.support.ragged_rows import Case, check, make
from tests.support.triton_device import DEVICE, needs_loops, needs_triton, on_device


@pytest.fixture
def invariant() -> Iterator[None]:
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs fill it, so that small batches are divided."""
    monkeypatch.setattr("kvbench.kernels.triton.tiles.count_processors", lambda _: 4)


def read_flags() -> list[bool | None]:
    return [getattr(MATMUL, f"{flag}{end}", None) for flag in FLAGS for end in ("", "_split_k")]


def test_torch_may_not_round_inside_products_while_batches_are_invariant() -> None:
    """Afterwards it may again, except where a user forbade it."""
    flag = "allow_fp16_reduced_precision_reduction"
    usual = getattr(MATMUL, flag)
    assert any(read_flags())
    try:
        for allowed in (usual, False):
            setattr(MATMUL, flag, allowed)
            before = read_flags()
            for wanted in (True, True, False, False):  # the second time changes nothing
                set_batch_invariant(wanted)
                assert is_batch_invariant() == wanted
                assert not any(read_flags()) if wanted else read_flags() == before
    finally:
        set_batch_invariant(False)
        setattr(MATMUL, flag, usual)


@needs_triton
@pytest.mark.parametrize("card", [80, 86, 90, 100, 120])
def test_tiles_look_at_the_batch_unless_it_is_invariant(
    card: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.kernels.triton import tiles

    def choose(rows: int) -> list[object]:
        kinds = product(("attention", "quantised"), (torch.float32, torch.bfloat16))
        return [
            tiles.choose_tile(kernel, 128, dtype, 300, rows, torch.device(DEVICE)) for kernel, dtype in kinds
        ]

    monkeypatch.setattr(tiles, "find_capability", lambda _: card)
    assert choose(1) != choose(1000)
    request.getfixturevalue("invariant")
    assert choose(1) == choose(1000)


def decode(q: Tensor, k: Tensor, v: Tensor, stored: Past) -> Tensor:
    past = Past(stored.keys.clone(), stored.values.clone(), stored.layout)
    with on_device():
        return decode_token(q, k, v, locate_rows(past, torch.zeros(1, dtype=torch.int64, device=DEVICE)), 0.3)


def take_first(case: Case) -> Case:
    """The first sequence of a batch."""
    q, k, v, (keys, values, layout, _) = case
    return Case(q[:1], k[:1], v[:1], Past(keys[:1].contiguous(), values[:1].contiguous(), layout))


@needs_loops
@pytest.mark.parametrize("queries", [1, 4])
def test_a_decode_step_is_the_same_in_every_batch(queries: int, small_gpu: None, invariant: None) -> None:
    case = make(3, [269, 19], queries, 1, 16, free_slots=1)
    assert torch.equal(decode(*take_first(case)), decode(*case)[:1])
    set_batch_invariant(False)  # otherwise it is divided by the batch
    alone, batch = decode(*take_first(case)), decode(*case)
    assert not torch.equal(alone, batch[:1])
    torch.testing.assert_close(alone, batch[:1])


@needs_loops
def test_a_segment_is_the_same_in_every_batch(small_gpu: None, invariant: None) -> None:
    """Static methods share rows; where data decides, rows of other sequences have other lengths."""
    for apart in (False, True):
        case = make(2, [270, 33, 0], 1, 20, 16, apart=apart)
        alone = make(1, [270, 33, 0], 1, 20, 16)
        if apart:
            keys, values = (torch.cat(rows, 1) for rows in zip(*case.past[:3], strict=True))
            first = Case(*(x[:1] for x in case[:3]), Past(keys, values, alone.layout))
        else:
            first = take_first(case)
        with on_cuda_branches("kernel"):
            expected, found = (ragged_attention(*one, 0.3)[0] for one in (first, case))
        assert torch.equal(expected, found[:1])


@needs_loops
def test_past_and_present_together_are_read_by_our_kernel(small_gpu: None, invariant: None) -> None:
    """Whole segments of the full cache, which torch's fused attention would read."""
    case = make(2, [0, 0], 1, 70, 16)
    with on_cuda_branches("kernel"):
        out = dense_attention(case.q, case.k, case.v, 0.3)
        alone = dense_attention(case.q[:1], case.k[:1], case.v[:1], 0.3)
    check((out, None), case, 0.3)
    assert torch.equal(alone, out[:1])
