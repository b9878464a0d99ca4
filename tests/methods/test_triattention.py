"""TriAttention against the authors' scores and choices, and the frequencies and distances that it looks at."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.triattention import QueryCentres, TriAttention
from kvbench.models.parts.rotary import rotate_grid, rotate_line
from tests.support.drawing import halves_as_pairs
from tests.support.engine import note_calls, open_cache, prepared, run, tokens_of, watch
from tests.support.goldens import load_golden

CASES = {  # rotary base, budget, horizon, tokens of the prompt, next position
    "gqa": (1e6, 96, 65536, 24, 700),
    "mha": (1e4, 64, 1000, 0, 128),
    "line": (1e6, 88, 65536, 24, 152),
}
NAMES = {"centre_real": "q_mean_real", "centre_imag": "q_mean_imag", "modulus": "q_abs_mean"}
"""The authors' names of calibrated tensors."""
LATER = 16
"""Tokens between the first and the second round."""


def spec_of(case: str) -> ModelSpec:
    g, (base, _, _, prompt, end) = load_golden(f"ld_triattention_{case}"), CASES[case]
    layers, heads, _, channels = g["keys"].shape
    segments = next_token(max(prompt, 1), [end - max(prompt, 1), LATER, 1])
    group = g["q_abs_mean"].shape[1] // heads
    spec = ModelSpec("golden", layers, heads, channels, segments, 1, channels**-0.5)
    return replace(spec, group=group, rope_base=base)


def artifact_of(case: str) -> Artifact:
    g, heads = load_golden(f"ld_triattention_{case}"), spec_of(case).heads
    tensors = {ours: g[name].unflatten(1, (heads, -1)) for ours, name in NAMES.items()}
    return Artifact("query_centres", tensors)


def method_of(case: str, **chosen: Any) -> TriAttention:
    _, budget, horizon, prompt, _ = CASES[case]
    method = TriAttention(horizon=horizon, **{"sinks": int(prompt > 0), **chosen})
    prepared(method, spec_of(case), budget, artifact_of(case))
    return method


def assert_none(slots: Tensor) -> None:
    assert not slots.any()


def views_of(case: str) -> list[Any]:
    """A view of each layer's keys [heads, slots, D], which one sequence holds."""
    g, (_, _, _, prompt, _), spec = load_golden(f"ld_triattention_{case}"), CASES[case], spec_of(case)
    position = g["position"].expand(spec.heads, -1)
    same: dict[str, Any] = {
        "position": position, "segment_ids": (position >= prompt).long(), "segment": spec.segments[1],
        "heads": spec.heads, "sequences": 1, "count_unprotected": assert_none,
        **dict.fromkeys(("padding", "padding_charge", "exists")),
    }  # fmt: skip
    return [
        SimpleNamespace(**same, layer=layer, cached_keys=partial(halves_as_pairs, keys))
        for layer, keys in enumerate(g["keys"])
    ]


def slots(kept: Tensor | None) -> list[list[int]]:
    assert kept is not None
    return [row.nonzero()[:, 0].tolist() for row in kept]


VARIANTS = {
    "mean": {},
    "max": {"aggregate": "max"},
    "no_mlr": {"concentration": False},
    "no_trig": {"trig": False},
}
TOLERANCE = {"mean": 1e-3, "max": 5e-3, "no_mlr": 1e-3, "no_trig": 1e-5}
"""Largest error in standard deviations of the scores: the references form phases in float32."""


@pytest.mark.parametrize("case", ["gqa", "line"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_those_of_the_authors(case: str, variant: str) -> None:
    expected = load_golden(f"ld_triattention_{case}")[f"score.{variant}"]
    method = method_of(case, **VARIANTS[variant])
    found = torch.stack([method.score_heads(view).flatten(0, 1) for view in views_of(case)])
    found = found[..., CASES[case][3] :]
    assert (found - expected).abs().max() < TOLERANCE[variant] * expected.std()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_same_slots_are_kept(case: str, normalize: bool) -> None:
    g, end = load_golden(f"ld_triattention_{case}"), "z" if normalize else "raw"
    views = views_of(case)
    for group in ("max", "mean"):
        method = method_of(case, normalize=normalize, group=group)
        expected = g[f"keep.layer_head_{group}.{end}"].tolist()
        assert [slots(method.keep(view)) for view in views] == expected
    if normalize and case != "mha":  # its prompt is empty
        expected = g["keep.layer_head_max.z.open_prefix"].tolist()
        assert [slots(method_of(case, sinks=0).keep(view)) for view in views] == expected
    for shared, name in (("layers", "head"), ("all", "union")):
        method = method_of(case, normalize=normalize, shared=shared)
        method.compare_layers(views)
        wanted = g[f"keep.{name}.{end}"].expand(views[0].heads, -1).tolist()
        assert all(slots(method.keep(view)) == wanted for view in views)


@pytest.mark.parametrize(
    ("shared", "name"), [("none", "layer_head_max.z"), ("layers", "head.z"), ("all", "union.z")]
)
def test_a_generation_keeps_what_the_authors_keep(shared: Any, name: str) -> None:
    """The keys of `line` have no gaps; values and queries do not matter."""
    g, spec = load_golden("ld_triattention_line"), spec_of("line")
    last = torch.zeros(spec.layers, spec.heads, 1, spec.head_dim)
    keys = torch.cat((halves_as_pairs(g["keys"]), halves_as_pairs(g["round2.new_keys"]), last), 2)
    parts = keys.split([segment.length for segment in spec.segments], 2)
    inputs = [[(k.repeat(1, spec.group, 1, 1), k, k) for k in part[:, None]] for part in parts]
    method = TriAttention(sinks=1, shared=shared)
    cache, seen, _ = watch(method, spec, inputs, 88, artifact_of("line"))
    expected = g[f"keep.{name}"].expand(spec.layers, spec.heads, -1)
    found = [asked.ids() for asked in seen if asked.scale == 1]
    assert found == expected.tolist()
    if shared == "none":
        second = g["round2.position"].gather(2, g["round2.keep"]).tolist()
        assert [asked.ids() for asked in seen if asked.scale == 2] == second
    assert cache.ledger.peak_tokens == spec.all_heads * 88


@pytest.mark.parametrize("case", CASES)
def test_a_calibration_finds_the_centres_of_the_authors(case: str) -> None:
    g, spec = load_golden(f"ld_triattention_{case}"), spec_of(case)
    queries = halves_as_pairs(g["cal.q_turned"])
    tokens = queries.shape[1]
    spec = replace(spec, layers=1, segments=next_token(tokens // 2, [10, tokens - tokens // 2 - 10]))
    keys = torch.zeros(1, spec.heads, tokens, spec.head_dim)
    lengths = [segment.length for segment in spec.segments]
    parts = zip(queries[None].split(lengths, 2), keys.split(lengths, 2), strict=True)
    observer = QueryCentres()
    rotation = rotate_line(tokens + 1, spec.head_dim, spec.rope_base)
    run(open_cache(observer, spec, rotation=rotation), [[(q, k, k)] for q, k in parts])
    found = observer.average()
    for ours, name in NAMES.items():
        torch.testing.assert_close(found[ours][0].flatten(0, 1).float(), g[f"cal.{name}"], rtol=0, atol=2e-6)


def test_padding_has_no_part_in_the_centres() -> None:
    spec = ModelSpec("padded", 1, 1, 8, next_token(5, [3]), branches=1, logit_scale=0.5, rope_base=100.0)
    rotation = rotate_line(9, 8, 100.0)
    inputs = tokens_of(spec, 2)
    seen = QueryCentres()
    run(open_cache(seen, spec, rotation=rotation), inputs, [0, 2])
    q = torch.cat([inputs[0][0][0], inputs[1][0][0]], 2)[:, 0]
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * rotation[:8].conj()
    exist = torch.cat((pairs[0], pairs[1, 2:]))
    found = seen.average()
    torch.testing.assert_close(
        found["centre_real"][0, 0, 0], exist.mean(0).real.double(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(found["modulus"][0, 0, 0], exist.abs().mean(0).double(), rtol=1e-5, atol=1e-6)


def test_frequencies_of_the_model_replace_those_of_the_base() -> None:
    """A layer without RoPE has none."""
    spec, (view, *_) = spec_of("line"), views_of("line")

    def score(**changes: Any) -> Tensor:
        method = TriAttention(horizon=1000)
        prepared(method, replace(spec, **changes), 88, artifact_of("line"))
        return method.score_heads(view)

    half = spec.rope_base ** (-2 * torch.arange(spec.head_dim // 2).double() / spec.head_dim)
    torch.testing.assert_close(score(rope_base=1.0, rope_frequencies=tuple(half.tolist())), score())
    still = score(rope_frequencies=(0.0,) * len(half))
    torch.testing.assert_close(score(unrotated=(0,)), still)


def test_images_look_as_far_as_they_go() -> None:
    """Models whose tokens rotate with row and column have rotations for their own tokens alone."""
    spec = ModelSpec("grid", 1, 2, 8, next_token(1, [4, 4, 4, 3]), 1, 0.5, line=4)
    artifact = Artifact("query_centres", dict.fromkeys(NAMES, torch.ones(1, 2, 1, 4)))
    method, rotation = TriAttention(), rotate_grid((4, 4), 8, 100.0, 1)
    found = note_calls(method, "_find_rotations")
    run(open_cache(method, spec, 6, artifact, rotation=rotation), tokens_of(spec, 1))
    # 7 tokens are to come after 9 of 16, and 3 after 13; before that all tokens fit.
    assert [len(phases) for _, phases in found] == [3, 2]
    assert torch.equal(found[1][1], rotation[[14, 15]].to(torch.complex128))
