"""Words of a command that would change nothing end it in one line; jobs that are one run are named."""

import pytest
from omegaconf import OmegaConf

from kvbench.cli.config.command import Command
from kvbench.cli.config.words import READERS, SWEEP, TABLE, check_words
from kvbench.cli.sweeps.outcomes import list_equal
from kvbench.core.config import ConfigError
from kvbench.core.settings import TASKS
from kvbench.runs.record.sweeps import JobStatus
from tests.support.places import ROOT

REFUSED = """
-m sweeps=budget,equal_bytes | sweeps=budget,equal_bytes: takes one value; start one command for each
-m task=dashboard method=a,b | method=a,b: takes one value
task=report method=heatkv | method: not read by task=report; leave it out; sweep.name= or work.folder= chooses
-m task=report prompts.seed=4 | prompts.seed: not read by task=report
task=calibrate seed=3 | seed: not read by task=calibrate; set calibrate.seed
task=profile batch_size=4 | batch_size: not read by task=profile; set profile.batch_sizes
task=plan plan.table=heatkv_table1 budget=0.1 | budget: not read by task=plan
metric=psnr | metric: not read by task=run
sweep.name=main | sweep.name: only for sweeps; add -m, or leave it out
hydra.run.dir=x | hydra.run.dir: not read by kvbench; set runs_dir=
+hydra.callbacks.x._target_=os.getcwd | hydra.callbacks.x._target_: not read by kvbench; write a logger
hydra.job.name=x | hydra.job.name: not read by kvbench; leave it out
storage=kivi | storage: has no effect in 16 bits; set cache_dtype=int4, or leave it out
-m storage=rotated,channel cache_dtype=auto,float16 | storage: has no effect in 16 bits
"""
READ = """
-m sweeps=budget method=full,h2o sweep.name=main report.seeds=each against=h2o runs_dir=x
-m cache_dtype=float16,int4 storage=rotated,channel
-m method=pricekv beside.method=h2o beside.cache_dtype=int4 storage=kivi
sweeps=full_bits storage=kivi
task=report sweeps=speed/heatkv_fig5 profile.batch_sizes=[2] output=x
task=work method=h2o work.do=pause work.workers=3 work.jitter=60
task=export export.policy=x.safetensors method=heatkv budget=0.1
task=check method=heatkv budget=0.1 eval=psnr seed=3 batch_size=2
task=nope method=full
hydra.searchpath=[file://x] hydra.verbose=true hydra/job_logging=none
hydra/launcher=ray --cfg hydra -p hydra.launcher
task=work sweeps=budget hydra/launcher=joblib
storage=kivi --cfg job
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_word_that_changes_nothing_is_refused(line: str) -> None:
    words, _, message = line.partition(" | ")
    with pytest.raises(ConfigError) as error:
        check_words(Command.parse(words.split()))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("words", READ.strip().splitlines())
def test_a_word_that_changes_something_is_not(words: str) -> None:
    check_words(Command.parse(words.split()))


def test_every_key_has_readers() -> None:
    """Every task reads only four keys of conf/config.yaml: itself, where it writes, the device, what is printed."""
    config = OmegaConf.load(ROOT / "conf/config.yaml")
    groups = {str(name) for one in config.pop("defaults") if one != "_self_" for name in one}
    keys = {*config, *(name for name in groups if not name.startswith("override"))}
    parts = {name.partition(".")[0] for name in READERS}
    assert keys - parts == {"task", "device", "runs_dir", "verbose"}
    assert {one for readers in READERS.values() for one in readers} <= {*TASKS, SWEEP, TABLE}


def test_jobs_that_are_one_run_are_named() -> None:
    places = {("full", 0.1): "full-1", ("full", 0.2): "full-1", ("h2o", 0.1): "h2o-1", ("h2o", 0.2): None}
    entries = [
        JobStatus(number, (f"method={method}", f"budget={budget}"), "finished" if run else "failed", run)
        for number, ((method, budget), run) in enumerate(places.items())
    ]
    assert list_equal(entries) == ["2 jobs are one run, full-1: budget=0.1, budget=0.2 change nothing in it"]
