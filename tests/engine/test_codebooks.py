"""The calibration of codebooks: what it looks at, and what its codebooks are good for."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment, next_token
from kvbench.core.storage import CODEBOOKS
from kvbench.engine.coding.codebooks import Codebooks, augment_samples
from kvbench.engine.coding.formats import Packing
from kvbench.kernels.qk_norm_rope import rotate
from kvbench.methods.full import Full
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from tests.support.engine import D, open_cache, run, small, tokens_of
from tests.support.slow_storage import make_codebooks, make_rotation

SPEC = small(layers=2, heads=2, sides=(1, 4, 5, 2))


Change = Callable[[Segment, Tensor, Tensor], tuple[Tensor, Tensor]]


def calibrated(
    spec: ModelSpec = SPEC,
    seeds: Sequence[int] = range(6),
    change: Change = lambda _, k, v: (k, v),
    rotation: Tensor | None = None,
) -> Codebooks:
    """What has seen two sequences of each seed, their keys and values changed."""
    observer = Codebooks()
    cache = open_cache(observer, spec, rotation=rotation)
    for seed in seeds:
        given = zip(spec.segments, tokens_of(spec, 2, seed), strict=True)
        run(cache, [[(q, *change(at, k, v)) for q, k, v in layers] for at, layers in given])
    return observer


@pytest.mark.parametrize("spec", [SPEC, ModelSpec("steps", 2, 2, D, next_token(5, [4] * 4))])
def test_shapes_are_those_it_tells_and_levels_ascend(spec: ModelSpec) -> None:
    codebooks = calibrated(spec, seeds=[0]).average()
    assert {name: tuple(codebook.shape) for name, codebook in codebooks.items()} == Codebooks().tensor_shapes(
        spec
    )
    for name in ("keys_2", "keys_3", "values_4"):
        assert (codebooks[name].diff(dim=-1) >= 0).all()


def test_new_tokens_of_the_same_kind_are_read_back_closely() -> None:
    codebooks = calibrated(change=lambda _, k, v: (3 * k, v)).average()
    seen: dict[int, list[Tensor]] = {}

    class Reader(Codebooks):
        uses = Uses(codebooks=True)

        def accumulate(self, view: View) -> None:
            if view.segment.index == 2:
                for bits in (16, 8, 4, 3, 2):
                    given = view.keys(), view.values()
                    pairs = zip(view.read_back(*given, view.segment, bits), given, strict=True)
                    seen[bits] = [(found - x).square().mean() / x.square().mean() for found, x in pairs]

    cache = open_cache(Reader(), SPEC, codebooks=codebooks)
    inputs = [[(q, 3 * k, v) for q, k, v in layers] for layers in tokens_of(SPEC, 2, 99)]
    run(cache, inputs)
    # Max 1960 has .1175, .03454 and .009497 for a normal distribution known exactly.
    for bits, limit in ((16, 1e-6), (8, 5e-4), (4, 0.02), (3, 0.055), (2, 0.16)):
        assert max(map(float, seen[bits])) < limit


@pytest.mark.parametrize("bits", [8, 3])
def test_a_view_reads_back_what_a_cache_stores(bits: int) -> None:
    codebooks, rotation, inputs = make_codebooks(SPEC), make_rotation(SPEC), tokens_of(SPEC, 2)
    read: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    class Reader(Codebooks):
        uses = Uses(codebooks=True)

        def accumulate(self, view: View) -> None:
            both = view.read_back(view.keys(), view.values(), view.segment, bits)
            read[view.layer, view.segment.index] = both

    run(open_cache(Reader(), SPEC, rotation=rotation, codebooks=codebooks), inputs)
    cache = open_cache(Full(), SPEC, packing=Packing(bits, CODEBOOKS), rotation=rotation, codebooks=codebooks)
    cache.reset(2)
    for segment, layers in zip(SPEC.segments[:-1], inputs, strict=False):
        cache.begin(segment)
        for layer, qkv in enumerate(layers):
            cache.attend(layer, *qkv)
    for layer, store in enumerate(cache._stores):
        for number, stored in enumerate((store.keys, store.values)):
            expected = torch.cat([read[layer, segment.index][number] for segment in SPEC.segments[:-1]], 1)
            assert torch.allclose(stored.unflatten(1, (2, -1)).flatten(0, 1), expected, atol=1e-5)


def test_keys_are_looked_at_as_they_were_before_the_model_turned_them() -> None:
    rotation, plain = make_rotation(SPEC), calibrated().average()
    observer = calibrated(
        change=lambda at, k, v: (rotate(k, rotation[at.start : at.end]), v), rotation=rotation
    )
    order = [*range(0, D, 2), *range(1, D, 2)]
    for name, codebook in observer.average().items():
        expected = plain[name][..., order, :] if name.startswith("keys") else plain[name]
        assert torch.allclose(codebook.float(), expected.float(), atol=0.02)


def test_imagined_numbers_have_the_mean_and_deviation_of_the_channel() -> None:
    samples = torch.randn(2, 3, 40) * torch.tensor([[1.0], [5], [0.1]]) + torch.tensor([[0.0], [-7], [2]])
    found = augment_samples(samples, 512)
    assert torch.allclose(found.mean(-1), samples.mean(-1), atol=0.1)
    assert torch.allclose(found.std(-1), samples.std(-1), rtol=0.1)


def test_what_is_left_out_might_not_have_been_seen() -> None:
    some = calibrated(seeds=[1, 2, 3, 4]).fit(without=[2, 3])
    fewer = calibrated(seeds=[1, 4]).average()
    assert some.keys() == fewer.keys()
    assert all(torch.equal(some[name], codebooks) for name, codebooks in fewer.items())
    assert not any(codebooks.any() for codebooks in calibrated(seeds=[]).average().values())


def test_scales_of_eight_bits_reach_a_quarter_beyond_what_was_seen() -> None:
    """All numbers are -1 or 1, equally often, and so are those that a channel is likely to have."""
    signs = torch.tensor([1.0, -1.0])[:, None, None, None]
    observer = calibrated(seeds=[0], change=lambda _, k, v: (signs.expand_as(k), signs.expand_as(v)))
    for name in ("keys_8", "values_8"):
        scale, zero = observer.average()[name].float().unbind(-1)
        torch.testing.assert_close(zero, torch.full_like(zero, -1.5))
        torch.testing.assert_close(zero + 255 * scale, torch.full_like(zero, 1.5), atol=1e-3, rtol=0)
