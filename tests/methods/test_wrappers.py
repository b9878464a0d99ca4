"""Methods around other methods: every wrapper with several bases, and what changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.adakv import AdaKV
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.critical import Critical
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.merging.method import D2O, CaM, LookM, MergingPress
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.wrapper import Wrapper
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.triattention import QueryCentres, TriAttention
from tests.support.engine import Watched, note_calls, tokens_of, watch
from tests.support.small_models import composed

SCALES = ModelSpec("scales", 3, 2, 8, next_scale([(side, side) for side in (1, 2, 3, 4, 5)]))
LINES = ModelSpec("lines", 3, 2, 8, next_token(5, [6] * 6))


def give(method: Method, spec: ModelSpec, seed: int = 0, budget: str = "0.4") -> Watched:
    return watch(method, spec, tokens_of(spec, 4, seed, groups=2), budget)


@pytest.mark.parametrize(
    "method",
    [
        LookM(base=AdaKV()),
        MergingPress(base=H2O()),
        CaM(base=ChunkKV(base=SnapKV(), chunk=2)),
        D2O(base=SnapKV(refresh=2)),
        Critical(base=HardKV(window=4, select="top_k", calibration="none")),
        ChunkKV(base=H2O(), chunk=3),
    ],
    ids=repr,
)
def test_wrappers_go_around_bases_of_every_kind(method: Wrapper) -> None:
    found, expected = give(method, LINES), give(method.base, LINES)
    assert found.cache.ledger.peak_tokens <= method.budget.capacity
    assert found.cache.ledger.peak_bytes <= float(method.budget.capacity) * 2 * 8 * 4 * 4
    assert all(torch.isfinite(one).all() for one in found.out)
    assert [int(one.kept.sum()) for one in found.asked] == [int(one.kept.sum()) for one in expected.asked]


@pytest.mark.parametrize(
    ("method", "base"),
    [
        (LookM(base=H2O(), how="none"), H2O()),
        (Critical(base=AdaKV(), first=1.0), AdaKV()),
        (MergingPress(base=SnapKV(), threshold=1.0), SnapKV()),
    ],
)
def test_what_changes_nothing_is_the_base_bit_for_bit(method: Method, base: Method) -> None:
    found, expected = give(method, LINES), give(base, LINES)
    assert [one.ids() for one in found.asked] == [other.ids() for other in expected.asked]
    for one, other in zip(found.out, expected.out, strict=True):
        assert torch.equal(one, other)


def test_a_wrapper_needs_and_has_what_its_base_has() -> None:
    method = instantiate(
        composed("method=lookm", "method@method.base=hackpp", "method.base.attention_budget=0.5").method
    )
    assert isinstance(method, LookM)
    assert method.needs() == method.base.needs()
    assert method.uses == replace(method.base.uses, replaces=True)
    assert method.uses.sparse_reads
    assert method.revision == method.base.revision
    assert method.sinks == method.base.sinks
    assert not LookM(base=SnapKV(), filter="rank_mean").heads_independent
    assert LookM(base=SnapKV()).heads_independent
    assert not LookM(base=AdaKV()).heads_independent


def test_a_wrapper_forwards_joint_decisions_and_observed_queries() -> None:
    base = TriAttention(shared="layers", sinks=1, horizon=16)
    wrapped = Critical(base=base)
    found = watch(wrapped, LINES, tokens_of(LINES, 4), "0.6", QueryCentres().make_random_artifact(LINES))
    assert found.cache.ledger.peak_tokens <= wrapped.budget.capacity
    noted = Critical(base=HardKV(window=4, select="top_k", calibration="none", queries=4, watch_lse=True))
    drift = give(noted, LINES).cache.ledger.lse_drift
    assert drift is not None
    assert drift < 0


KNOWN = torch.rand(7, 7, generator=torch.Generator().manual_seed(0))


def test_between_two_times_old_scores_count_and_the_newest_stay() -> None:
    """Against a loop: a slot's score is that of its last time, and those that came since leave last."""
    method, refresh = Tracked(refresh=3), 3
    seen = give(method, LINES)
    room = method.budget.head_tokens
    for asked in seen.asked:
        if asked.layer or (asked.position >= 0).sum(1).max() <= room:
            continue
        last = asked.scale if asked.scale < 2 else 1 + (asked.scale - 1) // refresh * refresh
        scores = KNOWN[last].tolist()
        for position, kept in zip(asked.position.tolist(), asked.kept.tolist(), strict=True):
            row = [(p > LINES.segments[last].end - 1, p, scores[p % 7]) for p in position]
            best = sorted(row, key=lambda x: (x[0], x[1] if x[0] else x[2], -x[1]), reverse=True)[: sum(kept)]
            assert {p for _, p, _ in best} == {p for p, k in zip(position, kept, strict=True) if k}


class Tracked(Scored):
    """Scores by a table that changes from segment to segment."""

    def score(self, view: Any) -> Tensor:
        """Return what the table says of the position."""
        return KNOWN[view.segment.index][view.position.clamp(min=0) % 7]


def test_a_moving_average_begins_with_the_first_score() -> None:
    method = Tracked(ema=0.75)
    calls = note_calls(method, "smoothed_scores")
    give(method, LINES, budget="1")
    states = [state for view, state in calls if not view.layer]
    assert len(states) == len(LINES.segments) - 1
    for index, state in enumerate(states):
        for segment in LINES.segments[: index + 1]:
            scores = KNOWN[:, torch.arange(segment.start, segment.end) % 7]
            expected = scores[segment.index]
            for later in range(segment.index + 1, index + 1):
                expected = 0.75 * expected + 0.25 * scores[later]
            found = state[:, segment.start : segment.end]
            torch.testing.assert_close(found, expected.expand(8, -1))


def test_heads_of_a_text_shorter_than_a_chunk_keep_what_they_keep_under_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ModelSpec("text", 1, 2, 8, next_token(6, [3, 2]), 1)
    table = torch.tensor([[9.0, 8, 7, 0, 0, 0, -1, -1, -1], [0, 0, 0, 7, 8, 9, -1, -1, -1]])
    inputs, base = tokens_of(spec, 1), Tracked()
    monkeypatch.setattr(base, "score", lambda view: table.gather(1, view.position))
    for chunk, expected in ((20, [[0, 1, 2], [3, 4, 5]]), (6, [[0, 1, 5], [0, 1, 5]])):
        asked = watch(ChunkKV(base=base, chunk=chunk), spec, inputs, 3).asked
        assert asked[0].ids() == expected
