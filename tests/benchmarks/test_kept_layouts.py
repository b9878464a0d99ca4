"""Layouts of kept slots: outputs equal dense attention under a mask, and slot counts equal the paper's."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import cascade_layouts as cascade
from benchmarks.__main__ import main
from benchmarks.support import kept_layouts as layouts
from tests.support.places import GOLDENS

D = 8
TASKS = ("LS", "LA", "HS", "HA")
"""Selection and allocation by layer and by head (Hard-KV, appendix B.2)."""
PUBLISHED = json.loads((GOLDENS / "methods" / "derived_budgets.json").read_text())["hard_latency"]
LATENCIES = {
    # Milliseconds of all 36 layers, RTX 4090, batch 32: preparation and step, rewritten and masked.
    "HA_backend_stats_0.5_0.25.npz": ((4.91, 9.118), (0.567, 17.98)),
    "HA_backend_stats_0.5_0.125.npz": ((3.15, 9.116), (0.567, 17.973)),
    "HA_backend_stats_0.25_0.125.npz": ((3.14, 4.652), (0.562, 17.945)),
}
"""What published files come to, whose names are the largest and the overall share of slots that are kept."""


def draw_selection(
    task: str, layers: int, requests: int, heads: int, slots: int, rng: np.random.Generator
) -> Tensor:
    """Draw kept slots bool [layers, requests, heads, slots], shared as in a task, with some empty rows."""
    shape = {"LS": (1, requests, 1), "LA": (layers, requests, 1), "HS": (1, requests, heads)}
    lengths = rng.integers(0, slots + 1, shape.get(task, (layers, requests, heads)))
    lengths[rng.random(lengths.shape) < 0.2] = 0
    lengths = np.broadcast_to(lengths, (layers, requests, heads)).copy()
    if task == "HS":
        lengths = rng.permuted(lengths, axis=2)
    ranks = np.broadcast_to(np.arange(slots), (layers, requests, 1 if task[0] == "L" else heads, slots))
    return torch.from_numpy(np.ascontiguousarray(rng.permuted(ranks.copy(), axis=3) < lengths[..., None]))


def attend_densely(
    q: Tensor, past: tuple[Tensor, Tensor], new: list[tuple[Tensor, Tensor]], keep: Tensor
) -> Tensor:
    """Attention of the last new token over what its row keeps and over all new ones, in double precision."""
    k, v = (torch.cat([past[n], *(pair[n][0] for pair in new)], 1).double() for n in (0, 1))
    seen = torch.cat((keep, torch.ones(len(keep), len(new), dtype=torch.bool)), 1)
    scores = (q[0].double() @ k.mT * D**-0.5).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ v)[None].float()


@given(data=st.data())
def test_every_layout_attends_as_a_mask_does(data: st.DataObject) -> None:
    task, way = data.draw(st.sampled_from(TASKS)), data.draw(st.sampled_from(("sparse", "max", "ragged")))
    layers, requests, heads, fold, room = (data.draw(st.integers(1, 3)) for _ in range(5))
    slots = data.draw(st.integers(1, 19))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    keep = draw_selection(task, layers, requests, heads, slots, rng)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    rows, dense = requests * heads, layouts.lay_dense(requests * heads, slots, room)
    allocated = set()
    for layer in range(layers):
        past = tuple(torch.randn(rows, slots, D, generator=generator) for _ in range(2))
        stored = [torch.cat((x, torch.full((rows, room, D), 9.0)), 1).reshape(1, -1, D) for x in past]
        kept = keep[layer].flatten(0, 1)
        laid = layouts.lay(way, *stored, dense, kept, layouts.find_widths(keep))
        layout = (laid if way == "ragged" else laid.rows).past.layout
        allocated.add(layout.counts)
        if way == "ragged":
            assert layout.counts == tuple(kept.sum(1).tolist())
        else:
            assert torch.equal(layouts.unpack_bits(laid.bits, layout.longest).sum(1), kept.sum(1))
        new: list[tuple[Tensor, Tensor]] = []
        for filled in range(room):
            q = torch.randn(1, rows, fold, D, generator=generator)
            k, v = (torch.randn(1, rows, 1, D, generator=generator) for _ in range(2))
            new.append((k, v))
            found = layouts.attend_step(q, k, v, laid, filled, D**-0.5)
            torch.testing.assert_close(found, attend_densely(q, past, new, kept), atol=1e-5, rtol=1e-5)
    if way != "ragged":
        assert len(allocated) == 1  # a captured graph reads the same slots in all layers


@given(slots=st.integers(1, 40), seed=st.integers(0, 99))
def test_masks_are_packed_from_the_lowest_bit(slots: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((2, 3, slots)) < 0.5
    packed = layouts.pack_bits(torch.from_numpy(mask))
    assert np.array_equal(packed.numpy(), np.packbits(mask, axis=-1, bitorder="little"))
    assert torch.equal(layouts.unpack_bits(packed, slots), torch.from_numpy(mask))


@given(task=st.sampled_from(TASKS), seed=st.integers(0, 99))
def test_slots_are_those_that_are_written_down(task: str, seed: int) -> None:
    keep = draw_selection(task, 3, 2, 2, 9, np.random.default_rng(seed))
    ids = [[[set(head.nonzero()[:, 0].tolist()) for head in one] for one in layer] for layer in keep]
    longest = [max(len(layer[one][head]) for layer in ids for head in (0, 1)) for one in (0, 1)]
    union = [set().union(*(layer[one][head] for layer in ids)) for one in (0, 1) for head in (0, 1)]
    assert layouts.count_slots(keep, "max") == 3 * 2 * sum(longest)
    assert layouts.count_slots(keep, "sparse") == 3 * sum(map(len, union))
    assert layouts.count_slots(keep, "ragged") == int(keep.sum())


def test_rewriting_may_pay_at_once_or_never() -> None:
    first = layouts.Cost(100, 1.0, 1.0)
    assert layouts.break_even(first, layouts.Cost(50, 3.0, 2.0)) == (float("inf"), float("inf"))
    assert layouts.break_even(first, layouts.Cost(50, 2.0, 0.75)) == (4.0, 0.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_latencies_and_their_integrals(name: str) -> None:
    """What is amortised over 128 steps, after how many steps rewriting pays, and the share of memory times time."""
    (prepare, step), (sparse_prepare, sparse_step) = LATENCIES[name]
    told = PUBLISHED[name]
    per_step = {"max": (prepare, step), "sparse": (sparse_prepare, sparse_step)}
    for way, (first, each) in per_step.items():
        found = layouts.integrate(1, first, each) / 128
        assert found == pytest.approx(told["amortised_ms_per_step_128"][way], abs=2e-3)
    longest, overall = map(float, name.removesuffix(".npz").split("_")[-2:])
    sparse = layouts.Cost(1, sparse_prepare, sparse_step)
    pays, with_memory = layouts.break_even(sparse, layouts.Cost(longest, prepare, step))
    assert pays == pytest.approx(told["breakeven_steps"], abs=1e-3)
    one, other = (
        layouts.integrate(*cost, with_memory) for cost in (sparse, layouts.Cost(longest, prepare, step))
    )
    assert other == pytest.approx(one) or (with_memory == 0 and other < one)
    lengths = torch.tensor([longest, 2 * overall - longest]).clamp(min=0)[:, None]
    assert layouts.find_utilisation(lengths) == pytest.approx(lengths.mean() / longest)
    ratio = layouts.integrate(longest, prepare, step) / layouts.integrate(1, sparse_prepare, sparse_step)
    amortised = told["amortised_ms_per_step_128"]
    assert ratio == pytest.approx(longest * amortised["max"] / amortised["sparse"], abs=2e-4)


def test_the_published_profile_keeps_an_eighth_of_which_the_longest_head_has_half() -> None:
    lengths = cascade.spread_lengths(100_000, 36, 8)
    assert lengths.shape == (36, 8)
    assert lengths[0, 0] == lengths.max() == 50_000
    assert lengths.double().mean() / 100_000 == pytest.approx(0.125, abs=1e-4)
    assert layouts.find_utilisation(lengths) == pytest.approx(0.25, abs=1e-3)
    assert lengths[5, 3].item() == round(50_000 * 0.93389**5 * 0.87215**3)


def test_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--batch", "2", "--slots", "40", "--tokens", "40", "--repeats", "1", "--threads", "1", "--budget", "0.3",
        "model.transformer.depth=2", "model.prompt_tokens=4", "model.chunk=8", "method.window=2",
        "method.queries=4",
    ]  # fmt: skip
    main(["cascade_layouts", *small])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in ("HA-Sparse", "HA-Max", "ragged"):
        found = [line for line in lines if line[:1] == [name]]
        assert len(found) == 2
        kept = [36 * 2 * 8 * 40 / 8, *(int(line[1]) for line in lines if line[:1] == ["ragged"])][::2]
        for (_, slots, _, useful, *_), held in zip(found, kept, strict=True):
            assert int(slots) * float(useful) == pytest.approx(held, rel=0.02)
    assert [line[-2:] for line in lines if line[:1] == ["ragged"]] == 2 * [["1.00", "1.00"]]
