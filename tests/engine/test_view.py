"""What a method is shown: every function of a view against explicit sums over ragged caches with grouped queries."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from tests.support.engine import D, DrawnPerSequence, draw_seen, open_cache, run, small, tokens_of

SEQUENCES = 2


@dataclass
class Looking(DrawnPerSequence):
    """Keeps what a table says, other tokens in every sequence, and calls a function on every view."""

    look: Callable[[View], None] = field(kw_only=True)

    uses = Uses(last_segment=True, previous_keys=True)

    def keep(self, view: View) -> Tensor:
        """Slots that the next segment sees: of every second sequence the table's, of the others also the even ones."""
        self.look(view)
        if view.segment.last:
            return view.position >= 0
        table = self.seen[view.segment.index + 1, view.layer].repeat(view.sequences, 1)
        kept = table.gather(1, view.position.clamp(min=0))
        odd = (torch.arange(len(kept)) // view.heads % 2).bool()[:, None]
        return kept & ~(odd & (view.position % 2 == 1))


class Truth:
    """What was given to the cache, asked for by row and position."""

    def __init__(self, seed: int, groups: int) -> None:
        self.spec = small(sides=(1, 2, 3, 4), scale=0.6)
        self.groups, self.given = groups, tokens_of(self.spec, SEQUENCES, seed, groups)
        plain = tokens_of(self.spec, SEQUENCES, seed + 1, groups)
        self.plain = [[q for q, _, _ in layers] for layers in plain]
        self.inputs = [
            [(*qkv, lambda k=k, layer=layer: self.plain[k][layer]) for layer, qkv in enumerate(layers)]
            for k, layers in enumerate(self.given)
        ]

    def queries(self, view: View, row: int, plain: bool = False) -> Tensor:
        """[groups, tokens, D] float64."""
        source = self.plain if plain else [[q for q, _, _ in layers] for layers in self.given]
        q = source[view.segment.index][view.layer].double()
        head = row % view.heads * self.groups
        return q[row // view.heads, head : head + self.groups]

    def key(self, view: View, row: int, position: int) -> Tensor:
        """[D] float64; zeros for an empty slot."""
        if position < 0:
            return torch.zeros(D, dtype=torch.float64)
        at = max((s for s in self.spec.segments if s.start <= position), key=lambda s: s.index)
        k = self.given[at.index][view.layer][1]
        return k[row // view.heads, row % view.heads, position - at.start].double()

    def scores(self, view: View, row: int, plain: bool = False) -> Tensor:
        """[groups, tokens, slots] float64, -inf where a slot is empty."""
        scale = D**-0.5 if plain else self.spec.logit_scale
        keys = torch.stack([self.key(view, row, p) for p in view.position[row].tolist()])
        found = self.queries(view, row, plain) @ keys.T * scale
        return found.masked_fill(view.position[row] < 0, -torch.inf)


Check = Callable[[Truth, View, int], None]


def rows_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def check_mass(truth: Truth, view: View, row: int) -> None:
    paid = truth.scores(view, row).softmax(-1)
    rows_close(view.mass()[row], paid.mean((0, 1)))
    some = chosen(view.segment)
    rows_close(view.mass(some)[row], paid[:, some].mean((0, 1)))


def check_scores(truth: Truth, view: View, row: int) -> None:
    some = chosen(view.segment)
    rows_close(view.scores(some)[row], truth.scores(view, row)[:, some])


def check_logits(truth: Truth, view: View, row: int) -> None:
    some = chosen(view.segment)
    for plain in (False, True):
        expected = truth.scores(view, row, plain)[:, some].sum((0, 1))
        rows_close(view.logits(some, raw_queries=plain)[row], expected)


def check_keys(truth: Truth, view: View, row: int) -> None:
    at, spec = view.segment, truth.spec
    rows_close(view.keys()[row], torch.stack([truth.key(view, row, p) for p in range(at.start, at.end)]))
    slots = view.position[row].tolist()
    rows_close(view.cached_keys()[row], torch.stack([truth.key(view, row, p) for p in slots]))
    if at.index:
        before = spec.segments[at.index - 1]
        expected = torch.stack([truth.key(view, row, p) for p in range(before.start, before.end)])
        rows_close(view.previous_keys()[row], expected)


def check_slots(truth: Truth, view: View, row: int) -> None:
    exists = view.position[row] >= 0
    slots = view.position[row][exists].tolist()
    assert slots == sorted(set(slots))
    assert slots[-view.segment.length :] == list(range(view.segment.start, view.segment.end))
    for slot, source in zip(view.position[row].tolist(), view.segment_ids[row].tolist(), strict=True):
        at = truth.spec.segments[source] if source >= 0 else None
        assert (slot < 0) if at is None else (at.start <= slot < at.end)


def chosen(at: Segment) -> Tensor:
    return torch.arange(0, at.length, 2)


CHECKS: list[Check] = [check_slots, check_mass, check_scores, check_logits, check_keys]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@given(seed=st.integers(0, 10**6), share=st.sampled_from((0.0, 0.3, 0.8, 1.0)), groups=st.integers(1, 2))
@settings(max_examples=6, deadline=None)
def test_a_view_shows_what_was_given(check: Check, seed: int, share: float, groups: int) -> None:
    truth = Truth(seed, groups)
    seen: list[bool] = []

    def look(view: View) -> None:
        for row in range(len(view.position)):
            check(truth, view, row)
        seen.append(bool((view.position < 0).any()))

    method = Looking(draw_seen(truth.spec, seed, share), look=look)
    run(open_cache(method, truth.spec), truth.inputs)
    assert len(seen) == truth.spec.layers * len(truth.spec.segments)
    assert any(seen) or share in (0.0, 1.0)  # some rows were shorter than others


@dataclass
class Marking(Method):
    """Writes every slot's own number into its state, and keeps some slots at random."""

    seed: int

    uses = Uses(state=1)

    def __post_init__(self) -> None:
        self.generator, self.checked = torch.Generator().manual_seed(self.seed), 0

    def keep(self, view: View) -> Tensor | None:
        """Random slots, or all of them in every third layer."""
        row = torch.arange(len(view.position))[:, None]
        own = 1 + view.position + 1000 * row + 100_000 * view.layer
        known = (view.position >= 0) & (view.position < view.segment.start)
        new = view.position >= view.segment.start
        assert torch.equal(view.state[known], own[known].float())
        assert (view.state[~known] == 0).all()
        view.state[new] = own[new].float()
        self.checked += int(known.sum())
        if (view.layer + view.segment.index) % 3 == 0:
            return None
        return torch.rand(view.position.shape, generator=self.generator) < 0.6


@given(seed=st.integers(0, 10**6), sequences=st.sampled_from((1, 2, 4)))
@settings(max_examples=25, deadline=None)
def test_state_moves_with_the_slots_that_are_kept(seed: int, sequences: int) -> None:
    spec = small(layers=3, sides=(1, 2, 3, 2, 4))
    method = Marking(seed)
    cache = open_cache(method, spec)
    for _ in range(2):
        run(cache, tokens_of(spec, sequences, seed))
    assert method.checked > 0
    assert cache.ledger.state_bytes > 0


FIRST = torch.tensor([0])
LOOKS = ("mass", "keys", "values", "cached_keys", "previous_keys", "value_norms", "value_ranges")
REFUSALS: list[tuple[str, tuple[object, ...], bool, str]] = [
    *((name, (), True, "set `static = False`") for name in LOOKS),
    *((name, (FIRST,), True, "set `static = False`") for name in ("scores", "queries", "logits")),
    ("previous_keys", (), False, "set `previous_keys` in `uses`"),
    ("read_back", (FIRST, FIRST, small().segments[0], 4), False, "set `codebooks` in `uses`"),
]
"""A view's function, its arguments, whether the method is static, and the remedy."""


@pytest.mark.parametrize(("question", "arguments", "fixed", "told"), REFUSALS)
def test_what_a_method_may_not_see_or_is_not_there_is_told(
    question: str, arguments: tuple[object, ...], fixed: bool, told: str
) -> None:
    class Asking(Method):
        static = fixed

        def keep(self, view: View) -> None:
            getattr(view, question)(*arguments)

    with pytest.raises(ValueError, match=told):
        run(open_cache(Asking(), small()), tokens_of(small(), 2))
