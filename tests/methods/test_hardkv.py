"""Hard-KV: temperatures, baselines and masks of the authors' programs, what a slow reference keeps, Problem 1."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.hardkv.calibration import (
    GRADIENT_RANGE,
    Calibration,
    Selector,
    mark_top_p,
    pool_scores,
    solve_temperatures,
    weigh_redundancy,
)
from kvbench.methods.hardkv.method import HardKV, Select
from kvbench.methods.hardkv.official import rank_rewritten, select_sparse, weigh_slots
from kvbench.methods.shared.redundancy import measure_redundancy
from tests.support.engine import Asked, tokens_of, watch
from tests.support.goldens import load_golden

P = 0.9
SPEC = ModelSpec("text", 2, 2, 8, next_token(10, [16, 16, 16, 4]), branches=1, logit_scale=8**-0.5)
ASKS, LATEST, KERNEL, MIX = 6, 5, 3, 0.07
Tokens = Sequence[Sequence[tuple[Tensor, ...]]]
TEMPERATURES = load_golden("hardinfer_temperature")
QUERIES = TEMPERATURES["logits"].view(64, 1, 160)
"""Scores of the temperatures' reference: each query is a row of its own."""


POOLED = F.max_pool1d(QUERIES, 7, 1, 3)
MIXED = (TEMPERATURES["rkv_shifted_probs"] + 1e-10).log().view(64, 1, 160)
NEEDED = mark_top_p(QUERIES.softmax(-1), P).sum(-1)


def test_counts_and_temperatures_are_the_programs() -> None:
    """By bisection; the released solver leaves one half."""
    g = TEMPERATURES
    assert torch.equal(NEEDED[:, 0], g["topp_count_raw"])
    assert torch.equal(mark_top_p(POOLED.softmax(-1), P).sum(-1)[:, 0], g["topp_count_maxpool7_T1"])
    for scores, kind in ((POOLED, "ref_maxpool"), (MIXED, "ref_rkv_logprob")):
        padded = F.pad(scores, (0, 3), value=-torch.inf)  # slots that no query sees
        found = solve_temperatures(padded, NEEDED, P, "bisection")
        torch.testing.assert_close(found.double(), g[f"{kind}.T"], rtol=1e-4, atol=1e-6)
    for kind in ("gd_maxpool", "gd_linear_rkv"):
        found = solve_temperatures(POOLED, NEEDED, P, "official")
        torch.testing.assert_close(found, g[f"{kind}.T_official"])


def test_the_gradient_comes_near_where_there_is_a_root() -> None:
    scores, counts = F.pad(MIXED, (0, 3), value=-torch.inf), NEEDED
    with torch.inference_mode():
        found = solve_temperatures(scores, counts, P, "gradient")
        alone = solve_temperatures(scores[:3], counts[:3], P, "gradient")
    torch.testing.assert_close(found[:3], alone)  # a head does not depend on the others
    mass = (scores[:, 0] / found[:, None]).softmax(-1).sort(-1, descending=True).values
    reached = torch.stack([row[:count].sum() for row, count in zip(mass, counts[:, 0], strict=True)])
    assert (reached - P).abs().max() < 0.02
    assert ((found >= GRADIENT_RANGE[0]) & (found <= GRADIENT_RANGE[1])).all()


def score_slowly(
    selector: Selector, q: Tensor, k: Tensor, positions: list[int], end: int
) -> tuple[Tensor, Tensor]:
    """Return the last queries' scores of `positions`, raw and as a selector makes them, [ASKS, slots] each.

    `q` [query heads, tokens, 8] belongs to one KV head, whose keys are `k` [tokens, 8], `end` of them so far.
    """
    raw = []
    for asking in range(end - ASKS, end):
        scores = torch.stack([(q[:, asking] @ k[at]).max() * 8**-0.5 for at in positions])
        scores[torch.tensor(positions) > asking] = -torch.inf
        raw.append(scores)
    return torch.stack(raw), torch.stack([alter_slowly(selector, scores, k, positions) for scores in raw])


def alter_slowly(selector: Selector, scores: Tensor, k: Tensor, positions: list[int]) -> Tensor:
    """What a selector makes of the scores [slots] of one query."""
    if selector == "snapkv":
        return torch.stack([scores[max(0, i - 1) : i + 2].max() for i in range(len(positions))])
    if selector == "rkv":
        repeated = measure_redundancy(k[positions][None], torch.ones(1, len(positions)).bool(), 0.5, 1)[0]
        mixed = MIX * scores.softmax(0) - (1 - MIX) * repeated
        mixed = mixed - mixed.min()
        return (mixed / mixed.sum() + 1e-10).log()
    return scores


def expected_marks(
    selector: Selector, q: Tensor, k: Tensor, positions: list[int], end: int, temperature: float | None
) -> tuple[Tensor, float]:
    """Which of `positions` each of the last queries marks, [ASKS, slots], and the head's temperature.

    The arguments are the same as of `score_slowly`; `temperature` is None before the first call.
    """
    raw, changed = score_slowly(selector, q, k, positions, end)
    counts = torch.tensor([int(mark_top_p(scores.softmax(0), P).sum()) for scores in raw])
    if temperature is None:
        temperature = float(solve_temperatures(changed[None], counts[None], P, "bisection"))
    return torch.stack([mark_top_p((scores / temperature).softmax(0), P) for scores in changed]), temperature


class Row(NamedTuple):
    """A row that was asked: its layer and number, q [query heads, tokens, 8], k [tokens, 8], slots before and after."""

    place: tuple[int, int]
    q: Tensor
    k: Tensor
    shown: list[int]
    kept: list[int]


def rows_of(seen: Sequence[Asked], inputs: Sequence[Sequence[tuple[Tensor, ...]]]) -> Iterator[Row]:
    """Yield the rows of all layers and segments, each with all its queries and keys so far."""
    for asked in seen:
        q, k = (
            torch.cat([segment[asked.layer][n] for segment in inputs[: asked.scale + 1]], 2) for n in (0, 1)
        )
        for row, (position, kept) in enumerate(zip(asked.position.tolist(), asked.ids(), strict=True)):
            sequence, head = divmod(row, 2)
            shown = [at for at in position if at >= 0]
            yield Row(
                (asked.layer, row), q[sequence, 2 * head : 2 * head + 2], k[sequence, head], shown, kept
            )


@pytest.mark.parametrize("selector", ["vanilla", "snapkv", "rkv"])
def test_what_a_query_marked_stays_and_nothing_else(selector: Selector) -> None:
    method = HardKV(selector=selector, queries=ASKS, window=LATEST, kernel=KERNEL, start=0.5)
    inputs = tokens_of(SPEC, 2, groups=2)
    seen = watch(method, SPEC, inputs, 40).asked
    temperatures: dict[tuple[int, int], float] = {}
    dropped = 0
    for place, q, k, shown, kept in rows_of(seen, inputs):
        if len(shown) <= 20:  # half of the 40 tokens that B gives a head
            assert kept == shown
            continue
        marks, temperatures[place] = expected_marks(selector, q, k, shown, len(k), temperatures.get(place))
        wanted = [at for at, mark in zip(shown, marks.any(0), strict=True) if mark]
        wanted = sorted({*wanted, *shown[-LATEST:]})
        dropped += len(shown) - len(kept)
        assert len(kept) <= 40
        if len(wanted) <= 40:
            assert kept == wanted
        else:
            assert set(kept) <= set(wanted)
    assert dropped > 0


def test_means_count_beside_a_hundred_votes() -> None:
    spec = ModelSpec("prompt", 1, 2, SPEC.head_dim, next_token(200, [1, 1]))
    inputs = [
        [tuple(x * 1e-2 for x in layer) for layer in segment] for segment in tokens_of(spec, 1)
    ]  # every slot has all votes, their means lie close
    kept = []
    for select in ("votes", "top_k"):
        method = HardKV("vanilla", select, p=1.0, calibration="none", window=8, sinks=0)  # type: ignore[arg-type]
        kept.append(watch(method, spec, inputs, 60).asked[0].ids())
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("settings", "budget", "kept"),
    [
        ({"select": "votes"}, 8, [0, 1, 2, 3, 4, 5, 8, 9]),
        ({"select": "top_p", "p": 1.0, "start": 0.0}, 6, [1, 2, 3, 4, 8, 9]),  # the window beside four others
    ],
)
def test_the_most_voted_or_marked_stay_and_the_latest_of_equals(
    settings: dict[str, Any], budget: int, kept: list[int]
) -> None:
    """All keys are one, so no query prefers any: tokens 0 to 4 are seen by all six queries, later ones by fewer."""
    method = HardKV(selector="vanilla", queries=ASKS, window=2, calibration="none", **settings)
    same = [
        [(torch.ones_like(q), torch.ones_like(k), v) for q, k, v in segment] for segment in tokens_of(SPEC, 1)
    ]
    assert watch(method, SPEC, same, budget).asked[0].ids() == [kept] * 2


@pytest.mark.parametrize(
    ("selector", "select", "calibration", "room"),
    [("vanilla", "top_p", "none", 6), ("vanilla", "votes", "none", 5), ("rkv", "top_k", "bisection", 5)],
)
def test_queries_of_padding_do_not_vote(
    selector: Selector, select: Select, calibration: Calibration, room: int
) -> None:
    """A text behind 4 tokens of padding keeps what it keeps alone, though all tokens of the prompt vote."""
    spec = replace(SPEC, padding_counts=False)
    alone = replace(spec, segments=next_token(6, [16, 16, 16, 4]))
    inputs = [[(6 * q, k, v) for q, k, v in layers] for layers in tokens_of(spec, 2, groups=2)]
    own = [
        [tuple(x[1:] if at else x[1:, :, 4:] for x in qkv) for qkv in layers]
        for at, layers in enumerate(inputs)
    ]

    def kept(spec: ModelSpec, inputs: Tokens, padding: list[int]) -> list[Asked]:
        method = HardKV(selector, select, p=0.1, queries=128, window=1, start=0.0, calibration=calibration)
        return watch(method, spec, inputs, room, padding=padding).asked

    found, expected = kept(spec, inputs, [0, 4]), kept(alone, own, [0])
    for asked, other in zip(found, expected, strict=True):
        assert [[at - 4 for at in ids] for ids in asked.ids()[2:]] == other.ids()
    assert min(len(ids) for ids in expected[0].ids()) < 6  # the prompt lost something


def test_a_text_has_the_temperature_of_its_own_first_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text drops tokens after its prompt, the other one, behind padding, a segment later."""
    calls = [0]

    def solve(scores: Tensor, *_: object) -> Tensor:
        calls[0] += 1
        return scores.new_full((len(scores),), float(calls[0]))

    monkeypatch.setattr("kvbench.methods.hardkv.method.solve_temperatures", solve)
    spec = replace(SPEC, layers=1, padding_counts=False)
    method = HardKV(queries=ASKS, window=LATEST, kernel=KERNEL, start=0.5)
    # Half of the budget, 8 tokens, a head may hold before it drops any.
    watch(method, spec, tokens_of(spec, 2, groups=2), 16, padding=[0, 4])
    assert method._temperatures[0].tolist() == [1.0, 1.0, 2.0, 2.0]


# The released program

BUDGET = 80
GOLDEN = load_golden("hardinfer_base", "hardinfer_topp")
SELECTORS: tuple[Selector, ...] = ("vanilla", "snapkv", "rkv")


def weigh(selector: Selector, attended: Tensor, *, averaged: bool) -> Tensor:
    """Probabilities of the golden's heads; tokens that are not attended still lie in their slots."""
    keys = GOLDEN["K"][0]
    raw = GOLDEN["scores_max_over_group"][0].masked_fill(~GOLDEN["effective_mask"][:, None], -torch.inf)
    stored = torch.ones_like(attended)

    def alter(scores: Tensor) -> Tensor:
        if selector == "vanilla":
            return scores
        if selector == "snapkv":
            return pool_scores(scores, stored, 7)
        return weigh_redundancy(scores, stored, measure_redundancy(keys, stored, 0.5, 1), 0.07)

    return weigh_slots(raw, alter, selector, attended, averaged=averaged)


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("selector", SELECTORS)
def test_sparse_masks_are_the_programs(selector: Selector, call: int) -> None:
    """R-KV's first call gives slots that are not attended a probability too."""
    attended = GOLDEN["effective_mask"]
    if selector == "rkv" and not call:
        attended = torch.ones_like(attended)
    window = 31 if selector == "vanilla" else 32
    probabilities = weigh(selector, attended, averaged=True)[:, 0]
    found = select_sparse(probabilities, P, BUDGET - window - 1, window)
    assert torch.equal(found, GOLDEN[f"sparse.{selector}.call{call}.selected_mask"])


@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("selector", SELECTORS)
def test_rewritten_slots_are_the_programs(selector: Selector, size: int) -> None:
    attended = GOLDEN["effective_mask"]
    first = torch.ones_like(attended) if selector == "rkv" else attended
    marked = mark_top_p(weigh(selector, first, averaged=False), P).any(1)
    written = rank_rewritten(marked, attended, 32).argsort(1)[:, :size]
    assert torch.equal(written.T, GOLDEN[f"rewrite{size}.{selector}.kept_ids"].long())


def expected_sparse(selector: Selector, q: Tensor, k: Tensor, held: list[int], end: int) -> list[int]:
    """What the sparse classes keep of a head, one head, loops; half of 24 tokens are taken whatever their mass."""
    raw, changed = score_slowly(selector, q, k, held, end)
    temperature = 1.0 if selector == "vanilla" else 0.5
    if selector == "rkv":
        changed = alter_slowly("rkv", raw.softmax(1).mean(0).log(), k, held)[None]
    mean = (changed / temperature).softmax(1).mean(0)
    forced = {0, *range(len(held) - LATEST, len(held))}
    marked = mark_top_p(mean, P).nonzero().flatten().tolist()
    wanted = {*marked, *mean.topk(12 - LATEST - 1).indices.tolist()} - forced
    best = sorted(wanted, key=lambda slot: (-float(mean[slot]), -slot))[: 24 - len(forced)]
    return sorted(held[slot] for slot in {*forced, *best})


def expected_rewrite(selector: Selector, q: Tensor, k: Tensor, held: list[int], end: int) -> list[int]:
    """What the rewriting classes keep of a head, at most 24 tokens."""
    temperature = 1.0 if selector == "vanilla" else 0.5
    marked = expected_marks(selector, q, k, held, end, temperature)[0].any(0).tolist()
    first, middle, latest = held[:1], range(1, len(held) - LATEST), held[-LATEST:]
    order = [held[i] for i in middle if marked[i]] + [held[i] for i in middle if not marked[i]]
    return sorted([*first, *latest, *order][:24])


@pytest.mark.parametrize("select", ["official_sparse", "official_rewrite"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_runs_keep_what_loops_keep(selector: Selector, select: Select) -> None:
    method = HardKV(
        selector=selector,
        select=select,
        calibration="official",
        queries=ASKS,
        window=LATEST,
        kernel=KERNEL,
        mix=MIX,
    )
    inputs = tokens_of(SPEC, 2, groups=2)
    cache, seen, _ = watch(method, SPEC, inputs, 24)
    expected = expected_sparse if select == "official_sparse" else expected_rewrite
    threshold, dropped = (12 if select == "official_sparse" else 24), 0
    for _, q, k, shown, kept in rows_of(seen, inputs):
        drops = len(shown) > threshold
        assert kept == (expected(selector, q, k, shown, len(k)) if drops else shown)
        dropped += len(shown) - len(kept)
    assert dropped > 0
    assert cache.ledger.peak_tokens <= method.budget.capacity
