"""Whatever is wrong with a command: one line that names the key and the remedy, and nothing left behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.sweeps.jobs import open_folder
from tests.support.command_line import Command

DEEP = "[" * 100_000
COUNTED = '{"prompt": "a red circle", "tag": "counting", "include": [{"class": "circle", "count": 1}]}\n'
CONTENTS: dict[str, str | bytes] = {
    "deep.json": DEEP,
    "x.pdf": b"%PDF-1.4\n",
    "binary.txt": b"a red circle\n\0\n",
    "deep.jsonl": DEEP + "\n",
    "wide.csv": 'prompt\n"' + "a" * 200_000 + '"\n',
    "plain": "",
    "null.jsonl": '{"prompt": "a red circle"}\n{"prompt": null}\n',
    "half.jsonl": COUNTED + '{"prompt": "a red circle"}\n',
    "good.txt": "a red circle\n",
    "mine.txt": "a red circle\n\nan astronaut" + 20 * " on a horse" + "\n",
}
"""Files of the wrong kind."""
JOBS = [("method=swa", "budget=0.2"), ("method=swa", "budget=0.3"), ("method=random", "budget=0.2")]

# A line a case: words of a command | how its line begins ... what else is in it. XXX stands for 300 x.
SETTINGS = r"""
model=null | model=null: not a choice; choose from decoder, emu3_gen,
eval=null | eval=null: not a choice;
model=[infinity_tiny,var_tiny] | model=[infinity_tiny,var_tiny]: not a choice;
~shard.count | shard.count: missing;
~method | method: missing;
~method._target_ | method._target_=null: not a class;
shard=3 | shard=3: must be a group of keys (index, count)
windows.kernel=4 | windows.kernel=4: must be a whole number of at least 1, odd
budget_unit=bits | budget_unit=bits: no such value; did you mean bytes? choose from tokens, bytes
device=mps | device=mps: only auto, cpu, cuda and cuda:N are supported
task=plan device=h201 | device=h201: only auto, cpu, cuda and cuda:N are supported; with task=plan also a100, l40s,
device=cuda:99 | device=cuda:99: torch finds
method._target_=kvbench.nothing.X | method._target_=kvbench.nothing.X: cannot be imported
method._target_=os.getcwd | method._target_=os.getcwd: set method= for a concrete class with needs, prepare, keep
model._target_=kvbench.models.base.Model | model._target_=kvbench.models.base.Model: set model= for a concrete class
method=lookm method@method.base=streaming_llm | method.base._target_=kvbench.methods.streaming_llm.StreamingLLM: must
+eval.x._target_=os.getcwd | eval.x._target_=os.getcwd: set eval= for a concrete class with metrics, run
model.sources=null | model.sources=null: must be a group of keys
method=heatkv method.orders=../files/deep.json | method.orders=../files/deep.json: cannot be read
method=scalekv method.budgets=../files/deep.json | method.budgets=../files/deep.json: not a budget file
prompts.count=99999999999999 | prompts.count=99999999999999: must be a whole number of at least 1 and at most 1000000
model=var_tiny prompts=imagenet prompts.per_class=1000000 | prompts.per_class=1000000: makes 1000000000 prompts, more
prompts=file prompts.path=../files/x.pdf | prompts.path=../files/x.pdf: must be .txt, .jsonl or .csv
prompts=file prompts.path=../files/binary.txt | prompts.path=../files/binary.txt: is not text
prompts=file prompts.path=../files/deep.jsonl | prompts.path=../files/deep.jsonl: line 1 is not
prompts=file prompts.path=../files/wide.csv | prompts.path=../files/wide.csv: line 2: prompt 'aaa
method=snapkv budget=0.1 method.window=10000 | method.window=10000: the largest segment has 144 tokens; use fewer
method=rkv budget=0.1 method.threshold=5 | method.threshold=5: is a cosine and must lie in -1..1
method=heatkv method.sinks=-1 | method.sinks=-1: infinity_tiny has 9 segments; use 0 to 8
method=heatkv sinks=9 | sinks=9: infinity_tiny has 9 segments; use 0 to 8
prompts=file | prompts.path: missing; set prompts.path=...
prompts=file prompts.path=XXX.txt | prompts.path=XXX.txt: cannot be read (
task=status work.folder=XXX | [Errno 36] File name too long: 'xxx
prompts=file prompts.path=../files/null.jsonl | prompts.path=../files/null.jsonl: line 2: `prompt` must be a
prompts=file prompts.path=../files/half.jsonl eval=geneval | prompts.path=../files/half.jsonl: line 2: eval=geneval:
prompts=file prompts.path=../files/good.txt prompts.count=3 | prompts.count=3: ../files/good.txt has 1 prompts;
-m method=glob(zz*) | method=glob(zz*): matches no choice; choose from adakv,
model.sizes=[[1,1],[2,2]] | model.sizes=[[1, 1], [2, 2]]: must end with [12, 12],
method=heatkv method.order=x | method.order: no such key; did you mean method.orders?
model= | model=: no such choice; choose from decoder,
model=reasoner_tiny model.default_eval=nothing | model.default_eval=nothing: not a choice; choose ... list metrics
method=heatkv budget=3 budget_unit=bytes | budget=3 budget_unit=bytes: 1 sink scales need 1 of 255 tokens per head;
model=reasoner_tiny prompts=math_tiny model.tensor_parallel=3 | model.tensor_parallel=3: must divide
model.name=../../evil | model.name=../../evil: must be a folder name
runs_dir="" | runs_dir=: names no folder; use runs_dir=.
runs_dir=../files/plain/runs | runs_dir=../files/plain/runs: cannot be written
calibrate.orders=../files/plain/x.json | calibrate.orders=../files/plain/x.json: cannot be written
task=evaluate | task=evaluate: runs/infinity_tiny/full-
model=infinity_tiny prompts=file prompts.path=../files/mine.txt prompts.per_prompt=2 | ... line 3: prompt 'an astronaut
model=llamagen_tiny prompts=file prompts.path=../files/mine.txt prompts.per_prompt=1 | ... line 3: prompt 'an astronaut
budgt=0.04 | budgt: no such key; did you mean budget?
count=8 | count: no such key; did you mean prompts.count or calibrate.count or shard.count?
method=heatkv naive=true | naive: no such key; did you mean method.naive?
prompts=own prompts.of=scenes prompts.count=4 | prompts.count: no such key; did you mean prompts.of.count?
budget=0.1,0.2 | budget=0.1,0.2: several values are a sweep; add -m
method=heatkv budget=0.001 | ... the smallest feasible budget is 0.00393, or lower `sinks`
task=plan method=ams_kv | task=plan: how much method=ams_kv holds depends on data
model=llamagen_tiny method=scalekv eval=none | method=scalekv: is for next-scale models and
method=linear_ar | method=linear_ar: is for next-token models and infinity_tiny is a next-scale
model=infinity_2b | model.sources.transformer: weights missing
task=report | runs_dir=runs: holds no finished runs
task=plan plan.export=nowhere/x.npz | plan.export=nowhere/x.npz: method=full has no schedule
task=profile profile.largest=true | profile.largest=true: is for GPUs, not for device=cpu; use device=cuda
task=profile model=infinity_2b | ... to time the model without weights, set model.weights=random
task=export export.policy=x.safetensors method=snapkv | export.policy=x.safetensors: method=snapkv decides from the
method=heatkvv | method=heatkvv: no such choice; did you mean heatkv? choose from heatkv, ... kvbench list methods
eval=[psnr,fdi] | eval=fdi
task=rnu | task=rnu: no such value; did you mean run? choose from run, ... ; all: kvbench list tasks
cache_dtype=int5 | cache_dtype=int5
cuda_graph=true | cuda_graph=true: device=cpu has no CUDA graphs; use device=cuda
batch_invariant=true | batch_invariant=true: is for GPUs, not for device=cpu; use device=cuda
seed=abc | seed=abc: must be a whole number
shard.index=2 | shard.index=2: must be in 0..0
task=plan plan.table=ams_kv_table1 | plan.table=ams_kv_table1: no such memory column
-m seed=1,2 published=heatkv_tabel1 | published=heatkv_tabel1: no such table; did you mean heatkv_table1? choose from
eval.ssim.double=3 | eval.ssim.double=3: must be true or false
require=fid | require=fid: must be a list (text each)
a=b=c | a=b=c
model=var_tiny prompts=imagenet eval=none | ... var_tiny needs a class number from 0 to 29 (-1 for none)
-m method=full,heatkv budget=0.1,0.2 batch_size=4,0 | batch_size=0: must be a whole number of at least 1
"""
"""Settings, files, and what does not fit together."""
WORDS = r"""
publsh x | publsh: no such command; did you mean publish? there are list, ... ; settings are key=value
Report | Report: no such command; did you mean task=report?
list method | list method: not a kind and words; did you mean methods? kvbench list methods|
list prompts zz | list prompts zz: no line matches;
task=repot --help | task=repot: no such task; did you mean report?
method=heatkvv -h | method=heatkvv: no such choice; did you mean heatkv?
task=choose metric=psnr | budget=1.0: a race among full caches; give a smaller one
task=choose metric=psnr shard.count=2 | shard.count=2: processes share a race without shards;
--resolve | The --resolve flag can only be used in conjunction with --cfg
--nokey | --nokey: no such option; there are -m,
--config-name=nope | --config-name=nope: no such option;
--cfg nope | --cfg: invalid choice: 'nope' (choose from
method=heatkv.yaml | method=heatkv.yaml: not the name of a choice; set method=heatkv
method=../method/heatkv | method=../method/heatkv: not the name of a choice; set method=heatkv
eval=[psnr,psnr] | eval=[psnr,psnr]: names psnr twice; leave one out
=3 | =3: has no key;
-m budget=range(1,0) | budget=range(1,0): matches no value; give at least one
-m seed=range(0,10,0) | seed=range(0,10,0): must have finite ends and a step other than 0
-m seed=1,2 beside=full | beside: jobs beside a sweep have their own method; set beside.method
-m method=swa beside.method=swaa | method=swaa: no such choice; did you mean swa?
method=swa beside.method=full | beside.method=choice(full): several values are a sweep; add -m
-m seed=interval(0,1) | seed=interval(0,1): a sweep needs single values;
-m seed=range(0,1000) budget=range(0,1,0.001) | the lists of values make 1000000 jobs;
budget='1e9999999999' | budget=1e9999999999: give a fraction
budget=3/2 | budget=3/2: above 1 it is a number of tokens per head and must be whole
-m seed=1,2 against=nope | against=nope: neither a method nor the folder of a run in runs; choose from 
task=plan plan.export=x.txt | plan.export=x.txt: must be a file name that ends with .npz
task=report output= | output=: names no folder; use output=.
task=report report.rows=budget | report.columns=budget: must differ from report.rows
task=report report.metrics=[psnr,psnr] | report.metrics=['psnr', 'psnr']: names a metric twice
task=dashboard dashboard.bundle=true dashboard.watch=true | dashboard.bundle=true: ... leave out dashboard.watch
hydra.verbose=3 | hydra.verbose=3: must be true, false or one or more logger names
-m seed=1,2 hydra/launcher=rya | hydra/launcher=rya: no such choice; did you mean ray? choose from basic, joblib,
method=swa work.wait=false | work.wait=false: only for sweeps (-m) and task=work
-m method=swa budgit=0.2 work.wait=false | budgit: no such key
-m seed=1,2 hydra.launcher=null | hydra.launcher: must be a group of keys
~method.seed | method.seed: no such key
batch_size=${nope} | batch_size: Interpolation key 'nope' not found
sweeps=first_light | sweeps=first_light: has a file for each model; add model=; there are infinity_2b, 
-m sweeps=first_light model=emu3_gen | sweeps=first_light: has no file for model=emu3_gen; there are infinity_2b, 
-m sweeps=nothing | sweeps=nothing: no such choice; choose from ... ; all: kvbench list sweeps
task=bounds method=random | task=bounds: compares full caches in 16 or 32 bits; leave out method=random
task=work work.lapse=1e300 | work.lapse=1e+300: must be a number above 0 and at most 86400
task=status | runs_dir=runs: holds no sweeps, and no run is in progress
task=status method=swa,rkv | runs_dir=runs: holds no runs
-m seed=1,2 sweep.name=a/b | sweep.name=a/b: must be up to 100 letters
task=status work.folder=nowhere | work.folder=nowhere: no such folder
+sampling.x=1 | sampling={'x': 1}: must be a choice of conf/sampling
task=dashboard runs_dirs=[published/*] | runs_dirs=published/*: names no folder
hydra.searchpath=[pkg://nowhere] | hydra.searchpath: pkg://nowhere cannot be imported (ModuleNotFoundError:
hydra.searchpath=[file://nowhere] | hydra.searchpath: file://nowhere is not a folder; name a folder (file://folder),
new | new: not a kind and a name; kvbench new method NAME
new method Mine | ... not a module's name; use lower-case letters, digits and single _
new method class | new method class: not a module's name
new method heatkv | new method heatkv: method=heatkv exists
new method shared | new method shared: kvbench.methods.shared is importable already
new package numpy | new package numpy: numpy is importable already
new method mine | ... is neither a checkout of kvbench nor a package with an entry point kvbench.plugins
smoke=3 | smoke=3 ... must be true or false
-sc | Expecting one subcommand from ['install', 'uninstall', 'query'] to be set
-sc install=tcsh | No completion plugin for 'tcsh' found, available : bash fish zsh
"""
"""Options, lists of a sweep, and commands."""
VERBS = r"""
work.workers=2 | work.workers=2: hydra/launcher=basic starts one worker
work.do=end | work.do=end: must be one of pause, resume, requeue, drop, stop
work.do=stop work.run=1 | work.run=1: only for work.do=drop and
work.do=drop | work.run: missing; choose from 0 (method=swa budget=0.2), 1
work.do=drop work.run=7 | work.run=7: names no run of this sweep; choose from
"""
"""Verbs of `task=work` on a sweep of `JOBS`."""
SOURCES = r"""
| from: missing; task=merge from=other/runs names a folder
from=nowhere | from=nowhere: no such folder
from=3 | from=3: must be a folder of runs or a list of them
from=runs | from=runs: is runs_dir itself
from=empty | from=empty: holds no runs;
"""
"""Folders of `task=merge`, beside an empty one."""


def read_rows(text: str) -> Iterator[tuple[str, str]]:
    """The words of each line, and what is told of them."""
    for line in text.strip().splitlines():
        words, _, told = line.replace("XXX", "x" * 300).partition("|")
        yield words.strip(), told


def mark_rows(text: str) -> Iterator[Any]:
    """The rows of a table, of which `make test` runs the first of each key."""
    keys = set()
    for words, told in read_rows(text):
        key = words.split()[-1].partition("=")[0].lstrip("+~").partition(".")[0]
        yield pytest.param(words, told, marks=[pytest.mark.slow] if key in keys else [])
        keys.add(key)


@pytest.fixture
def refuse(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in a folder beside the files and compares its line; nothing more may be left there."""
    for name in ("here", "files"):
        (tmp_path / name).mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "files" / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def call(words: str, told: str) -> None:
        monkeypatch.chdir(tmp_path / "here")
        before = sorted(Path().rglob("*"))
        status, _, err = command(*words.split())
        [line] = [line for line in err.splitlines() if line.startswith("error: ")]
        assert err.endswith(f"{line}\n")
        begin, *others = told.split(" ... ")
        assert (status, line.startswith(f"error: {begin.strip()}")) == (1, True), line
        assert all(other in line for other in others), line
        assert sorted(Path().rglob("*")) == before

    return call


@pytest.mark.parametrize(("words", "told"), mark_rows(SETTINGS))
def test_settings(refuse: Any, words: str, told: str) -> None:
    refuse(words, told)


@pytest.mark.parametrize(("words", "told"), read_rows(WORDS))
def test_words(refuse: Any, words: str, told: str) -> None:
    refuse(words, told)


@pytest.mark.parametrize(("words", "told"), read_rows(VERBS))
def test_verbs(refuse: Any, tmp_path: Path, words: str, told: str) -> None:
    folder = open_folder(tmp_path / "here" / "runs", JOBS)
    refuse(f"task=work work.folder={folder} {words}", told)


@pytest.mark.parametrize(("words", "told"), read_rows(SOURCES))
def test_sources(refuse: Any, tmp_path: Path, words: str, told: str) -> None:
    for name in ("runs", "empty"):
        (tmp_path / "here" / name).mkdir()
    refuse(f"task=merge {words}", told)
