"""Expected attention against kvpress, and its calibration against the queries themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.expected.gaussian import expect_logits, fit_gaussian, rotate_gaussian
from kvbench.methods.expected.method import ExpectedAttention, QueryGaussians
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.output_norms import measure_output
from kvbench.methods.shared.select import choose_best, pair_halves
from tests.support.engine import open_cache, prepared, run, small, tokens_of
from tests.support.evict_goldens import close_score, list_cases, load_case, mark


def average_rotation(theta: float, channels: int, start: int, count: int) -> Tensor:
    frequencies = theta ** (-torch.arange(0, channels, 2).double() / channels)
    angles = torch.arange(start, start + count).double()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).mean(0).to(torch.complex64)


@pytest.mark.parametrize("case", list_cases("expected_attention"))
def test_expected_attention_of_kvpress(case: int) -> None:
    p, g = load_case("expected_attention", case)
    if p["stats"]:
        mean, cov = (g[x].expand(p["B"], *g[x].shape) for x in ("stats_mean", "stats_cov"))
    else:
        mean, cov = fit_gaussian(g["queries_prerope"][:, :, p["n_sink"] :])
    mean, cov = rotate_gaussian(mean, cov, average_rotation(p["theta"], p["D"], p["N"], p["n_future"]))
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


def test_neighbouring_channels_become_halves() -> None:
    assert pair_halves(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


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
