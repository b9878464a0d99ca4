"""Ragged attention, attention mass and row compaction against plain loops over rows."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.support.cuda_branches import attend_slowly
from benchmarks.support.reference_attention import scores
from kvbench.kernels import past_attention, varlen_attention
from kvbench.kernels import ragged_attention as module
from kvbench.kernels.attention_mass import attention_mass, attention_scores
from kvbench.kernels.attention_paths import PATHS, Path
from kvbench.kernels.compact import rebuild, rebuild_both, source_table
from kvbench.kernels.layout import Past, empty_layout, list_positions, pack_rows, view_group
from kvbench.kernels.ragged_attention import dense_attention, ragged_attention
from tests.support.places import ROOT
from tests.support.ragged_rows import CASES, HALF, Case, check, check_mass, make
from tests.support.triton_device import DEVICE, needs_triton, on_device


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    """Short rows on the CPU; the first queries of all tokens."""
    held = st.lists(st.integers(0, 7), min_size=1, max_size=5)
    short = {
        "batch": st.integers(1, 3),
        "held": held,
        "tokens": st.integers(1, 6),
        "channels": st.sampled_from((4, 8)),
    }
    given = {name: draw(strategy) for name, strategy in {**CASES, **short}.items()}
    given["stored"] = draw(st.sampled_from((None, torch.bfloat16)))
    case = make(**{**given, "dtype": torch.float32, "device": "cpu"})
    return case._replace(q=case.q[:, :, : draw(st.integers(1, case.q.shape[2]))])


@given(
    ragged(), st.booleans(), st.sampled_from((1.0, 0.25)), st.sampled_from((1, 500, 4 << 20)),
    st.sampled_from((-1, 20, 1 << 15)),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_ragged_attention_is_softmax(case: Case, causal: bool, scale: float, piece: int, padded: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # groups alone, some of them together, all together
        patch.setattr(module, "PIECE_BYTES", piece)
        patch.setattr(module, "PADDED_SCORES", padded)
        check(ragged_attention(*case, scale, causal=causal), case, scale, causal)


@given(**CASES, causal=st.booleans(), path=st.sampled_from(PATHS[2:]), long=st.sampled_from((1, 1024)))
@settings(max_examples=90, deadline=None)
def test_past_and_present_in_parts_are_softmax(causal: bool, path: Path, long: int, **given: object) -> None:
    """Fused attention to long rows of one length, and a slow attention in place of libraries."""
    case = make(**{**given, "dtype": torch.float32, "device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(past_attention, "MIN_FUSED_SLOTS", long)
        patch.setattr(varlen_attention, "find_varlen", lambda: attend_slowly)
        found = ragged_attention(*case, 0.2, causal=causal, path=path)
    assert found[1] is not None
    check(found, case, 0.2, causal)


@given(ragged(), st.sampled_from((1, 2)), st.booleans())
@settings(max_examples=80, deadline=None)
def test_attention_mass_is_the_mean_of_the_matrix(case: Case, power: int, causal: bool) -> None:
    last = torch.arange(case.q.shape[2]) % case.k.shape[2] if causal else None
    for chunk in (256, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvbench.kernels.attention_mass.CHUNK", chunk)
            mass = attention_mass(case.q, case.k, case.stored, 0.3, power=power, tokens=last)
        check_mass(mass, case, 0.3, power, causal)


@given(ragged(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_attention_scores_are_the_logits(case: Case, causal: bool) -> None:
    last = torch.arange(case.q.shape[2]) % case.k.shape[2] if causal else None
    found = attention_scores(case.q, case.k, case.stored, 0.3, tokens=last)
    longest, case = case.layout.longest, case.folded
    for row, (keys, _) in enumerate(case.past):
        expected = scores(case.q[:, row], keys, case.k[:, row], 0.3, causal).float()
        length = keys.shape[1]
        shown = torch.cat((found[:, row, :, :length], found[:, row, :, longest:]), 2)
        torch.testing.assert_close(shown, expected, atol=1e-5, rtol=1e-4)
        assert (found[:, row, :, length:longest] == -torch.inf).all()


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from((1, 64, 300, 1 << 20)), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_dense_attention_agrees_with_double_precision(
    batch: int, rows: int, queries: int, keys: int, piece: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, rows, n, 8, generator=generator) for n in (queries, keys, keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece)
        out = dense_attention(q, k, v, 0.7)
    nothing = k.new_empty(batch, 0, 8)
    check((out, None), Case(q, k, v, Past(nothing, nothing, empty_layout(rows, "cpu"))), 0.7)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (torch.full((1, 1, 2, 4), size) for size in (100.0, 100.0, 2.0))
    assert torch.equal(dense_attention(q, k, v, 1.0), v)
    layout, source = source_table(empty_layout(1, "cpu"), torch.ones(1, 2).bool(), torch.arange(2)[None], 2)
    past = Past(torch.empty(1, 2, 4), v[0], layout)
    rebuild(torch.empty(1, 0, 4), -k, source, past.keys)
    merged, _ = ragged_attention(q, k, v, past, 1.0)
    assert torch.equal(merged, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_as_fused_kernels_round_them(dtype: torch.dtype, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 8, generator=generator).to(dtype) for _ in range(3))
    scores = 2 * q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.float().to(dtype).double() @ v.double() / weights.sum(-1, keepdim=True)
    past = torch.empty(2, 0, 8, dtype=dtype)
    out, _ = ragged_attention(q, k, v, Past(past, past, empty_layout(3, "cpu")), 2.0, causal=causal)
    exact = weights @ v.double() / weights.sum(-1, keepdim=True)
    assert (out == rounded.float().to(dtype)).float().mean() > 0.99
    assert (out == exact.float().to(dtype)).float().mean() < 0.9


@pytest.mark.parametrize(
    ("device", "where"),
    [("cpu", nullcontext), pytest.param(DEVICE, on_device, marks=needs_triton)],
    ids=["torch", "triton"],
)
@given(
    rows=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    channels=st.sampled_from((8, 20, 24, 64)),
    stored=st.sampled_from((torch.float32, HALF)),
    share=st.sampled_from((0.0, 0.3, 0.7, 1.0)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=20, deadline=None)
def test_plan_and_rebuild_equal_lists(
    device: str, where: Callable[[], AbstractContextManager[None]], rows: int, lengths: list[int],
    channels: int, stored: torch.dtype, share: float, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    layout, start = empty_layout(rows, device), 0
    storage = torch.empty(2, 0, channels, dtype=stored, device=device)
    negative = storage  # instead of values: keys of the opposite sign, in another memory order
    model: list[dict[int, Tensor]] = [{} for _ in range(rows)]
    for length in lengths:
        current = torch.randn(2, length, rows, channels, generator=generator).to(device)
        seen = list_positions(layout, start, length)
        keep = (torch.rand(seen.shape, generator=generator) < share).to(device)
        for row, held in enumerate(model):
            held |= dict(enumerate(current[:, :, row].to(stored).unbind(1), start))
            chosen = {p for p in seen[row][keep[row]].tolist() if p >= 0}
            model[row] = {p: x for p, x in held.items() if p in chosen}
        layout, source = source_table(layout, keep, list_positions(layout, start, length), length)
        old, new = (storage, negative), (current.transpose(1, 2), -current.transpose(1, 2).contiguous())
        storage, negative, alone = storage.new_empty(3, 2, layout.total, channels).unbind()
        with where():
            rebuild_both(old, new, source, (storage, negative))
            rebuild(old[0], new[0], source, alone)
        start += length
        assert torch.equal(alone, storage)
        assert torch.equal(negative, -storage)
        counts = [len(held) for held in model]
        assert layout.total == sum(counts)
        assert layout.longest == layout.positions.shape[1] == max(counts)
        assert layout.lengths.tolist() == list(layout.counts) == counts
        assert layout.order.tolist() == sorted(range(rows), key=lambda row: -counts[row])
        assert (layout.lengths.dtype, layout.order.dtype) == (torch.int32, torch.int32)
        assert [layout.order[place] for place in layout.places] == list(range(rows))
        assert layout.uniform == (len(set(counts)) == 1)
        members = iter(layout.order.tolist())
        views = {}
        for group in layout.groups:
            views |= dict(zip(islice(members, group.size), view_group(storage, group)[0], strict=True))
        for row, held in enumerate(model):
            assert [p for p in layout.positions[row].tolist() if p >= 0] == [*held]
            first = int(layout.offsets[row])
            slots = storage[:, first : first + len(held)]
            assert torch.equal(slots, torch.stack([*held.values()], 1) if held else slots)
            assert torch.equal(views[row], slots[0])


def test_triton_is_only_imported_for_cuda_tensors() -> None:
    """Where it is not installed, all else works: other modules import it inside functions."""
    outside = re.compile(r"^(?:from|import) (?:triton|kvbench\.kernels\.triton)\b", re.MULTILINE)
    paths = [path for folder in ("kvbench", "kernels", "eval") for path in (ROOT / folder).rglob("*.py")]
    importing = {path.parent for path in paths if outside.search(path.read_text())}
    assert importing == {ROOT / "kernels" / "triton"}


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 2)])
def test_kept_slots_move_to_the_front(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    values, keep = torch.from_numpy(rng.normal(size=shape)), torch.from_numpy(rng.random(shape[:2]) < 0.5)
    packed = pack_rows(values, keep, -7.0, longest=6)
    for row, kept, found in zip(values, keep, packed, strict=True):
        assert torch.equal(found[: kept.sum()], row[kept])
        assert (found[kept.sum() :] == -7.0).all()
