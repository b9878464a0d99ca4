"""CapKV: scores and choices of kvpress's CapPress, and what its weights follow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.expected.capkv import CapKV
from kvbench.methods.shared.view import View
from kvbench.models.parts.rotary import rotate_line
from tests.support.engine import listening, open_cache
from tests.support.goldens import load_golden

CASES = {  # settings, base of the rotation
    "case0": ({"leading": 4}, 10000.0),
    "case1": ({"leading": 4, "future": 32}, 10000.0),
    "case2": ({"leading": 8, "future": 64, "tau": 10.0}, 500000.0),
    "case3": ({"future": 16, "tau": 1.0}, 10000.0),
}


def interleave(x: Tensor) -> Tensor:
    """Channels that rotate together in the program as neighbours."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


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
    rotated = torch.view_as_complex(interleave(queries).unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(rotated * rotation[:tokens]).flatten(-2)
    method = CapKV(**settings)
    cache = open_cache(method, spec, f"{kept.shape[2]}", rotation=rotation)
    scores: list[Tensor] = []
    inner = method.score

    def note(view: View) -> Tensor:
        scores.append(inner(view))
        return scores[-1]

    method.score = note  # type: ignore[method-assign]
    asked = listening(method)
    cache.reset(len(keys))
    cache.begin(spec.segments[0])
    cache.attend(0, rotated, interleave(keys), values)
    first = method.leading
    torch.testing.assert_close(scores[0][:, first:], score.flatten(0, 1)[:, first:], rtol=1e-4, atol=0)
    assert asked[0].ids() == kept.flatten(0, 1).tolist()


def draw_values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def weights_of(**settings: Any) -> Tensor:
    keys, anchor = draw_values(1, 20, 8), draw_values(1, 2, 8)[:, ::1]
    sign = settings.pop("sign", 1)
    return CapKV(**settings)._weigh(keys, sign * anchor, torch.ones(1, 20, dtype=torch.bool))


def test_weights_follow_the_alignment_of_key_and_anchor() -> None:
    assert bool((weights_of(tau=0) == 1).all())
    assert torch.equal(weights_of().argsort(-1), weights_of(sign=-1).argsort(-1, descending=True))
    assert torch.equal(weights_of().amax(-1), torch.ones(1, 2))
    product = (draw_values(1, 2, 8).double() @ draw_values(1, 20, 8).double().mT * 0.5).exp()
    torch.testing.assert_close(weights_of(normalise=False, tau=0.5).double(), product, rtol=1e-5, atol=0)


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
