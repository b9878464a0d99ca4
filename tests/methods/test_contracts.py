"""Shapes and dtypes that the engine requires of a method's hooks, and protected slots that do not fit."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.methods.adakv import AdaKV
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
WRONG: dict[str, tuple[Change, str]] = {
    "one column": (lambda right: right[:, :1], "[{rows}, 1], {dtype}"),
    "one row": (lambda right: right[:1], "[1, 14], {dtype}"),
    "one more dimension": (lambda right: right[None], "[1, {rows}, 14], {dtype}"),
    "transposed": (lambda right: right.T, "[14, {rows}], {dtype}"),
    "whole numbers": (lambda right: right.long(), "[{rows}, 14], int64"),
    "a list": (lambda right: right.tolist(), "list"),
}
PLACE = "layer 1, segment 2: "


def show_at_place(view: View, right: Tensor, change: Change) -> Any:
    return change(right) if view.layer == 1 and view.segment.index == 2 else right


def make_wrong(hook: str, change: Change) -> Method:
    """A method whose hook returns something else at one place."""

    class Wrong(TOVA):
        def score(self, view: View) -> Tensor:
            return show_at_place(view, super().score(view), change)

    class WrongOutside(SnapKV):
        def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
            return show_at_place(view, super().score_outside(view, chosen, inside), change)

    class WrongMask(Method):
        def keep(self, view: View) -> Tensor:
            return show_at_place(view, view.position >= 0, change)

    class WrongSchedule(WrongMask):
        static: ClassVar[bool] = True

    class WrongReads(Method):
        uses = Uses(sparse_reads=True)

        def keep(self, view: View) -> None:
            return None

        def select_attended(self, view: View) -> Tensor:
            return show_at_place(view, view.position >= 0, change)

    kinds = {"score": Wrong, "score_outside": WrongOutside, "select_attended": WrongReads}
    return ({"keep": WrongMask, "keep once": WrongSchedule} | kinds)[hook]()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("hook", ["score", "score_outside", "keep", "keep once", "select_attended"])
def test_a_hook_that_returns_a_wrong_shape_or_dtype_ends_the_run(hook: str, name: str) -> None:
    """A static method decides for one sequence."""
    change, found = WRONG[name]
    scores, rows = hook.startswith("score"), 2 if hook == "keep once" else 4
    budget = 0.5 if scores else 1
    method = make_wrong(hook, change)
    with pytest.raises(WrongTensor) as caught:
        run(open_cache(method, SPEC, budget), tokens_of(SPEC, 2))
    dtype = "float32" if scores else "bool"
    returned = f"{hook.split()[0]} returned {found.format(rows=rows, dtype=dtype)}; return "
    assert str(caught.value).startswith(f"method={method.title}: {PLACE}{returned}")
    names = "[heads, slots]" if hook == "keep once" else "[rows, slots]"
    wanted = "floating-point" if scores else "bool"
    assert str(caught.value).endswith(f"{names} = [{rows}, 14], {wanted}")


@pytest.mark.parametrize(
    ("read", "kind", "message"),
    [
        (lambda view: view._cache, UserError, rf"^method=Curious: {PLACE}a View has no _cache; kvbench/"),
        (lambda view: view.position.cache, AttributeError, "'Tensor' object has no attribute 'cache'"),
    ],
)
def test_only_what_no_view_has_is_told_in_one_line(
    read: Callable[[View], Any], kind: type[Exception], message: str
) -> None:
    class Curious(Method):
        def keep(self, view: View) -> Any:
            return show_at_place(view, view.position >= 0, lambda _: read(view))

    with pytest.raises(kind, match=message):
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


@pytest.mark.parametrize("method", [SnapKV(sinks=1), AdaKV(sinks=1), TOVA(sinks=1)])
def test_windows_and_sinks_that_fit_are_not_reported(method: Method) -> None:
    cache = watch(method, SPEC, tokens_of(SPEC, 2), 0.5).cache
    cache.ledger.read_unprotected(SPEC.heads)
    assert not any(cache.ledger.unprotected)


def test_a_run_reports_protected_slots_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_in(tmp_path, count=4, method=Protecting(), budget=0.4)
    with caplog.at_level(logging.WARNING):
        outcome = execute.run(job)
        assert execute.run(job).reused
    records = [json.loads(line) for line in (outcome.folder / "samples.jsonl").read_text().splitlines()]
    drops = sum(record["protected_drops"] for record in records)
    assert outcome.results is not None
    assert outcome.results.memory.protected_drops == drops > 0
    [message] = [message for message in caplog.messages if "+inf" in message]
    assert f"more +inf than slots: in 4 of 4 samples {drops} slots" in message
    plain = execute.run(job_in(tmp_path, count=4, method=TOVA(), budget=0.4))
    assert "protected_drops" not in (plain.folder / "samples.jsonl").read_text()
