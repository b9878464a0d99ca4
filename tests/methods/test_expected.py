"""Expected attention and CapKV: kvpress's scores and choices, what is calibrated and what weights follow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.expected.capkv import CapKV
from kvbench.methods.expected.method import ExpectedAttention, QueryGaussians
from kvbench.methods.expected.queries import expect_logits, fit_gaussian, rotate_gaussian
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.utility import measure_output
from kvbench.models.parts.rotary import rotate_line
from tests.support.drawing import halves_as_pairs
from tests.support.engine import listening, note_calls, open_cache, prepared, run, small, tokens_of
from tests.support.goldens import close_score, list_cases, load_case, load_golden, mark


@pytest.mark.parametrize("case", list_cases("expected_attention"))
def test_expected_attention_of_kvpress(case: int) -> None:
    p, g = load_case("expected_attention", case)
    if p["stats"]:
        mean, cov = (g[x].expand(p["B"], *g[x].shape) for x in ("stats_mean", "stats_cov"))
    else:
        mean, cov = fit_gaussian(g["queries_prerope"][:, :, p["n_sink"] :])
    frequencies = p["theta"] ** (-torch.arange(0, p["D"], 2).double() / p["D"])
    angles = torch.arange(p["N"], p["N"] + p["n_future"]).double()[:, None] * frequencies
    average = torch.polar(torch.ones_like(angles), angles).mean(0).to(torch.complex64)
    mean, cov = rotate_gaussian(mean, cov, average)
    close_score(mean, g["mean_turned"].view_as(mean))
    if "cov_turned" in g:
        close_score(cov, g["cov_turned"].view_as(cov))
    mean, cov = mean.flatten(0, 1) / p["D"] ** 0.5, cov.flatten(0, 1) / p["D"]
    fold = p["Hq"] // p["Hk"]
    keys = g["keys"].flatten(0, 1)
    logits = expect_logits(
        keys, mean.unflatten(0, (-1, fold)), cov.unflatten(0, (-1, fold)) if p["cov"] else None
    )
    attention = logits[..., p["n_sink"] :].softmax(-1).mean(1)
    if p["vnorm"]:
        attention = (attention + p["eps"]) * g["values"].flatten(0, 1)[:, p["n_sink"] :].norm(dim=-1)
    expected = g["score"].flatten(0, 1)
    close_score(attention, expected[:, p["n_sink"] :])
    whole = torch.cat((torch.full((len(attention), p["n_sink"]), torch.inf), attention), 1)
    assert torch.equal(choose_best(whole, p["n_kept"]), mark(g["kept"].flatten(0, 1), p["N"]))


def test_calibrated_statistics_of_kvpress() -> None:
    p, g = load_case("expected_attention_stats", 0)
    queries = torch.cat([g[f"queries{number}"] for number in range(len(p["lengths"]))], -2)
    mean, cov = fit_gaussian(queries, unbiased=True)
    close_score(mean, g["mean"].view_as(mean))
    close_score(cov, g["cov"].view_as(cov))


@pytest.mark.parametrize("case", list_cases("critical"))
def test_norms_of_the_output_are_those_of_kvpress(case: int) -> None:
    p, g = load_case("critical", case)
    weight = g["output_projection"].unflatten(1, (p["Hk"], -1, p["D"])).movedim(0, 2)
    view: Any = SimpleNamespace(
        heads=p["Hk"], cached_values=lambda: g["values"].flatten(0, 1), output_projection=lambda: weight
    )
    close_score(measure_output(view, 1), g["value_norm"].flatten(0, 1))


@pytest.mark.parametrize("family", ["next-scale", "next-token"])
def test_what_is_calibrated_is_the_gaussian_of_all_queries(family: str) -> None:
    """Of conditional sequences; about each scale's mean, or without the prompt about one of all lines."""
    lines = ModelSpec("lines", 2, 2, 8, next_token(3, [4, 4, 3]))
    spec = lines if family == "next-token" else small()
    inputs = tokens_of(spec, 4)
    observer = QueryGaussians()
    run(open_cache(observer, spec), inputs)
    method = prepared(
        ExpectedAttention(statistics="calibrated"), spec, "0.5", Artifact("", observer.average())
    )
    parts = [layers[1][0][:2].transpose(0, 1).flatten(1, 2) for layers in inputs]
    used = parts[1:] if family == "next-token" else parts
    whole = torch.cat(used, 1).mean(1)
    means = [whole if family == "next-token" else part.mean(1) for part in parts]
    centred = torch.cat([x - m[:, None] for x, m in zip(parts, means, strict=True)][-len(used) :], 1)
    torch.testing.assert_close(method._mean[1], torch.stack(means, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        method._covariance[1], centred.mT @ centred / centred.shape[1], atol=1e-5, rtol=1e-4
    )


CASES = {  # settings, base of the rotation
    "case0": ({"leading": 4}, 10000.0),
    "case1": ({"leading": 4, "future": 32}, 10000.0),
    "case2": ({"leading": 8, "future": 64, "tau": 10.0}, 500000.0),
    "case3": ({"future": 16, "tau": 1.0}, 10000.0),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_choices_are_the_programs(case: str) -> None:
    golden, (settings, base) = load_golden("nm_capkv"), CASES[case]
    queries, keys, values, score, kept = (
        golden[f"{case}.{name}"] for name in ("queries_prerope", "keys", "values", "score", "kept")
    )
    _, heads, tokens, channels = keys.shape
    spec = ModelSpec(
        "text", 1, heads, channels, next_token(tokens, [512]), 1, channels**-0.5, padding_counts=False
    )
    rotation = rotate_line(tokens + 512, channels, base)
    rotated = torch.view_as_complex(halves_as_pairs(queries).unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(rotated * rotation[:tokens]).flatten(-2)
    method = CapKV(**settings)
    cache = open_cache(method, spec, f"{kept.shape[2]}", rotation=rotation)
    calls, asked = note_calls(method, "score"), listening(method)
    cache.reset(len(keys))
    cache.begin(spec.segments[0])
    cache.attend(0, rotated, halves_as_pairs(keys), values)
    first = method.leading
    torch.testing.assert_close(calls[0][1][:, first:], score.flatten(0, 1)[:, first:], rtol=1e-4, atol=0)
    assert asked[0].ids() == kept.flatten(0, 1).tolist()


def draw_values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def test_weights_are_the_exponential_of_the_alignment_of_key_and_anchor() -> None:
    keys, anchor = draw_values(1, 20, 8), draw_values(1, 2, 8)
    found = CapKV(normalise=False, tau=0.5)._weigh(keys, anchor, torch.ones(1, 20, dtype=torch.bool))
    product = (anchor.double() @ keys.double().mT * 0.5).exp()
    torch.testing.assert_close(found.double(), product, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e4, 40.0])
def test_weights_that_overflow_are_refused_in_one_line(size: float) -> None:
    """Either the exponential is infinite, or the matrix is singular in float32."""
    spec = ModelSpec("text", 1, 1, 8, next_token(12, [4]), 1)
    method = CapKV(normalise=False, anchor="plain")
    cache = open_cache(method, spec, "6")
    cache.reset(1)
    cache.begin(spec.segments[0])
    keys, values = size**0.5 * torch.ones(1, 1, 12, 8) / 8**0.5, draw_values(1, 1, 12, 8)
    told = r"method\.normalise=false: weights overflow at method\.tau=5\.0; lower tau or set normalise=true"
    with pytest.raises(ConfigError, match=told):
        cache.attend(0, keys, keys, values)
