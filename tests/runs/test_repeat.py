"""The recorded overrides of a run, and of its reference, compose to its identity."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvbench.cli.config.command import Command
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.words import check_words
from kvbench.cli.tasks.job import make_job
from kvbench.report.row_keys import pick_keys
from kvbench.runs.job import Job
from kvbench.runs.record.repeat import write_command
from tests.support.results import made_up

SURROUNDINGS = ["runs_dir=mine", "logger=none", "work.lapse=9", "verbose=true", "require=[]"]
WORDS = """
method=random budget=0.1 budget_unit=bytes cache_dtype=int4 storage=kivi protect=paper
method=pricekv/by_score method.base=snapkv method.base.window=9 cache_dtype=float16 sampling=infinity_demo
model=var_tiny prompts=own prompts.of=scene_classes prompts.of.count=4
sweeps=triattention_math method=h2o budget=100 noise=counter ++method.recent=0.4
"""


def compose(words: Sequence[str]) -> Job:
    with hydra_of_kvbench():
        cfg, _ = compose_job([*words])
        return make_job(cfg, read_settings(cfg))


def repeat(method: str, overrides: tuple[str, ...] | None) -> str:
    return write_command(replace(made_up(method, 1.0, {}), overrides=overrides))


@pytest.mark.parametrize("words", WORDS.strip().splitlines())
def test_a_run_and_its_reference_compose_again(words: str) -> None:
    given = compose([*words.split(), *SURROUNDINGS])
    for job in (given, given.reference):
        assert job.overrides is not None
        command = shlex.split(repeat(job.method_name, job.overrides))
        assert command == ["python", "run.py", *["--run"] * words.startswith("sweeps="), *job.overrides]
        assert not {*SURROUNDINGS} & {*command}
        check_words(Command.parse(command[2:]))
        again = compose(job.overrides)
        again = again.reference if again.is_reference else again  # as `execute.run` does
        assert pick_keys(again.config) == pick_keys(job.config)
        assert (again.method_name, again.prompts_sha256) == (job.method_name, job.prompts_sha256)


def test_a_command_has_its_device_and_its_task_and_no_class() -> None:
    for words in ([], ["device=cpu"]):
        assert compose(["method=h2o", *words]).overrides == ("method=h2o", "device=cpu")
    bound = compose(["task=bounds", "seed=3"]).bounds()[1]
    command = repeat(bound.method_name, bound.overrides)
    assert command == "python run.py task=bounds seed=3 device=cpu method=full"
    assert compose(["method._target_=kvbench.methods.random.Random", "budget=0.1"]).overrides is None


@pytest.mark.parametrize("word", [None, "hydra.searchpath=[x]", "prompts._target_=os.system", "; true"])
def test_what_no_run_records_is_not_shown(word: str | None) -> None:
    assert repeat("h2o", None if word is None else (word,)) == ""
