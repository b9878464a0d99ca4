"""The hash of a run's identity follows everything that can change its samples, and nothing else."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.critical import Critical
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.runs.job_identity import identify_method, make_label
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
    assert replace(IDENTITY, label="heatkv-0.1", method=method).hash == IDENTITY.hash == "57a8d6d6b6"


def test_settings_at_their_defaults_count_and_the_place_of_a_file_does_not() -> None:
    method = {"_target_": "kvbench.methods.snapkv.SnapKV", "window": 16, "refresh": 1, "orders": "here.json"}
    found = identify_method(method, "here.json", SnapKV())
    assert found == {key: value for key, value in method.items() if key != "orders"} | {"revision": 2}


class Other(ChunkKV):
    revision = ChunkKV.revision + 1


class OtherBase(H2O):
    revision = H2O.revision + 1


def test_a_method_and_the_methods_in_it_have_a_revision_each() -> None:
    """So that a change of a base is not a change of what is around it: 1 and 2 are not 2 and 1."""
    settings = {"chunk": 20, "base": {"leading": 0, "base": {"refresh": 1}}}
    found = identify_method(settings, object(), ChunkKV(base=Critical(base=H2O())))
    inner = {"leading": 0, "base": {"refresh": 1, "revision": 1}, "revision": 0}
    assert found == {"chunk": 20, "base": inner, "revision": 1}
    flat: dict[str, object] = {"base": {}}
    raised = [
        identify_method(flat, object(), method)
        for method in (ChunkKV(base=H2O()), Other(base=H2O()), ChunkKV(base=OtherBase()))
    ]
    assert len({replace(IDENTITY, method=one).hash for one in raised}) == 3


def test_a_run_is_labelled_by_the_budget_that_was_given() -> None:
    spec, settings = (
        ModelSpec("text", 1, 1, 8, next_token(200, [100, 100])),
        SimpleNamespace(cache_dtype="auto"),
    )
    for budget, label in (("128", "h2o-128"), (0.25, "h2o-0.25"), (1.0, "h2o-1"), ("1/3", "h2o-0.3333")):
        requested = Budget.parse(budget, spec)
        job = SimpleNamespace(method=H2O(), method_name="h2o", settings=settings, budget=requested)
        assert make_label(job) == label  # type: ignore[arg-type]
    job.method_name = "../h2o/a b:"
    assert make_label(job) == "..-h2o-a-b-0.3333"  # type: ignore[arg-type]  # one folder
