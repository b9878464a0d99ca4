"""AMS-KV: Algorithm 1 as plain lists on the papers' schedules, key similarity, fixed capacities."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.cache import KVCache
from kvbench.methods.ams_kv import (
    AMSKV,
    AMSKVFixed,
    KeySimilarity,
    compare_keys,
    effective_capacities,
    fixed_capacities,
)
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import Asked, listening, prepared, shown_to, small, tokens_of

SCHEDULES = {
    "d30": (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "d36": (1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
    "infinity": (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64),
    "dipping": (1, 2, 9, 3, 3, 4, 4, 2),  # a scale that exceeds C_max
}
D, THETA = 2, -0.008
Granularity = Literal["token", "scale"]


def spec_of(name: str, layers: int, heads: int = 1) -> ModelSpec:
    return ModelSpec(name, layers, heads, D, next_scale([(n, n) for n in SCHEDULES[name]]))


def resized(map_: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    """[h, w, D] to [height, width, D]: linear between the centres of pixels, constant beyond the outermost."""
    for axis, size in ((0, height), (1, width)):
        old = map_.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
        low = np.floor(at).astype(int)
        share = (at - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        high = np.minimum(low + 1, old - 1)
        map_ = map_.take(low, axis) * (1 - share) + map_.take(high, axis) * share
    return map_


def slow_similarity(spec: ModelSpec, keys: list[Tensor], scale: int) -> float:
    """S of keys [rows, tokens, D] per scale: minus the mean squared difference over rows, tokens, channels."""
    earlier, at = spec.segments[scale - 1], spec.segments[scale]
    squares = []
    for before, now in zip(keys[scale - 1].double().numpy(), keys[scale].double().numpy(), strict=True):
        grown = resized(before.reshape(earlier.height, earlier.width, -1), at.height, at.width)
        squares.append(((now.reshape(grown.shape) - grown) ** 2).mean())
    return -float(np.mean(squares))


class List:
    """Algorithms 1 and 2 for one layer, with a list of (scale, position)."""

    def __init__(self, condensed: int, first: int, largest: int, granularity: Granularity) -> None:
        self.condensed, self.capacity, self.first, self.largest = condensed, first, first, largest
        self.granularity = granularity
        self.held: list[tuple[int, int]] = []

    def add(self, scale: int, start: int, length: int, below: bool) -> None:
        """A new scale; `below`: its keys differ from those before by more than theta allows."""
        if length > self.largest:
            return
        joined = self.held + [(scale, start + i) for i in range(length)]
        if len(joined) <= self.capacity:
            self.held = joined
            return
        if self.capacity == self.first and below:
            self.capacity = self.largest
        if length > self.capacity:
            return
        locked, rest = joined[: self.condensed], joined[self.condensed :]
        while len(locked) + len(rest) > self.capacity:
            oldest = rest[0][0]
            rest = rest[1:] if self.granularity == "token" else [slot for slot in rest if slot[0] != oldest]
        self.held = locked + rest


def slow_run(
    spec: ModelSpec, below: list[bool], granularity: Granularity, capacities: tuple[int, int]
) -> list[list[tuple[int, int]]]:
    """What the list holds after every cached scale, for given answers to S < theta."""
    layer = List(spec.ends[1], *capacities, granularity)
    held = []
    for at in spec.segments[:-1]:
        layer.add(at.index, at.start, at.length, below[at.index])
        held.append(layer.held)
    return held


def fed(spec: ModelSpec, method: Method, keys: list[list[Tensor]]) -> list[Asked]:
    """What a method keeps of keys [scale][layer] [sequences, heads, tokens, D]; the last scale is left out."""
    cache, seen = KVCache(spec, method, dtype=torch.float32), listening(method)
    cache.reset(len(keys[0][0]))
    for at, layers in zip(spec.segments[:-1], keys, strict=False):
        cache.begin(at)
        for layer, k in enumerate(layers):
            cache.attend(layer, k, k, k)
    return seen


def changing_keys(spec: ModelSpec, sequences: int, seed: int) -> list[list[Tensor]]:
    """Random keys whose size, and with it S, differs between prompts, layers and scales, around S = -0.008."""
    generator = torch.Generator().manual_seed(seed)
    keys = []
    for at in spec.segments[:-1]:
        shape = (sequences, spec.heads, at.length, D)
        spread = torch.rand(spec.layers, sequences // 2, generator=generator)
        sizes = torch.linspace(0.02, 0.06, spec.layers)[:, None] + 0.05 * spread
        keys.append(
            [size.repeat(2)[:, None, None, None] * torch.randn(shape, generator=generator) for size in sizes]
        )
    return keys


@pytest.mark.parametrize("granularity", ["token", "scale"])
@pytest.mark.parametrize("name", ["d30", "dipping"])
def test_it_holds_what_the_algorithm_holds(name: str, granularity: Granularity) -> None:
    prompts, heads = 2, 2
    spec = spec_of(name, layers=12 if name == "dipping" else 4, heads=heads)
    keys = changing_keys(spec, 2 * prompts, seed=len(name))
    method = prepared(AMSKV(theta=THETA, granularity=granularity), spec)
    fed(spec, method, [[10 * k for k in layers] for layers in keys])  # promotes all; the next one starts anew
    answers = {(asked.layer, asked.scale): asked.ids() for asked in fed(spec, method, keys)}
    promoted = set()
    for layer in range(spec.layers):
        for prompt in range(prompts):
            both = [prompt, prompt + prompts]
            own = [scale[layer][both].flatten(0, 1) for scale in keys]
            below = [False] + [slow_similarity(spec, own, k) < THETA for k in range(1, len(keys))]
            held = slow_run(spec, below, granularity, effective_capacities(spec, 2))
            promoted.add(max(map(len, held)) > method.first)
            for k, slots in enumerate(held):
                for sequence in both:
                    for head in range(heads):
                        row = answers[layer, k][sequence * heads + head]
                        assert row == [position for _, position in slots]
    assert promoted == {True, False}


@pytest.mark.parametrize(
    ("name", "layers", "capacities"),
    [("d30", 30, (105, 274)), ("d36", 36, (329, 905)), ("infinity", 32, (1605, 3909))],
)
def test_effective_capacities(name: str, layers: int, capacities: tuple[int, int]) -> None:
    assert effective_capacities(spec_of(name, layers), 2) == capacities


@pytest.mark.parametrize(
    ("room", "first", "largest", "number"), [(1300, 1029, 2629, 5), (650, 581, 1605, 2), (265, 261, 661, 0)]
)
def test_fixed_capacities(room: int, first: int, largest: int, number: int) -> None:
    spec = spec_of("infinity", 32)
    budget = Budget.parse(room, spec)
    assert fixed_capacities(spec, budget, 2)[1:] == (first, largest)
    profile = torch.rand(32, 13, generator=torch.Generator().manual_seed(1)).double()
    method = prepared(AMSKVFixed(), spec, room, Artifact("key_similarity", {"similarity": profile}))
    large = (method.capacities == largest).all(1).nonzero().squeeze(1).tolist()
    overflow = next(k for k, end in enumerate(spec.lengths) if end + 5 > first)
    assert set(large) == set(profile[:, overflow].argsort()[:number].tolist())
    rest = 32 * room - first * (31 - number) - largest * number
    assert first <= rest < largest
    assert (
        sorted(method.capacities.flatten().tolist()) == [first] * (31 - number) + [rest] + [largest] * number
    )
    spread = prepared(AMSKVFixed(placement="uniform"), spec, room)
    assert sorted(spread.capacities.tolist()) == sorted(method.capacities.tolist())


@pytest.mark.parametrize("granularity", ["token", "scale"])
@pytest.mark.parametrize("budget", ["0.3", "0.6"])
def test_fixed_capacities_are_kept_to_as_the_algorithm_would(
    budget: float | str, granularity: Granularity
) -> None:
    spec = small(layers=4, sides=(1, 2, 3, 4, 5, 6))
    profile = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)).double()
    artifact = Artifact("key_similarity", {"similarity": profile})
    method = prepared(AMSKVFixed(granularity=granularity), spec, budget, artifact)
    inputs = [[k for _, k, _ in layers] for layers in tokens_of(spec, 2)]
    for asked in fed(spec, method, inputs):
        for ids, capacity in zip(asked.ids(), method.capacities[asked.layer].tolist(), strict=True):
            held = slow_run(spec, [False] * 6, granularity, (capacity, capacity))
            assert ids == [p for _, p in held[asked.scale]]


@pytest.mark.parametrize("metric", ["neg_mse", "neg_l2_per_token", "neg_l2"])
def test_similarity_by_each_metric(metric: Literal["neg_mse", "neg_l2_per_token", "neg_l2"]) -> None:
    spec = spec_of("d30", 1)
    earlier, at = spec.segments[5], spec.segments[6]
    k, before = torch.randn(3, at.length, D), torch.randn(3, earlier.length, D)
    found = compare_keys(k, before, at, earlier, metric, "bilinear")
    for row in range(3):
        grown = resized(before[row].double().numpy().reshape(6, 6, D), 8, 8)
        difference = k[row].double().numpy().reshape(8, 8, D) - grown
        lengths = np.sqrt((difference**2).sum(-1))
        expected = {
            "neg_mse": (difference**2).mean(),
            "neg_l2_per_token": lengths.mean(),
            "neg_l2": np.sqrt((difference**2).sum()),
        }[metric]
        assert float(found[row]) == pytest.approx(-expected, rel=1e-5)


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_profile_is_a_mean_over_prompts(prompts: int) -> None:
    spec = small(sides=(1, 2, 3, 4))
    observer = KeySimilarity()
    shown = shown_to(observer, spec)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for seed in range(2):
        inputs = [[k for _, k, _ in layers] for layers in tokens_of(spec, 2 * prompts, seed)]
        fed(spec, shown, inputs)
        for layer in range(2):
            own = [scale[layer].flatten(0, 1) for scale in inputs]
            for k in range(1, 3):
                expected[layer, k] += slow_similarity(spec, own, k) / 2
    torch.testing.assert_close(observer.average()["similarity"], expected, rtol=1e-5, atol=1e-7)


def test_a_share_of_layers_is_demanding_by_the_profile() -> None:
    spec = small(sides=(1, 2, 3, 4, 5))
    keys = [[k for _, k, _ in layers] for layers in tokens_of(spec, 2)]
    similarity = torch.zeros(2, 5, dtype=torch.float64)
    for layer, k in np.ndindex(2, 4):
        similarity[layer, k + 1] = slow_similarity(spec, [x[layer].flatten(0, 1) for x in keys], k + 1)
    for count, share in enumerate((0, 0.5, 1)):
        method = prepared(AMSKV(demanding=share), spec, 1, Artifact("", {"similarity": similarity}))
        held = [len(asked.ids()[0]) for asked in fed(spec, method, keys) if asked.scale == 3]
        assert sorted(held) == [5 + 9] * (2 - count) + [5 + 9 + 16] * count
