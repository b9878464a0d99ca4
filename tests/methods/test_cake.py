"""CAKE against its released program."""

import numpy as np
import pytest
import torch

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.cake import CAKE, AttentionSpread, measure_moments, share_officially
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.select import choose_best, smooth
from tests.support.engine import open_cache, prepared, run, small, watch
from tests.support.evict_goldens import close_score, list_cases, load_case, load_parameters, mark


@pytest.mark.parametrize("case", range(len(load_parameters("cake_budgets"))))
def test_rounding_of_the_program(case: int) -> None:
    p = load_parameters("cake_budgets")[case]
    found = share_officially(np.array(p["raw"], np.float32), p["total"], p["length"])
    assert found.tolist() == p["out"]


@pytest.mark.parametrize("case", list_cases("cake"))
def test_scores_preferences_and_the_cascade_of_the_program(case: int) -> None:
    p, g = load_case("cake", case)
    older, layers = p["N"] - p["window"], p["layers"]
    method = CAKE(tau1=p["tau1"], tau2=p["tau2"])
    later = torch.arange(p["N"]) > torch.arange(older, p["N"])[:, None]
    scores, numbers = [], []
    for layer in range(layers):
        q = g["window_queries"][layer].unflatten(0, (p["Hk"], -1))
        logits = q @ g["keys"][layer][:, None].mT / p["D"] ** 0.5
        seen = logits.masked_fill(later, -torch.inf).softmax(-1)[..., :older]
        mean, variance = measure_moments(seen, None)
        scores.append(smooth((mean + p["gamma"] * variance).mean(1), "avg", 5))
        numbers.append([-(seen * (seen + 1e-10).log()).sum(), variance.sum()])
        close_score(scores[-1], g["score"][layer])
    found, preference = method.weigh(np.array(numbers, float)), g["preference"].numpy()
    np.testing.assert_allclose(found, preference / preference.max(), rtol=1e-4)
    total = (p["cache"] - p["window"]) * layers
    for stage in range(layers):
        weights = preference[: stage + 1]
        shares = share_officially(weights / weights.sum() * np.float32(total), total, older)
        assert shares.tolist() == g[f"stage{stage}.budgets"].tolist()
    assert shares.tolist() == g["budgets"].tolist()
    for layer, (score, share) in enumerate(zip(scores, shares, strict=True)):
        whole = torch.cat((score, torch.full((p["Hk"], p["window"]), torch.inf)), 1)
        kept = choose_best(whole, min(int(share), older) + p["window"])
        assert torch.equal(kept, mark(g[f"layer{layer}.kept"], p["N"]))


@pytest.mark.parametrize("case", list_cases("cake"))
def test_the_cache_measures_and_scores_what_the_program_does(case: int) -> None:
    """One prompt of a model whose layers are those of the program, through the cache."""
    p, g = load_case("cake", case)
    spec = ModelSpec("golden", p["layers"], p["Hk"], p["D"], next_token(p["N"], [1]), 1, p["D"] ** -0.5)
    inputs = []
    for tokens in (slice(0, p["N"]), slice(0, 1)):
        before = torch.zeros(p["layers"], p["Hq"], p["N"] - p["window"], p["D"])
        q = torch.cat((before, g["window_queries"]), 2)[:, :, tokens]
        inputs.append(
            [(q[layer][None], *[g["keys"][layer][None][:, :, tokens]] * 2) for layer in range(p["layers"])]
        )
    observer = AttentionSpread(p["window"], "last")
    run(open_cache(observer, spec), inputs)
    shape = {
        "tau1": p["tau1"], "tau2": p["tau2"], "window": p["window"], "queries": "last",
        "rounding": "official",
    }  # fmt: skip
    numbers = observer.average()["layers"][:, 0].numpy()
    preference = g["preference"].numpy()
    np.testing.assert_allclose(CAKE(**shape).weigh(numbers), preference / preference.max(), rtol=1e-4)
    for choice in ("calibrated", "previous"):
        method = CAKE(**shape, preference=choice)
        artifact = Artifact("", observer.average()) if choice == "calibrated" else None
        seen = watch(method, spec, inputs, p["cache"], artifact).asked
        for asked in seen:
            kept = mark(g[f"layer{asked.layer}.kept"], p["N"])
            if choice == "calibrated":
                assert torch.equal(asked.kept, kept)
            else:
                assert (asked.kept | ~kept).all()  # at its stage a layer has more than in the end


def test_equal_layers_have_equal_capacities() -> None:
    spec = small(layers=4, sides=(1, 2, 3, 4, 5))
    numbers = torch.ones(4, 5, 2, dtype=torch.float64)
    method = prepared(CAKE(), spec, "0.5", Artifact("", {"layers": numbers}))
    for segment in spec.segments[:-1]:
        rooms = {method.capacity(layer, segment) for layer in range(4)}
        assert rooms == {min(segment.end, method.budget.tokens // 12)}
