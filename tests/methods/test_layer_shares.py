"""CAKE, MEDA and the layer shares of D2O against the released programs."""

import numpy as np
import pytest
import torch

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.cake import CAKE, AttentionSpread, share_officially
from kvbench.methods.h2o import H2O
from kvbench.methods.merging.meda import (
    MEDA,
    LayerEntropies,
    clamp_shares,
    compare_columns,
    measure_cross_entropy,
    measure_entropy,
)
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import open_cache, run, small, tokens_of, watch
from tests.support.goldens import close_score, list_cases, load_case, load_parameters, mark


@pytest.mark.parametrize("case", range(len(load_parameters("cake_budgets"))))
def test_rounding_of_the_program(case: int) -> None:
    p = load_parameters("cake_budgets")[case]
    found = share_officially(np.array(p["raw"], np.float32), p["total"], p["length"])
    assert found.tolist() == p["out"]


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


@pytest.mark.parametrize("case", list_cases("meda"))
def test_entropies_and_shares_of_the_program(case: int) -> None:
    p, g = load_case("meda", case)
    image, tokens = g["image"], p["N"]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    found: dict[str, list[float]] = {"cross": [], "whole": []}
    for queries, keys in zip(g["queries"], g["keys"], strict=True):
        q = queries[:, None] / p["D"] ** 0.5
        marks = image.expand(p["H"], -1)
        cross = measure_cross_entropy(q[:, :, ~image], q[:, :, image], keys, ~marks, marks)
        whole = measure_entropy((q @ keys[:, None].mT).masked_fill(later, -torch.inf)) / tokens
        found["cross"].append(cross.mean().item())
        found["whole"].append(whole.mean().item())
    for name, entropies in found.items():
        close_score(torch.tensor(entropies), g[f"{name}_entropy"])
        shares = clamp_shares(np.array(entropies), p["rho"])
        close_score(torch.tensor(shares).float(), g[f"{name}_ratio"])


@pytest.mark.parametrize("case", list_cases("d2o"))
def test_layer_shares_of_d2o(case: int) -> None:
    p, g = load_case("d2o", case)
    found = torch.cat([compare_columns(columns[None], p["H"]) for columns in g["layer_column_sums"]])
    close_score(found, g["layer_variance"])
    shares = clamp_shares(-found.numpy().astype(float), p["rho"])
    close_score(torch.tensor(shares).float(), g["layer_ratio"])


def test_without_merging_and_with_equal_layers_it_is_h2o() -> None:
    spec = small(layers=2, sides=(1, 2, 3, 4, 5))
    inputs = tokens_of(spec, 2)
    artifact = Artifact("", {"layers": torch.zeros(2, 5, 1, dtype=torch.float64)})
    found = watch(MEDA(how="none"), spec, inputs, "0.5", artifact)
    expected = watch(H2O(), spec, inputs, "0.5")
    assert [one.ids() for one in found.asked] == [other.ids() for other in expected.asked]
    assert all(torch.equal(one, other) for one, other in zip(found.out, expected.out, strict=True))


@pytest.mark.parametrize("padding", [None, [0, 2]])
def test_what_is_calibrated_of_lines_is_the_entropy_of_their_tensors(padding: list[int] | None) -> None:
    spec = ModelSpec("lines", 1, 2, 8, next_token(5, [4, 4, 3]), 1, 0.3, line=4)
    inputs = tokens_of(spec, 2, groups=2)
    observer = LayerEntropies("auto")
    run(open_cache(observer, spec), inputs, padding)
    sums = np.zeros(4)
    for sequence in range(2):
        start = 0 if padding is None else padding[sequence]
        q, k = (torch.cat([layers[0][i][sequence] for layers in inputs], 1) for i in (0, 1))
        text = torch.arange(16) < 5
        for index, segment in enumerate(spec.segments[1:], 1):
            now = torch.arange(16)[: segment.end]
            for head in range(4):
                heads = q[head, start:5] * 0.3, q[head, segment.start : segment.end] * 0.3
                keys = k[head // 2, : segment.end]
                for queries, marks in zip(heads, (~text[now], text[now] & (now >= start)), strict=True):
                    a = (queries @ keys[marks].T).softmax(-1)
                    sums[index] += float(-(a * a.log()).sum() / len(queries)) / 4 / 2
    np.testing.assert_allclose(observer.average()["layers"][0, :, 0].numpy(), sums, rtol=1e-4)


def test_a_temperature_flattens_the_shares_of_layers() -> None:
    """exp((1 - 3) / 4), relative to the largest."""
    weights = MEDA(temperature=4).weigh(np.array([[1.0], [3.0]]))
    np.testing.assert_allclose(weights, [0.6065306597, 1])
