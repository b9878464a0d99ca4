"""Classes of heads: the classifier on statistics that rank as the printed maps do, the calibration."""

import pytest
import torch
import yaml
from torch import Tensor

from kvbench.methods.hack.classes import HeadPatterns, find_contextual
from tests.support.engine import open_cache, run, small, tokens_of
from tests.support.places import ROOT

PRINTED = yaml.safe_load((ROOT / "tests/golden/methods/head_classes.yaml").read_text())


def contextual(model: str) -> Tensor:
    """The map that is printed of a model, bool [layers, heads]."""
    printed = PRINTED[model]
    rows = [f"{int(number, 16):0{printed['heads']}b}" for number in printed["layers"].split()]
    return torch.tensor([[bit == "1" for bit in row] for row in rows])


@pytest.mark.parametrize("model", PRINTED)
@pytest.mark.parametrize("seed", range(3))
def test_statistics_that_rank_as_a_map_give_its_bits(model: str, seed: int) -> None:
    wanted, alpha = contextual(model), PRINTED[model]["alpha"]
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(wanted.shape, generator=generator, dtype=torch.float64)
    # Long-tailed, as the paper finds sigma; all contextual heads below all others, in no order of layers.
    sigma = (spread + ~wanted).mul(3).exp()
    assert torch.equal(find_contextual(sigma, alpha), wanted)
    assert torch.equal(find_contextual(sigma.flip(1), alpha), wanted.flip(1))
    # Another alpha moves the border by as many heads, and a larger one takes none away.
    fewer, more = (find_contextual(sigma, alpha + step) for step in (-0.1, 0.1))
    assert (fewer <= wanted).all()
    assert (wanted <= more).all()
    assert more.sum() - fewer.sum() == pytest.approx(0.2 * wanted.numel(), abs=1)


def test_ties_go_to_the_earlier_layer_and_head() -> None:
    sigma = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert find_contextual(sigma, 0.5).tolist() == [[False, True, True], [False, False, True]]
    assert not find_contextual(sigma, 0).any()
    assert find_contextual(sigma, 1).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_patterns_are_what_an_explicit_matrix_shows(groups: int) -> None:
    spec = small(scale=0.8)
    observer = HeadPatterns()
    inputs = tokens_of(spec, 4, groups=groups)  # prompts 0 and 1, then their unconditional twins
    run(open_cache(observer, spec), inputs)
    mass = torch.zeros(spec.layers, spec.heads, 4, 4, dtype=torch.float64)
    sigma = torch.zeros(spec.layers, spec.heads, dtype=torch.float64)
    for k, layer, head, prompt in (
        (k, i, h, n) for k in range(4) for i in range(2) for h in range(3) for n in range(2)
    ):
        keys = torch.cat([inputs[s][layer][1][prompt, head] for s in range(k + 1)]).double()
        q = inputs[k][layer][0][prompt, head * groups : (head + 1) * groups].double().flatten(0, 1)
        paid = (0.8 * q @ keys.T).softmax(-1)
        for s, at in enumerate(spec.segments[: k + 1]):
            mass[layer, head, k, s] += paid[:, at.start : at.end].sum(1).mean() / 2
        if k == 3:
            sigma[layer, head] += paid.var(0, correction=0).sum() / 2
    found = observer.average()
    torch.testing.assert_close(found["mass"], mass, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["sigma"], sigma, rtol=1e-5, atol=1e-7)
    # Attention per token of a scale, times the scale's tokens, is all that a query has to give.
    prior = found["mass"] / torch.tensor(spec.lengths)
    whole = (prior * torch.tensor(spec.lengths)).sum(-1)
    torch.testing.assert_close(whole, torch.ones_like(whole), rtol=1e-5, atol=1e-6)
