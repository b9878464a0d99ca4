"""Every path and backend of attention that this machine has, against double precision."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from kvbench.kernels import fused_attention as module
from kvbench.kernels.attention_paths import PATHS, Path, describe, find_obstacle
from kvbench.kernels.fused_attention import Backend, Request, find_fused_obstacle, fused_attention
from kvbench.kernels.layout import Past, empty_layout
from kvbench.kernels.ragged_attention import ragged_attention
from tests.support.ragged_rows import Case, check, make

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
HELD = {"ragged": [300, 0, 33, 1, 130, 0], "uniform": [1100, 1100], "one slot": [1, 0]}
"""Slots of each row: unequal lengths with empty rows, long rows of one length, nearly no slots."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held", HELD.values(), ids=list(HELD))
@pytest.mark.parametrize(("tokens", "folds", "causal"), [(1, 1, False), (200, 1, False), (64, 2, True)])
def test_paths_agree_with_float64(path: Path, held: list[int], tokens: int, folds: int, causal: bool) -> None:
    for apart in (False, True):
        case = make(2, held, folds, tokens, 64, dtype=DTYPE, apart=apart, device=str(DEVICE))
        if reason := find_obstacle(path, describe(case.q, case.k, case.layout), DEVICE):
            pytest.skip(f"{path}: {reason}")
        found = ragged_attention(*case, 0.125, causal=causal, path=path)
        assert (found[1] is None) == (path == "products")
        check(found, case, 0.125, causal)


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize(("tokens", "folds", "causal"), [(1, 1, False), (200, 1, False), (64, 2, True)])
def test_a_backend_agrees_with_float64(backend: Backend, tokens: int, folds: int, causal: bool) -> None:
    q, k, v, _ = make(2, [1, 1], folds, tokens, 64, dtype=DTYPE, device=str(DEVICE))
    if reason := find_fused_obstacle(backend, Request(64, DTYPE, q.shape[2], DEVICE)):
        pytest.skip(f"{backend}: {reason}")
    nothing = k.new_empty(2, 0, 64)
    case = Case(q, k, v, Past(nothing, nothing, empty_layout(2, DEVICE)))
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
