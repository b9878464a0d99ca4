"""Benchmarks start from a checkout without Hydra, read the same configuration, and count operations rightly."""

import re
from functools import partial
from itertools import zip_longest
from pathlib import Path

import hydra
import numpy as np
import pytest

from benchmarks import engine
from benchmarks.__main__ import PROGRAMS, main
from benchmarks.support import build, floors
from benchmarks.support import plain_loop as plain
from benchmarks.support.fake_gpu import list_captions
from benchmarks.support.timing import Timed, take_turns
from kvbench.cli.config.compose import hydra_of_kvbench, read_values
from kvbench.cli.config.loader import find_model_choices
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.heatkv.method import HeatKV
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import PromptNoise
from tests.support.command_line import run_python
from tests.support.methods import GUESTS, compose, list_methods, list_variants, methods_for, settings_of
from tests.support.places import ROOT

CHOICES = {
    group: [f"{group}={path.stem}" for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
    for group in ("model", "method", "prompts")
}
CHOICES["prompts"].remove("prompts=own")  # whose prompts are another choice, which benchmarks do not make
TOGETHER = [[choice for choice in row if choice] for row in zip_longest(*CHOICES.values())]
MEGAPIXEL = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
REFUSE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hydra", "omegaconf"):
            raise ImportError(f"{name} is not to be had here")
sys.meta_path.insert(0, Refuse())
sys.path[0] = sys.argv.pop(1)
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def output(program: str, folder: Path, *arguments: str) -> str:
    """What a benchmark prints where there is neither Hydra nor a PYTHONPATH."""
    places = {"PYTHONPATH": "", "TRITON_INTERPRET": "0"}  # as outside of the tests
    done = run_python(folder, "-c", REFUSE, str(ROOT), program, *arguments, **places)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("choices", TOGETHER, ids=" ".join)
def test_configuration_is_the_one_hydra_makes(choices: list[str]) -> None:
    overrides = [*choices, "budget=0.25", "sinks=2"]
    overrides += ["prompts.path=x.txt"] if {"prompts=file", "prompts=ruler"} & {*choices} else []
    with hydra_of_kvbench():
        expected = read_values(hydra.compose("config", [*overrides, *find_model_choices(overrides)]))
    found = build.composed(overrides)
    assert found == {key: expected[key] for key in expected if key in found}
    assert set(expected) - set(found) == {"eval", "logger", "train", "sweeps"} & set(expected)


@pytest.mark.slow
def test_settings_of_methods_are_those_hydra_composes() -> None:
    names = (*list_methods(), *list_variants())
    assert {name: settings_of(name) for name in names} == {name: compose(name) for name in names}


def test_every_program_is_listed_and_describes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PROGRAMS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out


def test_runs_take_turns_and_warm_ups_do_not_count() -> None:
    order, seconds = [], iter([9.0, 9.0, 0.0, 1.0, 0.0, 4.0, 0.0, 3.0, 0.0, 2.0])

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = take_turns({name: partial(run, name) for name in "ab"}, 2, lambda: next(seconds))
    assert order == ["a", "b"] * 3
    assert found == {"a": (2.0, 5, [1.0, 3.0]), "b": (3.0, 6, [4.0, 2.0])}
    assert found["a"].compare(found["b"]) == (0.875, "0.250 to 1.500")
    nine = Timed(5.0, None, [*map(float, range(1, 10))])
    assert nine.compare(Timed(1.0, None, [1.0] * 9)) == (5.0, "2.000 to 8.000")  # 96.1 % for nine values


def test_objects_are_built_and_wrong_names_told() -> None:
    values = build.composed(["model=infinity_2b", "model.weights=random", "method=heatkv", "sinks=4"])
    model, method = build.built(values["model"]), build.built(values["method"])
    assert isinstance(model, InfinityModel)
    assert (model.weights, model.spec.layers) == ("random", 32)
    assert method == HeatKV(sinks=4)
    with pytest.raises(ValueError, match=r"model\.weight: no such key"):
        build.composed(["model.weight=random"])
    with pytest.raises(ValueError, match="method=heat: no such choice; choose from adakv"):
        build.composed(["method=heat"])


def test_share_of_operations() -> None:
    spec = ModelSpec("infinity_2b", 32, 16, 128, next_scale([(side, side) for side in MEGAPIXEL]))
    schedule, order = floors.heatkv(spec, Budget.parse("0.1", spec), 3)
    past = floors.past_tokens(spec, schedule)
    assert order == "published order of heads"
    assert round(floors.share_of_full(spec, past), 2) == 0.47
    assert round(floors.share_of_full(spec, past, slice(-1, None)), 2) == 0.45


def test_operations_and_bytes_of_a_dense_attention() -> None:
    spec = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3)]))
    full = np.broadcast_to(np.array([0, 1, 5])[:, None, None], (3, 2, 3))
    assert floors.share_of_full(spec, full) == 1
    assert floors.share_of_full(spec, 0 * full) == pytest.approx((1 + 16 + 81) / (1 + 4 * 5 + 9 * 14))
    queries, keys, dim, sequences = 4, 5, 8, 2
    work = floors.attention(queries, np.full(3, keys), dim, sequences, 2)
    assert work.flops == sequences * 3 * 2 * (2 * queries * keys * dim)  # q k^T, then its product with v
    assert work.bytes == 2 * sequences * 3 * dim * (2 * queries + 2 * keys)


def test_all_methods_of_the_family_are_timed_and_the_others_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "generate", lambda *_: 0)
    main(["engine", "--model", "infinity_tiny", "--budget", "0.5", "--repeats", "1", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    timed = {
        line.split()[0] for line in lines if re.search(r" +[\d.]+ +[\d.]+( +[\d.]+ to [\d.]+)?$", line)
    } - {"plain"}
    assert timed - {*GUESTS} == {*methods_for("next-scale")}
    refused = {line.split()[0] for line in lines if " is left out: method" in line}
    assert timed | refused == {*build.list_choices("method")}
    with pytest.raises(SystemExit, match="error: method=D2O: is for next-token models"):
        main(["engine", "--methods", "d2o"])


@pytest.mark.parametrize("decoder_dtype", ["float32", "bfloat16"])
def test_the_plain_loop_draws_the_engine_s_images_and_decodes_as_the_model_does(decoder_dtype: str) -> None:
    model = build.built(build.composed([f"model.decoder_dtype={decoder_dtype}"])["model"])
    model.load("cpu")
    prompts = list_captions(2)
    cache = engine.cache_of("full", model, "1", "cpu")
    ours = model.generate(prompts, cache, PromptNoise(3, range(2)))
    loop = plain.plain_loop(model)
    theirs = loop.generate(prompts, plain.PlainCache(), PromptNoise(3, range(2)))
    assert np.array_equal(ours, theirs)
    assert isinstance(loop._transformer.layers[0], plain.PlainBlock)
    assert not isinstance(model._transformer.layers[0], plain.PlainBlock)
