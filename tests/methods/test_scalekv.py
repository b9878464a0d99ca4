"""ScaleKV: the authors' selections and published budgets, and budgets that hold in any order of evictions."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.cache import KVCache
from kvbench.methods.scalekv import (
    AttentionSelectivity,
    ScaleKV,
    choose_drafters,
    fill_up,
    read_capacities,
    share_capacity,
)
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import fill_gaps, shrink_early
from kvbench.methods.shared.select import choose_best, choose_window, smooth, smooth_outside
from kvbench.methods.shared.view import View
from tests.support.engine import open_cache, prepared, run, same_best, small, tokens_of
from tests.support.goldens import load_golden
from tests.support.places import GOLDENS
from tests.support.published import INFINITY, SIDES

GOLDEN = GOLDENS / "methods"
D = 8
CAPACITIES = {0: (50, 100, 200, 260), 1: (24, 30, 40, 48)}  # of the two layers, after scales 3 to 6
SELECTED = load_golden("scalekv_select")
GIVEN = json.loads((GOLDEN / "derived_budgets.json").read_text())["scalekv"]


def case_name(pool: str, layer: int, scale: int, part: str = "") -> str:
    return f"{pool}pool.layer{layer}.scale{scale}{part and '.' + part}"


def published(model: str) -> dict[str, dict[str, int]]:
    return json.loads((GOLDEN / f"scalekv_budget_{model}_10.json").read_text())


def test_the_window_is_the_authors() -> None:
    for scale, segment in enumerate(INFINITY["2b"].segments):
        assert choose_window("grid", segment, 16).tolist() == SELECTED[f"grid16.scale{scale}"].tolist()


@pytest.mark.parametrize("layer", [0, 1])
def test_selection_by_means_is_the_authors(layer: int) -> None:
    g, name, at = SELECTED, case_name("avg", layer, 5), INFINITY["2b"].segments[5]
    ids, q, keys = (g[f"{name}.{part}"].flatten(0, 1) for part in ("in_ids", "in_q", "in_k"))
    chosen = choose_window("grid", at, 16)
    scores = (q[:, chosen] @ keys.transpose(1, 2)).sum(1) * D**-0.5
    inside = torch.isin(ids, at.start + chosen)
    assert torch.equal(inside.nonzero()[:, 1].view(4, 16), g[f"{name}.window_idx"].flatten(0, 1))
    smoothed = smooth_outside(scores, inside, "avg", 5, spread_blank=True)
    kept = choose_best(smoothed.masked_fill(inside, torch.inf), CAPACITIES[layer][2])
    expected = smooth(scores.masked_fill(inside, -torch.inf), "avg", 5).masked_fill(inside, 1e9)
    for row, wanted in enumerate(g[f"{name}.out_ids"].flatten(0, 1)):
        slots = torch.isin(ids[row], wanted).nonzero().squeeze(1)
        same_best(kept[row].nonzero().squeeze(1).tolist(), slots.tolist(), expected[row])


@dataclass
class Forced(ScaleKV):
    """Goes on with what the authors kept, since slots of equal score may be chosen differently."""

    own: dict[int, Tensor] = field(default_factory=dict)
    theirs: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)

    def keep(self, view: View) -> Tensor | None:
        """The authors' slots, own ones noted."""
        kept, k = super().keep(view), view.segment.index
        if kept is None:
            return None
        self.own[k] = kept
        wanted = SELECTED[case_name("max", 0, k, "out_ids")].flatten(0, 1)
        self.theirs[k] = (view.position[..., None] == wanted[:, None]).any(-1)
        chosen = choose_window("grid", view.segment, 16)
        inside = torch.isin(view.position, view.segment.start + chosen)
        smoothed = smooth(view.logits(chosen, raw_queries=True).masked_fill(inside, -torch.inf), "max", 5)
        self.scores[k] = smoothed.masked_fill(inside, 1e9)
        return self.theirs[k]


def test_a_generation_keeps_what_the_authors_keep(tmp_path: Path) -> None:
    g, keys = SELECTED, SELECTED["maxpool.keys"][0]
    spec = ModelSpec("one", 1, 2, D, next_scale([(n, n) for n in SIDES[:7]] + [(1, 1)]), logit_scale=0.3)
    table = {f"Scale {k}": {"Block 0": 1, "Max": n, "Min": n} for k, n in enumerate(CAPACITIES[0], start=5)}
    (tmp_path / "b.json").write_text(json.dumps(table))  # of one layer after scales 3 to 6
    method = Forced(budgets=str(tmp_path / "b.json"), released_queries=True, pool="max")
    cache = open_cache(method, spec, 260)
    inputs = []
    for segment in spec.segments:
        name = case_name("max", 0, segment.index, "in_q")
        raw_queries = g[name] if name in g else torch.zeros(2, 2, segment.length, D)
        k = keys[:, :, segment.start : segment.end] if not segment.last else torch.zeros(2, 2, 1, D)
        inputs.append([(torch.randn(raw_queries.shape), k, k, lambda raw_queries=raw_queries: raw_queries)])
    run(cache, inputs)
    assert sorted(method.own) == [3, 4, 5, 6]
    for k, own in method.own.items():
        for mine, other, scores in zip(own, method.theirs[k], method.scores[k], strict=True):
            assert other.sum() == CAPACITIES[0][k - 3]
            same_best(mine.nonzero().squeeze(1).tolist(), other.nonzero().squeeze(1).tolist(), scores)
    assert cache.ledger.tokens_after[6] == [2 * 260]


@pytest.mark.parametrize("model", ["2b", "8b"])
def test_the_published_files_are_read_and_the_rule_gives_the_same(model: str) -> None:
    spec, given = INFINITY[model], GIVEN[f"infinity_{model}"]
    read = read_capacities(GOLDEN / f"scalekv_budget_{model}_10.json", spec, Budget.parse(650, spec))
    for name, entry in published(model).items():
        for layer in range(spec.layers):
            large = entry[f"Block {layer}"]
            assert read[int(name[6:]) - 2, layer] == entry["Max" if large else "Min"]
    assert (read[:7] == np.array(spec.ends[:7])[:, None]).all()
    assert (read[7:].mean(1) == 650).all()
    flags = np.zeros((13, spec.layers), bool)
    for scale, entry in given["official_10pct"].items():
        flags[int(scale) + 1, entry["drafters"]] = True
    assert (share_capacity(spec, 650, flags) == read).all()


def test_budget_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spec, path = INFINITY["2b"], GOLDEN / "scalekv_budget_2b_10.json"
    with pytest.raises(ValueError, match=r"method.budgets=.*hold 650 tokens per head, .* set budget=650$"):
        ScaleKV(budgets=str(path)).check(spec, Budget.parse(649, spec))
    with pytest.raises(ValueError, match="not a budget file of infinity_8b"):
        read_capacities(path, INFINITY["8b"], Budget.parse(1, INFINITY["8b"]))
    content = published("2b")
    last, named = content["Scale 13"], content["Scale 11"]
    lacking = {"Scale 11": {name: value for name, value in named.items() if name != "Block 7"}}
    changes = [{"Scale 14": last}, {"Scale 1": last}, {"Scale x": {}}, {"y": 3}, lacking]
    for text in [*(json.dumps(content | change) for change in changes), "[]", "{"]:
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match="not a budget file of infinity_2b "):
            read_capacities(tmp_path / "b.json", spec, Budget.parse(650, spec))


def worst(held: np.ndarray, spec: ModelSpec) -> list[int]:
    """Most tokens per head of every layer together while each scale runs, layer after layer, by going through it."""
    tokens, peaks = [0] * spec.layers, []
    for k, row in enumerate(held.tolist()):
        peaks.append(0)
        for layer in range(spec.layers):
            tokens[layer] = min(tokens[layer] + spec.lengths[k], row[layer])
            peaks[-1] = max(peaks[-1], sum(tokens))
    return peaks


@given(st.data())
@settings(max_examples=150)
def test_no_token_of_the_budget_is_stranded(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 5))
    spec = small(layers=layers, sides=(1, 2, 3, 4, 5))
    counts = st.lists(st.integers(0, 40), min_size=layers, max_size=layers)
    capacity = np.array(data.draw(st.lists(counts, min_size=4, max_size=4)), np.int64)
    total = int(capacity.sum(1).max()) + data.draw(st.integers(0, 10))
    filled = fill_up(capacity, spec, total)
    before = np.zeros(layers, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        assert (filled[k] <= before + length).all()
        assert (filled[k] >= np.minimum(capacity[k], before + length)).all()
        assert filled[k].sum() == min(total, (before + length).sum())
        before = filled[k]
    held = fill_gaps(shrink_early(filled, spec.lengths, total), spec.lengths, total)
    assert max(worst(held, spec)) <= total
    for k, layer in np.ndindex(*held.shape):  # one more token anywhere cannot be held, or breaks the budget
        more = held.copy()
        more[k, layer] += 1
        reach = spec.lengths[k] + (held[k - 1, layer] if k else 0)
        assert more[k, layer] > reach or max(worst(more, spec)) > total


@pytest.mark.parametrize("model", ["2b", "8b"])
def test_published_budgets_shrink_as_little_as_they_must(model: str) -> None:
    spec = INFINITY[model]
    budget = Budget.parse(650, spec)
    given_rows = read_capacities(GOLDEN / f"scalekv_budget_{model}_10.json", spec, budget)
    held = shrink_early(given_rows, spec.lengths, 650 * spec.layers)
    overshoot = {
        entry["scale_index"]: entry["max_after_layer_tokens"] - entry["after_step_tokens"]
        for entry in GIVEN[f"infinity_{model}"]["after_layer_overshoot"]
    }
    peaks = worst(given_rows, spec)
    assert [peaks[k] - spec.layers * 650 for k in range(8, 12)] == [overshoot[k] for k in range(8, 12)]
    # The first layer grows by all that exceeds before any other shrinks, so exactly that must leave beforehand.
    early = (given_rows - held).sum(1)
    assert early[7:11].tolist() == [overshoot[k] for k in range(8, 12)]
    assert early.sum() == sum(overshoot.values())
    if model == "2b":
        assert early[7:11].tolist() == [570, 1020, 1590, 3275]
    assert max(worst(held, spec)) == 650 * spec.layers


@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_drafters_have_the_lowest_z_scores(seed: int, room: int, share: float) -> None:
    spec = small(layers=5, sides=(1, 2, 3, 4, 5))
    asi = torch.rand(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    flags = choose_drafters(asi, spec, room, share)
    pairs = []
    for k in (k for k in range(1, 5) if spec.ends[k - 1] > room):  # scales whose past does not fit
        column = asi[:, k].tolist()
        mean = sum(column) / 5
        spread = (sum((x - mean) ** 2 for x in column) / 5) ** 0.5
        pairs += [((x - mean) / spread, (k, layer)) for layer, x in enumerate(column)]
    expected = {pair for _, pair in sorted(pairs)[: round(share * len(pairs))]}
    assert {(int(k), int(layer)) for k, layer in np.argwhere(flags)} == expected
    held = share_capacity(spec, room, flags)
    assert (held >= 0).all()
    assert (held.sum(1) <= spec.layers * np.minimum(room, np.array(spec.ends[:-1]))).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_selectivity_equals_an_explicit_computation(groups: int) -> None:
    spec = small(sides=(1, 2, 3, 4, 6), scale=0.7)
    observer = AttentionSelectivity(strongest=0.2, queries=10)
    cache = open_cache(observer, spec)
    expected = torch.zeros(spec.layers, 5, dtype=torch.float64)
    for seed in range(2):
        inputs = tokens_of(spec, 4, seed, groups)  # two prompts and their unconditional twins
        run(cache, inputs)
        for at in spec.segments[1:]:
            for layer in range(spec.layers):
                keys = torch.cat([inputs[i][layer][1] for i in range(at.index + 1)], 2)
                some = [i * at.length // min(10, at.length) for i in range(min(10, at.length))]
                strongest = max(1, round(0.2 * at.start))
                for prompt in range(2):
                    for head in range(spec.heads):
                        here, top = [], []
                        for fold in range(groups):
                            for token in some:
                                q = inputs[at.index][layer][0][prompt, head * groups + fold, token].double()
                                paid = (keys[prompt, head].double() @ q * 0.7).softmax(0)
                                here.append(float(paid[at.start :].sum()))
                                top.append(sum(sorted(paid[: at.start].tolist())[-strongest:]))
                        index = sum(here) / len(here) * sum(top) / len(top)
                        expected[layer, at.index] += index / spec.heads / 4
    torch.testing.assert_close(observer.average()["asi"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("strict", [True, False])
def test_the_published_order_exceeds_the_budget_and_the_strict_one_does_not(strict: bool) -> None:
    spec = small(layers=4, sides=(1, 2, 3, 4, 5, 6))
    asi = torch.ones(4, 6, dtype=torch.float64)
    asi[0] = 0  # the first layer drafts
    method = prepared(
        ScaleKV(drafters=0.25, strict=strict), spec, 15, Artifact("attention_selectivity", {"asi": asi})
    )
    cache = KVCache(spec, method, dtype=torch.float32)
    run(cache, tokens_of(spec, 2))
    capacity = method.budget.capacity
    assert (cache.ledger.peak_tokens > capacity) != strict
    assert max(row[-1] for row in cache.ledger.tokens_after) <= capacity
