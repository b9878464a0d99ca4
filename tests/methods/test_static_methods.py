"""Methods that look at positions alone: HeatKV does what its schedule says, and groups of scales are left out."""

import pytest
import torch

from kvbench.methods.heatkv.method import BinaryHeatKV, HeatKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.scale_groups import ScaleGroups
from tests.support.engine import small, tokens_of, watch

SPEC = small(layers=4, sides=(1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize("method", [HeatKV(2), HeatKV(2, naive=True), BinaryHeatKV(2)])
def test_heatkv_keeps_what_its_schedule_says(method: HeatKV) -> None:
    artifact = AttentionByScale().make_random_artifact(SPEC)
    cache, schedule = watch(method, SPEC, tokens_of(SPEC, 2), "0.25", artifact).cache, method.schedule
    # The cache moves on to the next scale's state as soon as a layer ran, so only whole scales compare.
    held = torch.tensor(cache.ledger.tokens_after)
    assert (held <= torch.from_numpy(schedule.cached_after)).all()
    lengths = torch.tensor(SPEC.lengths)
    for k in range(1, len(SPEC.segments)):
        present = ~torch.from_numpy(schedule.absent[k, :k])
        assert held[k - 1, -1] == (present.sum((1, 2)) * lengths[:k]).sum()
    assert schedule.absent.any()


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        ("none", {0, 1, 2, 3, 4}), ("condensed", {2, 3, 4}), ("intermediate", {0, 1, 3, 4}),
        ("local", {0, 1, 2}), ("all", set()),
    ],
)  # fmt: skip
def test_scale_groups_leave_one_group_out(remove: str, left: set[int]) -> None:
    seen = watch(ScaleGroups(remove), SPEC, tokens_of(SPEC, 2)).asked
    for asked in seen:
        expected = [
            p for s in SPEC.segments[: asked.scale + 1] if s.index in left for p in range(s.start, s.end)
        ]
        assert asked.ids() == [expected] * len(asked.position)
    assert len(seen) == SPEC.layers * 5
