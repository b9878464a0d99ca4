"""Calibration: equal to the official accumulator; artifacts and order files only fit what they belong to."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.attention_by_scale import AttentionByScale, cas, rank_heads, scas
from kvbench.budget import Budget
from kvbench.cache import KVCache
from kvbench.calibration import artifact_name, calibrate, load_artifact, save_artifact
from kvbench.config import ConfigError
from kvbench.methods.base import Artifact
from kvbench.methods.heatkv import HeatKV
from kvbench.models.base import Cache
from kvbench.models.sampling import Noise
from kvbench.orders import read_orders, write_orders
from kvbench.prompts import Prompt
from kvbench.segments import ModelSpec, next_scale

KIND = AttentionByScale.kind
TOY = np.load(Path(__file__).parent / "golden" / "heatkv" / "scas_toy.npz")
D = 8
SPEC = ModelSpec("small", 2, 3, D, next_scale([(1, 1), (2, 2), (3, 3), (4, 4)]), logit_scale=0.5)


def toy_mass() -> Tensor:
    """Mass of the synthetic attention: the conditional row, mean over queries (in float32) and prompts."""
    lengths = TOY["t"].tolist()
    starts = np.cumsum([0, *lengths])
    mass = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    for prompt in range(2):
        for k in range(5):
            for layer in range(2):
                probabilities = torch.from_numpy(TOY[f"probs_p{prompt}_k{k}_l{layer}"][0])
                for i in range(k + 1):
                    paid = probabilities[:, :, starts[i] : starts[i + 1]].sum(-1).mean(-1)
                    mass[layer, :, k, i] += paid.double() / 2
    return mass


@pytest.mark.parametrize("sinks", [1, 2])
def test_scores_and_orders_equal_the_official_accumulator(sinks: int) -> None:
    scores, expected = scas(toy_mass()), torch.from_numpy(TOY[f"scores_s{sinks}"])
    eligible = slice(sinks, 4)
    assert (scores[..., eligible] - expected[..., eligible]).abs().max() < 1e-12
    assert scores[..., 4].isnan().all()
    ranks = rank_heads(scores)
    for source, order in zip(range(sinks, 4), TOY[f"orders_s{sinks}"], strict=True):
        for place, (head, layer) in enumerate(order):
            assert ranks[source, layer, head] == place


def test_cas_is_the_last_scale_past_the_sinks() -> None:
    mass = toy_mass()
    for sinks in range(4):
        expected = mass[:, :, 4, sinks:4].sum(-1) / (5 - sinks)
        torch.testing.assert_close(cas(mass, sinks), expected)


def test_ties_go_by_head_then_layer() -> None:
    ranks = rank_heads(torch.zeros(2, 3, 1, dtype=torch.float64))[0]
    assert ranks.tolist() == [[0, 2, 4], [1, 3, 5]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_ranks_are_permutations_in_order_of_score(layers: int, heads: int, sources: int, seed: int) -> None:
    scores = torch.randint(
        0, 4, (layers, heads, sources), generator=torch.Generator().manual_seed(seed)
    ).double()
    for source, rank in enumerate(rank_heads(scores)):
        assert sorted(rank.reshape(-1).tolist()) == list(range(layers * heads))
        ordered = scores[..., source].reshape(-1)[rank.reshape(-1).argsort()]
        assert (ordered.diff() >= 0).all()


class Attending:
    """Attends to random tokens: two rows per prompt, conditional ones first."""

    spec = SPEC

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        rows = 2 * len(prompts)
        self.given = [
            [noise.draw(3 * 2 * SPEC.heads * s.length * D).view(len(prompts), 3, 2, SPEC.heads, s.length, D)
             for _ in range(SPEC.layers)]
            for s in SPEC.segments
        ]  # fmt: skip
        cache.reset(rows)
        for segment, layers in zip(SPEC.segments, self.given, strict=True):
            cache.begin(segment)
            for layer, qkv in enumerate(layers):
                cache.attend(layer, *qkv.permute(1, 2, 0, 3, 4, 5).flatten(1, 2).unbind(0))
        return torch.zeros(len(prompts), 1, 1, 3, dtype=torch.uint8)

    def mass(self, prompt: int) -> Tensor:
        """What the conditional row of a prompt paid, [L, H, K, K]."""
        mass = torch.zeros(SPEC.layers, SPEC.heads, 4, 4, dtype=torch.float64)
        for k in range(4):
            for layer in range(SPEC.layers):
                q = self.given[k][layer][prompt, 0, 0]
                keys = torch.cat([self.given[i][layer][prompt, 1, 0] for i in range(k + 1)], 1)
                paid = (q.double() @ keys.double().transpose(1, 2) * 0.5).softmax(-1).mean(1)
                parts = paid.split(SPEC.lengths[: k + 1], 1)
                mass[layer, :, k, : k + 1] = torch.stack([part.sum(1) for part in parts], 1)
        return mass


class Reading:
    """Noise that remembers nothing."""

    def __init__(self, seed: int, prompts: int) -> None:
        self._generator, self._prompts = torch.Generator().manual_seed(seed), prompts

    def draw(self, count: int) -> Tensor:
        return torch.randn(self._prompts, count, generator=self._generator)


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_observer_equals_an_explicit_computation(prompts: int) -> None:
    observer, model = AttentionByScale(), Attending()
    observer.prepare(SPEC, Budget.parse(1, SPEC))
    cache = KVCache(SPEC, observer, dtype=torch.float32)
    expected = torch.zeros(SPEC.layers, SPEC.heads, 4, 4, dtype=torch.float64)
    for seed in range(2):
        model.generate(["a"] * prompts, cache, Reading(seed, prompts))
        expected += torch.stack([model.mass(prompt) for prompt in range(prompts)]).mean(0) / 2
    torch.testing.assert_close(observer.tensors()["mass"], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        observer.tensors()["mass"].sum(-1), torch.ones(SPEC.layers, SPEC.heads, 4).double()
    )


def test_calibrate_reports_progress_and_makes_a_usable_artifact() -> None:
    steps: list[int] = []
    lines = [Prompt(index, "x") for index in range(3)]
    (made,) = calibrate(Attending(), lines, [AttentionByScale()], 7, "cpu", lambda: steps.append(1))
    assert len(steps) == 3
    (again,) = calibrate(Attending(), lines, [AttentionByScale()], 7, "cpu", lambda: None)
    assert torch.equal(made["mass"], again["mass"])
    method = HeatKV(1)
    method.prepare(SPEC, Budget.parse("0.5", SPEC), Artifact(AttentionByScale.kind, made))
    assert method.schedule.cached_after.max() <= method.budget.capacity


METADATA = {"model": "small", "seed": 3, "sizes": [[1, 1], [2, 2]], "weights": "abc"}


def test_an_artifact_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    made = Artifact(KIND, {"mass": toy_mass()}, METADATA)
    save_artifact(path, made)
    found = load_artifact(path, KIND, METADATA)
    assert torch.equal(found.tensors["mass"], made.tensors["mass"])
    assert found.kind == KIND
    assert found.metadata.items() >= METADATA.items()
    load_artifact(path, KIND, {"sizes": ((1, 1), (2, 2))})
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "large"), ("seed", 4), ("sizes", [[1, 1]]), ("weights", "abd"), ("prompts", "new")],
)
def test_an_artifact_for_something_else_is_refused(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    save_artifact(path, Artifact(KIND, {"mass": toy_mass()}, METADATA))
    with pytest.raises(ConfigError, match=rf"made for {field}=.*calibrate again"):
        load_artifact(path, KIND, {**METADATA, field: value})


def test_an_artifact_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    save_artifact(path, Artifact("other", {"mass": toy_mass()}, METADATA))
    with pytest.raises(ConfigError, match="made for kind='other'"):
        load_artifact(path, KIND, METADATA)


@pytest.mark.parametrize("content", [None, b"", b"not a calibration at all", "bare"])
def test_an_unreadable_artifact_is_refused(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    if content == "bare":
        from safetensors.torch import save_file

        save_file({"mass": torch.zeros(1)}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_artifact(path, KIND, METADATA)


def test_names_of_artifacts_follow_their_metadata() -> None:
    names = {artifact_name({**METADATA, "seed": seed}) for seed in range(4)}
    assert len(names) == 4
    assert artifact_name(dict(reversed(METADATA.items()))) == artifact_name(METADATA)


def some_ranks() -> np.ndarray:
    return rank_heads(torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("sinks", [0, 1, 2])
def test_orders_come_back(sinks: int, tmp_path: Path) -> None:
    path, ranks = tmp_path / "orders.json", some_ranks()
    write_orders(path, ranks, sinks, METADATA)
    found = read_orders(path, SPEC, sinks)
    assert np.array_equal(found[sinks:3], ranks[sinks:3])
    stored = json.loads(path.read_text())
    assert stored["metadata"] == METADATA
    path.write_text(json.dumps(stored["orders"]))
    assert np.array_equal(read_orders(path, SPEC, sinks)[sinks:3], ranks[sinks:3])
    if sinks < 2:
        assert np.array_equal(read_orders(path, SPEC, sinks + 1)[sinks + 1 : 3], ranks[sinks + 1 : 3])
    if sinks:
        with pytest.raises(ValueError, match=f"{3 - sinks} orders, small with sinks={sinks - 1} needs"):
            read_orders(path, SPEC, sinks - 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ('{"metadata": {}}', "no orders"),
        ("[]", "0 orders"),
        (json.dumps([[[h, j] for h in range(3) for j in range(2)]] * 4), "more than small has sources"),
        (json.dumps([[[0, 0]] * 6] * 3), "not a permutation of the 6"),
        (json.dumps([[[h, j] for h in range(2) for j in range(3)]] * 3), "not a permutation of the 6"),
        (json.dumps([[[0, 0], [1]]] * 3), "source scale 0 is not a permutation"),
        (json.dumps([["x"]] * 3), "not a permutation"),
        (
            json.dumps([[[-1, 0], *([h, j] for h in range(3) for j in range(2) if h + j)]] * 3),
            "not a permutation",
        ),
    ],
)
def test_wrong_order_files_are_refused(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"method.orders=.*{why}"):
        read_orders(path, SPEC, 0)
    with pytest.raises(ValueError, match=r"method\.orders="):
        HeatKV(0, str(path)).check(SPEC, Budget.parse("0.5", SPEC))


def test_a_missing_order_file_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_orders(tmp_path / "gone.json", SPEC, 0)
    path = tmp_path / "orders.json"
    write_orders(path, some_ranks(), 0, {})
    with pytest.raises(ValueError, match=r"not a permutation of the 8 \[head, layer\] pairs of other"):
        read_orders(path, replace(SPEC, name="other", heads=4), 0)


def test_a_written_order_makes_the_schedule_of_its_calibration(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    mass = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    write_orders(path, rank_heads(scas(mass)), 1, {})
    budget = Budget.parse("0.4", SPEC)
    read, made = HeatKV(1, str(path)), HeatKV(1)
    read.prepare(SPEC, budget)
    made.prepare(SPEC, budget, Artifact(KIND, {"mass": mass}))
    assert np.array_equal(read.schedule.absent, made.schedule.absent)
    assert read.schedule.absent.any()
