"""Shapes and dtypes that the engine requires of a method's hooks, and protected slots that do not fit."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.methods.first_scales import FirstScales
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.hook_results import WrongTensor
from kvbench.methods.shared.scored import AdaptiveHeads, Scored
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.tova import TOVA
from kvbench.runs import execute
from tests.support.engine import open_cache, run, small, tokens_of, watch
from tests.support.fake_run import job_in

SPEC = small(heads=2)
Change = Callable[[Tensor], Any]
PLACE = "layer 1, segment 2: "


def show_at_place(view: View, right: Tensor, change: Change) -> Any:
    return change(right) if view.layer == 1 and view.segment.index == 2 else right


def call_changed(hook: Callable[..., Tensor], change: Change, view: View, *more: Any) -> Any:
    return show_at_place(view, hook(view, *more), change)


class Reads(Method):
    """Keep and read everything, as a mask."""

    uses = Uses(sparse_reads=True)

    def keep(self, view: View) -> None:
        return None

    def select_attended(self, view: View) -> Tensor:
        return view.position >= 0


CHANGES: list[Change] = [
    lambda right: right[:, :1], lambda right: right[:1], lambda right: right[None], lambda right: right.long(),
    lambda right: right.tolist(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "hook", "wanted"),
    [
        (TOVA, "score", "[rows, slots] = [4, 14], floating-point"),
        (SnapKV, "score_outside", "[rows, slots] = [4, 14], floating-point"),
        (FirstScales, "keep", "[heads, slots] = [2, 14], bool"),
        (TOVA, "keep", "[rows, slots] = [4, 14], bool"),
        (Reads, "select_attended", "[rows, slots] = [4, 14], bool"),
    ],
)
def test_a_hook_that_returns_a_wrong_shape_or_dtype_ends_the_run(
    kind: Callable[[], Method], hook: str, wanted: str
) -> None:
    """A static method decides for one sequence."""
    for change in CHANGES:
        method = kind()
        setattr(method, hook, partial(call_changed, getattr(method, hook), change))
        told = re.escape(f"{PLACE}{hook} returned ") + ".*return .*" + re.escape(wanted)
        with pytest.raises(WrongTensor, match=f"^method=.*: {told}$"):
            run(open_cache(method, SPEC, 1 if kind is Reads else 0.5), tokens_of(SPEC, 2))


def test_what_no_view_has_is_told_in_one_line() -> None:
    class Curious(Method):
        def keep(self, view: View) -> Any:
            return show_at_place(view, view.position >= 0, lambda _: view._cache)

    with pytest.raises(UserError, match=rf"^method=Curious: {PLACE}a View has no _cache; kvbench/"):
        run(open_cache(Curious(), SPEC, 1), tokens_of(SPEC, 2))


@dataclass(kw_only=True)
class Protecting(Scored):
    """Protect every slot of even position from segment 1 on; a row has fewer slots."""

    def score(self, view: View) -> Tensor:
        protected = (view.position % 2 == 0) & (view.segment.index > 0)
        return torch.where(protected, torch.inf, view.mass())


@dataclass(kw_only=True)
class ProtectingAmongHeads(AdaptiveHeads, Protecting):
    """The same while heads compete."""


@pytest.mark.parametrize("kind", [Protecting, ProtectingAmongHeads])
def test_protected_slots_that_do_not_fit_are_counted_per_sequence(kind: type[Scored]) -> None:
    cache, asked, _ = watch(kind(), SPEC, tokens_of(SPEC, 2), 0.3)
    expected = torch.zeros(2, dtype=torch.int64)
    for one in asked[SPEC.layers :]:
        dropped = (one.position >= 0) & (one.position % 2 == 0) & ~one.kept
        expected += dropped.view(2, -1).sum(1)
    cache.ledger.read_unprotected(SPEC.heads)
    assert cache.ledger.unprotected == expected.tolist()
    assert expected.min() > 0


def test_a_run_reports_protected_slots_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_in(tmp_path, count=4, method=Protecting(), budget=0.4)
    with caplog.at_level(logging.WARNING):
        outcome = execute.run(job)
        assert execute.run(job).reused
    records = [json.loads(line) for line in (outcome.folder / "samples.jsonl").read_text().splitlines()]
    drops = sum(record["protected_drops"] for record in records)
    assert outcome.results is not None
    assert outcome.results.memory.protected_drops == drops > 0
    assert len([message for message in caplog.messages if "+inf" in message]) == 1
    plain = execute.run(job_in(tmp_path, count=4, method=TOVA(), budget=0.4))
    assert "protected_drops" not in (plain.folder / "samples.jsonl").read_text()
