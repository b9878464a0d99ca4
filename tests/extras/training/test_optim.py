"""Shared parts of trainings: update rules in double precision, learning rates, stages, attention, codebooks."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import next_scale
from kvbench.extras.training import transformer
from kvbench.extras.training.autoencoder import find_codes
from kvbench.extras.training.loop import fit
from kvbench.extras.training.optim import Optimizer, autocast, choose_dtype, update_average, warm_hold_decay
from kvbench.extras.training.transformer import NextScaleRecipe, Stage, token_weights

Tensors = dict[str, Tensor]
RATES = {"muon": 0.05, "adamw": 0.01}
SHAPES = {"tall": (12, 3), "wide": (3, 12), "kernel": (9, 2, 2, 1), "outside": (4, 4), "bias": (5,)}
"""Matrices and a convolution kernel that Muon takes, a matrix that it may not take, and a vector."""


class Parameters(nn.Module):
    """Named tensors of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def gradients(step: int) -> Tensors:
    """Gradients of one step, whose norm is above 1 in some steps and below in others."""
    generator = torch.Generator().manual_seed(100 + step)
    size = (3.0, 0.02, 0.5)[step % 3]
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def orthogonalise(matrix: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration (Muon; Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def plain(steps: int, decay: float, factors: list[float]) -> Tensors:
    """Parameters after some steps: clipped gradients, Muon with Nesterov momentum, AdamW without decay."""
    values = {name: p.detach().double() for name, p in Parameters().named_parameters()}
    momentum, first, second = ({name: torch.zeros_like(v) for name, v in values.items()} for _ in range(3))
    for step in range(steps):
        given = {name: g.double() for name, g in gradients(step).items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in given.values()))
        for name, raw in given.items():
            g = raw / max(1.0, norm)
            if name in ("tall", "wide", "kernel"):
                rate = RATES["muon"] * factors[step]
                momentum[name] = 0.95 * momentum[name] + 0.05 * g
                flat = (0.05 * g + 0.95 * momentum[name]).flatten(1)
                rows, columns = flat.shape
                update = orthogonalise(flat) * math.sqrt(max(1, rows / columns))
                values[name] = values[name] * (1 - rate * decay) - rate * update.view(g.shape)
            else:
                rate = RATES["adamw"] * factors[step]
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.97 * second[name] + 0.03 * g.square()
                mean, square = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.97 ** (step + 1))
                values[name] = values[name] - rate * mean / (square.sqrt() + 1e-8)
    return values


@pytest.mark.parametrize(("capability", "error"), [("AVX512", 0.05), ("AVX2", 1e-4)])
@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_steps_are_those_of_the_rules(
    decay: float, capability: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon orthogonalises in bfloat16 or float32; a wrong scale or decay is off by half of its rate."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model, factors = Parameters(), [1.0, 0.5, 0.25, 1.0]
    optimizer = Optimizer(model, lambda name: name != "outside", decay=decay, **RATES)
    for step, factor in enumerate(factors):
        for name, gradient in gradients(step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step(factor)
        assert all(p.grad is None for p in model.parameters())
        expected = plain(step + 1, decay, factors)
        for name, value in model.named_parameters():
            bound = error * RATES["muon"] if name in ("tall", "wide", "kernel") else 1e-6
            torch.testing.assert_close(value.detach().double(), expected[name], atol=bound, rtol=0)


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_the_average_forgets_the_start_and_then_decays(decay: float) -> None:
    model = Parameters()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        update_average(average, model, decay, step)
        keep = min(decay, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            expected[name] = keep * expected[name] + (1 - keep) * parameter.detach().double()
            torch.testing.assert_close(average[name].double(), expected[name], atol=1e-5, rtol=0)


SEGMENTS = next_scale([(1, 1), (2, 2), (3, 3)])  # 1, 5, 14 tokens up to each
STAGES = (Stage(1, 8, 2), Stage(3, 4, 3))
RECIPE = NextScaleRecipe(stages=STAGES)


def test_the_rate_rises_stays_and_falls_with_the_tokens_that_are_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rises = {(0, 0): 1 / 40, (19, 0.9): 0.5, (39, 0.1): 1}
    falls = {(40, 0.6): 1, (40, 0.8): 0.51, (40, 1): 0.02}
    for (step, progress), factor in (rises | falls).items():
        assert warm_hold_decay(step, progress, 0.6) == pytest.approx(factor)
    assert [RECIPE.find_stage(step) for step in range(RECIPE.steps)] == [STAGES[0]] * 2 + [STAGES[1]] * 3
    assert RECIPE.rate_by_cost(SEGMENTS, 1) == pytest.approx(2 / 40)
    monkeypatch.setattr(transformer, "warm_hold_decay", lambda step, progress, hold: progress)
    costs = [8, 8, 56, 56, 56]
    shares = [sum(costs[:step]) / sum(costs) for step in range(6)]
    assert [RECIPE.rate_by_cost(SEGMENTS, step) for step in range(6)] == pytest.approx(shares)


def test_tokens_of_large_scales_weigh_less_and_the_mean_is_one() -> None:
    weights = token_weights(SEGMENTS)
    assert weights.mean().item() == pytest.approx(1)
    assert (weights[0] / weights[-1]).item() == pytest.approx(9**0.25)
    assert torch.equal(weights[1:5], weights[1].expand(4))


def test_attention_in_parts_is_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "QUERY_BLOCK", 3)
    q, k, v = torch.randn(2, 8, 10, 8), torch.randn(2, 4, 10, 8), torch.randn(2, 4, 10, 8)
    found = transformer.attend_causally(0, q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sphere", [True, False])
def test_every_cluster_has_a_code_however_rare(sphere: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    unit = partial(F.normalize, dim=1) if sphere else torch.clone
    centres = unit(torch.randn(12, 8, generator=rng) * torch.linspace(0.3, 3, 12)[:, None])
    near = torch.cat([c.expand(n, -1) for c, n in zip(centres, [4000] + [3] * 11, strict=True)])
    codes = find_codes(unit(near + 0.005 * torch.randn(near.shape, generator=rng)), 24, rng, sphere=sphere)
    assert codes.shape == (24, 8)
    torch.testing.assert_close(unit(codes), codes)
    assert (torch.cdist(centres, codes).amin(1) < 0.03).all()


def test_codes_are_the_means_of_what_they_stand_for() -> None:
    vectors = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 4.0]])
    codes = find_codes(vectors, 2, torch.Generator().manual_seed(0))
    expected = torch.tensor([[0.0, 1.0], [10.0, 2.0]])
    torch.testing.assert_close(codes[codes[:, 0].argsort()], expected)


def test_kernels_of_another_memory_layout_are_refused() -> None:
    """No view of them is possible, and a copy would train in vain."""
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view"):
        Optimizer(model, lambda _: True, decay=0.0, **RATES)


def test_a_loss_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    model, recipe = Parameters(), replace(RECIPE, stages=(Stage(1, 8, 2),))
    with pytest.raises(FloatingPointError, match="net: the loss is nan at step 0"):
        fit("net", model, recipe, lambda _: model.tall.sum() * math.nan, tmp_path / "c.safetensors")
    assert torch.equal(model.tall, Parameters().tall)


def test_processors_without_avx512_multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype in (("AVX2", torch.float32), ("AVX512", torch.bfloat16)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert choose_dtype(torch.device("cpu")) is dtype
        assert choose_dtype(torch.device("cuda")) is torch.bfloat16
        with autocast(torch.device("cpu")):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
