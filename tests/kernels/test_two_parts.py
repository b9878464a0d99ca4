"""Attention by every path and backend, and over parts of the keys that are merged, against double precision."""

from collections.abc import Callable
from functools import reduce
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.reference_attention import attention
from kvbench.kernels import fused_attention as module
from kvbench.kernels.attention_paths import PATHS, Path, describe, find_obstacle
from kvbench.kernels.attention_states import merge_pair
from kvbench.kernels.fused_attention import Backend, Request, find_fused_obstacle, fused_attention
from kvbench.kernels.layout import Past, arrange_rows, empty_layout
from kvbench.kernels.past_attention import attend_in_parts, attend_past
from kvbench.kernels.ragged_attention import ragged_attention
from tests.support.fake_device import CUDA
from tests.support.ragged_rows import CASES, Case, check, make
from tests.support.triton_device import DEVICE, needs_loops, on_device, sharing

PLACE = torch.device(DEVICE)
PRECISION = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HELD = {"ragged": [300, 0, 33, 1, 130, 0], "uniform": [1100, 1100], "one slot": [1, 0]}
"""Slots of each row: unequal lengths with empty rows, long rows of one length, nearly no slots."""


def test_parts_are_joined_in_float32() -> None:
    """In 16 bits the output is rounded for the present and at the end; a third time would be seen in the error."""
    case = make(1, [300, 130, 40, 0], 1, 64, 32, dtype=torch.bfloat16, device="cpu")
    q, k, v, past = case
    present = fused_attention(q, k, v, 0.2)
    found, _ = attend_in_parts(q, k, v, past, 0.2)
    cached, sums = attend_past(q, past, 0.2)
    assert cached.dtype == torch.float32
    thrice, _ = merge_pair((present[0].clone(), present[1].clone()), (cached.bfloat16(), sums))
    kept, _ = attend_in_parts(q, k, v, past, 0.2, dtype=torch.float32)
    errors = [measure_error(out, case, 0.2) for out in (kept, found, thrice)]
    assert kept.dtype == torch.float32
    assert errors == sorted(errors)
    assert errors[2] > 1.05 * errors[1] > 1.1 * errors[0]


def measure_error(out: Tensor, case: Case, scale: float) -> float:
    """Relative root mean square error of an output [batch, rows, queries, D] against double precision."""
    expected = [
        attention(case.q[:, row], past, (case.k[:, row], case.v[:, row]), scale, causal=False)[0]
        for row, past in enumerate(case.past)
    ]
    exact = torch.stack(expected, 1)
    return float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@needs_loops
def test_a_kernel_hands_on_float32() -> None:
    """What other keys will join is not rounded before."""
    case = make(1, [70, 0], 1, 40, 32, dtype=torch.float16)
    with on_device():
        kept, rounded = (ragged_attention(*case, 0.2, dtype=dtype)[0] for dtype in (torch.float32, None))
    assert (kept.dtype, rounded.dtype) == (torch.float32, torch.float16)
    assert torch.equal(kept.half(), rounded)
    assert not torch.equal(kept, rounded.float())


@pytest.mark.slow
@needs_loops
@given(
    **CASES,
    stored=st.sampled_from((None, torch.float16, torch.float32)),
    share=st.sampled_from((None, 1, 2, 3)),
    scale=st.sampled_from((1.0, 0.2)),
    resume=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_the_past_kernel_resumes(share: int | None, scale: float, resume: bool, **given: object) -> None:
    case = make(**given)
    if not case.layout.total:
        return
    present = fused_attention(case.q.float(), case.k.float(), case.v.float(), scale)
    state = (present[0].to(case.q.dtype), present[1]) if resume else None
    with sharing(share), on_device():
        out, lse = attend_past(case.q, case.stored, scale, state)
    assert out.dtype == (case.q.dtype if resume else torch.float32)
    found = out.to(case.q.dtype), lse
    check(found, case if resume else case._replace(k=case.k[:, :, :0], v=case.v[:, :, :0]), scale)


@pytest.mark.parametrize("backend", get_args(Backend))
def test_attention_over_no_keys_is_the_same_for_every_backend(backend: Backend) -> None:
    """FlashAttention-2 returns +inf for such rows and FlashAttention-3 -inf, so that neither is called."""
    q, none = torch.randn(1, 2, 3, 8), torch.empty(1, 2, 0, 8)
    out, lse = fused_attention(q, none, none, 1.0, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 2, 3), -torch.inf))


@needs_loops
@given(**CASES)
@settings(max_examples=10, deadline=None)
def test_the_kernel_merges_pairs(**given: object) -> None:
    case = make(**given)
    tokens = case.k.shape[2]
    halves = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
    states = [
        fused_attention(case.q.float(), case.k[:, :, part].float(), case.v[:, :, part].float(), 0.3)
        for part in halves  # without tokens a half is nothing
    ]
    expected = merged([(out.cpu(), lse.cpu()) for out, lse in states])
    out, lse = states[0][0].to(DEVICE, case.q.dtype, copy=True), states[0][1].clone()
    strides = out.stride()
    with on_device():
        merge_pair((out, lse), states[1])
    assert out.stride() == strides
    tolerance = 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.cpu().float(), expected[0].float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), expected[1])


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize(("causal", "folds"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_backends_give_states_of_one_form(backend: str, causal: bool, folds: int) -> None:
    """Shapes as torch's own descriptions of its operations tell them, for 40 and 41 queries."""
    for tokens in (40, 41):
        with FakeTensorMode():
            qkv = torch.empty(2, tokens, 3, 4, 64, dtype=torch.bfloat16, device=CUDA)
            _, k, v = qkv.permute(2, 0, 3, 1, 4)
            q = torch.empty(2, folds * tokens, 4, 64, dtype=torch.bfloat16, device=CUDA).transpose(1, 2)
            out, lse = fused_attention(q, k, v, 0.2, causal=causal, backend=backend)
            assert (out.shape, out.dtype) == (q.shape, q.dtype)
            assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
            assert lse.is_contiguous()
            if folds == 1:  # heads are merged without a copy
                assert out.transpose(1, 2).is_contiguous()


@given(
    held=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    tokens=st.integers(0, 300),
    largest=st.sampled_from((32, 64, 128)),
)
def test_tiles_fit_short_rows(held: list[int], tokens: int, largest: int) -> None:
    pytest.importorskip("triton")
    from kvbench.kernels.triton.tiles import fit_keys

    layout = arrange_rows(torch.empty(len(held), max(held), dtype=torch.int64), held)
    found = fit_keys(layout, tokens, largest)

    def padding(size: int) -> float:
        every = [length for row in held for length in (row, tokens)]
        return sum(-(-length // size) * size for length in every) / max(1, sum(every))

    assert found in [size for size in (16, 32, 64, 128) if size <= largest]
    assert found == 16 or padding(found) <= 1.25
    assert found == largest or padding(2 * found) > 1.25


def states_of(seed: int, owners: list[int], sets: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """The states of `sets` parts, and attention over all keys with its log-sum-exp; `owners` says whose a key is."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 8, generator=generator) for n in (3, len(owners), len(owners)))
    nothing, belongs = (k[:, :0], v[:, :0]), torch.tensor(owners)
    chosen = [belongs >= 0, *(belongs == part for part in range(sets))]
    states = [attention(q, (k[:, one], v[:, one]), nothing, 8**-0.5, causal=False) for one in chosen]
    every, *parts = [(out.float()[None], sums.float()[None]) for out, sums in states]
    return parts, *every


def merged(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = states[0]
    return reduce(merge_pair, states[1:], (out.clone(), lse.clone()))


@given(seed=st.integers(0, 999), owners=st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_any_partition_gives_full_attention(seed: int, owners: list[int]) -> None:
    """Some parts have no keys; the last part is always empty."""
    states, out, lse = states_of(seed, owners, 6)
    for order in (states, states[::-1]):
        found, sums = merged(order)
        torch.testing.assert_close(found, out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sums, lse, atol=1e-6, rtol=1e-6)
    first = merged([merged(states[:2]), *states[2:4]])
    found, _ = merged([first, merged(states[4:])])
    torch.testing.assert_close(found, out, atol=1e-6, rtol=1e-6)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    states, _, _ = states_of(0, [0], 3)
    out, lse = merged(states[1:])
    assert not out.any()
    assert (lse == -torch.inf).all()
    found = merge_pair((out, lse), states[0])
    assert found[0] is out
    assert found[1] is lse
    assert torch.equal(out, states[0][0])
    assert torch.equal(lse, states[0][1])


@needs_loops
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_kernel_merges_alike() -> None:
    from kvbench.kernels.triton.softmax import merge_shares

    states, out, lse = states_of(1, [0, 0, 2, 1, 2, 2, 0], 4)
    outputs, sums = (torch.stack(parts).to(DEVICE) for parts in zip(*states, strict=True))
    found = torch.empty_like(outputs[0])
    torch.testing.assert_close(merge_shares(outputs, sums, found).cpu(), lse)
    torch.testing.assert_close(found.cpu(), out)
    nothing = merge_shares(outputs[3:], sums[3:], found)
    assert (nothing == -torch.inf).all()
    assert not found.any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held", HELD.values(), ids=list(HELD))
@pytest.mark.parametrize(("tokens", "folds", "causal"), [(1, 1, False), (200, 1, False), (64, 2, True)])
def test_paths_agree_with_float64(path: Path, held: list[int], tokens: int, folds: int, causal: bool) -> None:
    for apart in (False, True):
        case = make(2, held, folds, tokens, 64, dtype=PRECISION, apart=apart)
        if reason := find_obstacle(path, describe(case.q, case.k, case.layout), PLACE):
            pytest.skip(f"{path}: {reason}")
        found = ragged_attention(*case, 0.125, causal=causal, path=path)
        assert (found[1] is None) == (path == "products")
        check(found, case, 0.125, causal)


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize(("tokens", "folds", "causal"), [(1, 1, False), (200, 1, False), (64, 2, True)])
def test_a_backend_agrees_with_float64(backend: Backend, tokens: int, folds: int, causal: bool) -> None:
    q, k, v, _ = make(2, [1, 1], folds, tokens, 64, dtype=PRECISION)
    if reason := find_fused_obstacle(backend, Request(64, PRECISION, q.shape[2], PLACE)):
        pytest.skip(f"{backend}: {reason}")
    nothing = k.new_empty(2, 0, 64)
    case = Case(q, k, v, Past(nothing, nothing, empty_layout(2, PLACE)))
    check(fused_attention(q, k, v, 0.125, causal=causal, backend=backend), case, 0.125, causal)


def with_inputs(patch: pytest.MonkeyPatch, note: Callable[..., object]) -> None:
    """Pass the queries, keys and values of each call of a backend to `note`."""
    call = module._call_backend
    patch.setattr(module, "_call_backend", lambda one, *x, **more: (note(*x[:3]), call(one, *x, **more))[1])


@pytest.mark.parametrize(("tokens", "folds", "causal"), [(9, 1, False), (7, 2, True)])
def test_large_batches_are_cut_by_sequences(
    tokens: int, folds: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several calls equal one; no call's offsets exceed the limit, not even in strided tensors."""
    q, k, v, _ = make(7, [1, 1], folds, tokens, 16, dtype=torch.float32, device="cpu")
    whole, spans = fused_attention(q, k, v, 0.2, causal=causal, backend="cpu"), list[int]()

    with_inputs(monkeypatch, lambda *qkv: spans.append(max(len(x) * x.stride(0) for x in qkv)))
    limit = 2 * max(k.stride(0), q.stride(0)) + 5
    monkeypatch.setattr(module, "MAX_OFFSET", limit)
    pieces = fused_attention(q, k, v, 0.2, causal=causal, backend="cpu")
    assert len(spans) == 4
    assert max(spans) <= limit
    for piece, one in zip(pieces, whole, strict=True):
        assert torch.equal(piece, one)


def test_missing_channels_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for GPUs take multiples of 8; heads of 100 channels, as LlamaGen-3B's, are filled up."""
    q, k, v, _ = make(2, [1, 1], 1, 9, 100, dtype=torch.float32, device="cpu")
    expected = fused_attention(q, k, v, 0.1, causal=True, backend="cpu")
    seen: list[int] = []
    with_inputs(monkeypatch, lambda *qkv: seen.extend(x.shape[3] for x in qkv))
    monkeypatch.setattr(module, "CHANNELS", {"cpu": 8})
    for found, one in zip(fused_attention(q, k, v, 0.1, causal=True, backend="cpu"), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)
    assert seen == [104, 104, 104]
