"""The hash of a run's identity follows everything that can change its samples, and nothing else."""

from dataclasses import fields, replace

import pytest

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs.job_identity import identify_method, revise_method
from kvbench.runs.run_hash import Identity

IDENTITY = Identity(
    model={"_target_": "kvbench.models.infinity.model.InfinityModel", "sampling": {"tau": [1.0, 0.5]}},
    weights="a" * 64,
    method={"_target_": "kvbench.methods.heatkv.method.HeatKV", "sinks": 1},
    calibration=None,
    budget="1",
    prompts="c" * 64,
    seed=0,
    cache_dtype="torch.float32",
)


@pytest.mark.parametrize("name", [field.name for field in fields(Identity) if field.name != "label"])
def test_every_field_changes_the_hash(name: str) -> None:
    assert replace(IDENTITY, **{name: {"other": 1}}).hash != IDENTITY.hash  # type: ignore[arg-type]


def test_the_label_and_the_order_of_keys_do_not() -> None:
    method = dict(reversed(IDENTITY.method.items()))
    assert replace(IDENTITY, label="heatkv-0.1", method=method).hash == IDENTITY.hash
    assert len(IDENTITY.hash) == 10


def test_runs_without_batch_invariance_keep_the_names_they_had() -> None:
    """A hash of version 0.1.0, which had no such setting."""
    assert IDENTITY.hash == "7ea5c7793f"
    assert replace(IDENTITY, batch_invariant=True).hash != IDENTITY.hash


def test_runs_with_noise_of_streams_keep_the_names_they_had() -> None:
    assert replace(IDENTITY, noise="stream").hash == "7ea5c7793f"
    assert replace(IDENTITY, noise="counter").hash != IDENTITY.hash


def test_settings_that_came_later_and_change_nothing_are_left_out() -> None:
    method = {"_target_": "kvbench.methods.snapkv.SnapKV", "window": 16, "orders": "here.json"}
    later, added = {"refresh": 1, "ema": 0, "fill": False}, Method.added
    assert identify_method(method | later, "here.json", added) == {
        k: v for k, v in method.items() if k != "orders"
    }
    assert identify_method(method | later | {"refresh": 4}, object(), added) == method | {"refresh": 4}
    sliding = {"sinks": 0}
    assert identify_method(sliding | {"leading": 0}, object(), StreamingLLM.added) == sliding
    assert identify_method(sliding | {"leading": 4}, object(), StreamingLLM.added) == sliding | {"leading": 4}


def test_a_change_of_texts_leaves_the_names_of_images() -> None:
    image = ModelSpec("image", 1, 1, 8, next_scale([(1, 1), (2, 2)]))
    text = ModelSpec("text", 1, 1, 8, next_token(4, [4]))
    method = StreamingLLM(sinks=0)
    assert revise_method(method, image) == {"revision": method.revision}
    assert revise_method(method, text) == {"revision": method.revision, "text_revision": method.text_revision}
