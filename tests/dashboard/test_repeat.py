"""The command that repeats a run composes to the run's configuration."""

import shlex

import pytest

from kvbench.cli.config.command import Command, name_base
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_values
from kvbench.cli.config.words import check_words
from kvbench.dashboard.repeat import write_command
from tests.support.results import made_up


def compose(words: list[str]) -> dict[str, object]:
    with hydra_of_kvbench():
        return dict(read_values(compose_job(words)[0]))


@pytest.mark.parametrize(
    ("model", "method", "others"),
    [
        ("infinity_tiny", "heatkv", ["budget=0.04"]),
        ("infinity_tiny", "random", ["budget=0.1", "budget_unit=bytes", "cache_dtype=float16"]),
        ("infinity_tiny", "full", ["cache_dtype=int4", "storage=kivi", "storage.residual=64"]),
        ("infinity_tiny", "full", ["cache_dtype=fp8", "storage.residual=64"]),
        ("infinity_tiny", "snapkv", ["protect=paper", "eval=paired", "seed=3", "batch_size=2"]),
        ("infinity_tiny", "pricekv", ["budget=0.1", "shuffle=3", "calibrate.seed=4", "calibrate.count=5"]),
        ("infinity_tiny", "pricekv/by_score", ["budget=0.1", "method.base=snapkv", "method.base.window=9"]),
        ("reasoner_tiny", "pricekv", ["budget=0.1", "prompts=math_tiny"]),
        ("infinity_tiny", "random", ["noise=counter"]),
        ("infinity_tiny", "random", ["device=cuda", "cuda_graph=false"]),
        ("infinity_tiny", "random", ["device=cuda", "noise=stream"]),
        ("infinity_tiny", "streaming_llm", ["sinks=2", "method.sinks=1", "cache_dtype=bfloat16"]),
        ("infinity_tiny", "full", ["prompts=scenes_heldout", "prompts.count=5", "model.sampling.top_p=0.9"]),
        ("reasoner_tiny", "hard_kv/rkv_top_p", ["prompts=math_tiny", "eval=exact_answer", "method.p=0.5"]),
        ("smollm2_135m", "snapkv", ["budget=128", "prompts=passkey", "prompts.depths=[50]"]),
        (
            "decoder",
            "h2o",
            ["budget=128", "model.sources.weights.path=weights/SmolLM2-360M", "prompts=texts"],
        ),
        ("var_tiny", "h2o", ["budget=0.5", "prompts=own", "prompts.of=scene_classes", "prompts.of.count=4"]),
        ("infinity_2b", "random", ["prompts=coco30k", "eval=none", "prompts.path=my file's.json"]),
    ],
)
def test_the_command_composes_to_the_same(model: str, method: str, others: list[str]) -> None:
    quoted = [
        f"{key}='{value}'" if " " in value else f"{key}={value}"
        for key, value in (o.split("=", 1) for o in others)
    ]
    quoted = [word.replace("file's", "file\\'s") for word in quoted if not word.startswith("eval.")]
    config = compose([f"model={model}", f"method={method}", *map(name_base, quoted)])
    run = made_up(method, 0.5, {}, config=config)
    python, program, *words = shlex.split(write_command(run))
    assert (python, program) == ("python", "run.py")
    assert not any(
        word.startswith("++method") for word in words
    )  # each setting is known from the method's file
    check_words(Command.parse(words))
    again = compose([name_base(word) for word in words])
    ignored = {"runs_dir", "task"}
    assert {k: v for k, v in again.items() if k not in ignored} == {
        k: v for k, v in config.items() if k not in ignored
    }


def test_a_bound_is_repeated_with_its_task() -> None:
    run = made_up("full, seed 1", 1.0, {}, config={"model": {"name": "infinity_tiny"}})
    assert "task=bounds" in write_command(run)


@pytest.mark.parametrize(("device", "told"), [("cuda", True), ("cpu", False)])
def test_noise_is_told_where_it_is_not_the_device_s_own(device: str, told: bool) -> None:
    config = {"model": {"name": "var_d30"}, "device": device, "noise": "stream"}
    assert ("noise=stream" in write_command(made_up("full", 1.0, {}, config=config))) == told


def test_storage_that_a_run_did_not_use_is_left_out() -> None:
    config = compose(["storage=kivi", "budget=0.1"])
    words = shlex.split(write_command(made_up("random", 0.1, {}, config=config)))[2:]
    assert not any(word.startswith("storage") for word in words)
    check_words(Command.parse(words))
