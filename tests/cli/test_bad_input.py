"""Whatever is wrong with a command: one line that names the key, before any work, and nothing left behind."""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli import app as cli
from kvbench.cli.config.compose import check_runs_dir, compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.messages import describe_error, is_expected
from kvbench.cli.tasks.job import make_job
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.runs.check import check_job
from tests.support.marks import slow_but_every

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder beside one with files of the wrong kind."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "deep.json").write_text(DEEP)
    (tmp_path / "files" / "x.pdf").write_bytes(b"%PDF-1.4\n")
    (tmp_path / "files" / "binary.txt").write_bytes(b"a red circle\n\0\n")
    (tmp_path / "files" / "deep.jsonl").write_text(DEEP + "\n")
    (tmp_path / "files" / "wide.csv").write_text('prompt\n"' + "a" * 200_000 + '"\n')
    (tmp_path / "files" / "plain").write_text("")
    (tmp_path / "files" / "null.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": null}\n')
    counted = '{"prompt": "a red circle", "tag": "counting", "include": [{"class": "circle", "count": 1}]}\n'
    (tmp_path / "files" / "nan.jsonl").write_text('{"prompt": "a red ring", "level": NaN}\n')
    (tmp_path / "files" / "half.jsonl").write_text(counted + '{"prompt": "a red circle"}\n')
    (tmp_path / "files" / "tags.jsonl").write_text(counted + counted.replace("counting", "sums"))
    (tmp_path / "files" / "good.txt").write_text("a red circle\n")
    os.mkfifo(tmp_path / "files" / "pipe.txt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("command", "told"),
    slow_but_every(
        8,
        [
            ("model=null", "model=null: not a choice; choose from decoder, emu3_gen, "),
            ("method=null", "method=null: not a choice; choose from adakv, "),
            ("prompts=null", "prompts=null: not a choice; choose from aime24, "),
            ("eval=null", "eval=null: not a choice; "),
            ("method=3", "method=3: not a choice; "),
            ("model=[infinity_tiny,var_tiny]", "model=[infinity_tiny,var_tiny]: not a choice; "),
            ("hydra/job_logging=null", "hydra/job_logging=null: not a choice; "),
            ("~seed", "seed: missing; "),
            ("~shard", "shard: missing; "),
            ("-m --cfg job", "--multirun and --cfg: exclude each other; leave out --multirun"),
            ("--info all --cfg job", "--cfg and --info: exclude each other; "),
            ("~shard.count", "shard.count: missing; "),
            ("~method", "method: missing; "),
            ("~eval", "eval: missing; set it, or set eval=none"),
            ("~method._target_", "method._target_=null: not a class; "),
            ("shard=3", "shard=3: must be a group of keys (index, count)"),
            ("shard=null", "shard=null: must be a group of keys"),
            (
                "calibrate=null",
                "calibrate=null: must be a group of keys (count, prompts, seed, batch_size, orders)",
            ),
            ("task=plan plan=null", "plan=null: must be a group of keys"),
            ("budget_unit=bits", "budget_unit=bits: must be one of tokens, bytes"),
            ("budget_unit=null", "budget_unit=null: must be text"),
            (
                "budget_unit=bytes budget=2.5",
                "budget=2.5 budget_unit=bytes: above 1 it is a number of bytes of a sequence",
            ),
            ("device=mps", "device=mps: only auto, cpu, cuda and cuda:N are supported"),
            ("device=meta", "device=meta: only auto, cpu, cuda"),
            ("device=xla", "device=xla: only auto, cpu, cuda"),
            ("device=hpu", "device=hpu: only auto, cpu, cuda"),
            ("device=cpu:5", "device=cpu:5: only auto, cpu, cuda"),
            ("device=cuda:99", "device=cuda:99: torch finds "),
            ("method._target_=os.getcwd", "method._target_=os.getcwd: not a class with needs, prepare, keep"),
            (
                "model._target_=builtins.dict",
                "model._target_=builtins.dict: not a class with spec, load, generate",
            ),
            ("prompts._target_=builtins.dict", "prompts._target_=builtins.dict: not a class with load"),
            ("method._target_=kvbench.models.base.Model", "method._target_=kvbench.models.base.Model: not"),
            ("model._target_=kvbench.models.base.Model", "model._target_=kvbench.models.base.Model: not"),
            (
                "method=lookm method@method.base=streaming_llm",
                "method.base._target_=kvbench.methods.streaming_llm.StreamingLLM: must derive from Scored; choose "
                "another",
            ),
            ("+eval.x._target_=os.getcwd", "eval.x._target_=os.getcwd: not a class with metrics, run"),
            ("+eval.x=3", "eval.x._target_=null: not a class"),
            ("model.sources=null", "model.sources=null: must be a group of keys"),
            ("model.sources.text=null", "model.sources.text=null: must be a group of keys"),
            (
                "method=heatkv method.orders=../files/deep.json",
                "method.orders=../files/deep.json: cannot be read",
            ),
            (
                "method=scalekv method.budgets=../files/deep.json",
                "method.budgets=../files/deep.json: not a budget file",
            ),
            ("seed=99999999999999999999999", "seed=99999999999999999999999: must be at most "),
            (
                "calibrate.seed=99999999999999999999999",
                "calibrate.seed=99999999999999999999999: must be at most ",
            ),
            ("prompts.seed=-1", "prompts.seed=-1: must be at least 0"),
            ("prompts.count=99999999999999", "prompts.count=99999999999999: must be at most 1000000"),
            ("calibrate.count=99999999999999", "calibrate.count=99999999999999: must be at most 10000"),
            (
                "model=var_tiny prompts=imagenet prompts.per_class=1000000",
                "prompts.per_class=1000000: makes 1000000000 prompts, a run has at most 1000000",
            ),
            (
                "prompts=file prompts.path=../files/x.pdf",
                "prompts.path=../files/x.pdf: must be .txt, .jsonl or .csv",
            ),
            (
                "prompts=file prompts.path=../files/binary.txt",
                "prompts.path=../files/binary.txt: is not text",
            ),
            (
                "prompts=file prompts.path=../files/deep.jsonl",
                "prompts.path=../files/deep.jsonl: line 1 is not",
            ),
            (
                "prompts=geneval prompts.path=../files/deep.jsonl",
                "prompts.path=../files/deep.jsonl: line 1 is not a GenEval line",
            ),
            (
                "prompts=file prompts.path=../files/wide.csv",
                "prompts.path=../files/wide.csv: line 2: prompt 'aaa",
            ),
            (
                "prompts=coco5k prompts.path=../files/deep.json",
                "prompts.path=../files/deep.json: cannot be read",
            ),
            (
                "method=snapkv budget=0.1 method.window=10000",
                "method.window=10000: the largest segment has 144 tokens",
            ),
            (
                "method=scalekv budget=0.1 method.window=10000",
                "method.window=10000: the largest segment has 144 tokens",
            ),
            (
                "method=rkv budget=0.1 method.threshold=5",
                "method.threshold=5: is a cosine and must lie in -1..1",
            ),
            ("method=heatkv method.sinks=-1", "method.sinks=-1: infinity_tiny has 9 scales"),
            ("method=snapkv method.sinks=-1", "method.sinks=-1: infinity_tiny has 9 scales"),
            ("method=heatkv sinks=9", "sinks=9: infinity_tiny has 9 scales"),
            ("method=ams_kv method.theta=nan", "method.theta=nan: must be finite"),
            ("task=plan plan.gpu_gib=inf", "plan.gpu_gib=inf: must be finite"),
            ("prompts=file", "prompts.path: missing; set prompts.path=..."),
            ("prompts=own", "prompts.of: missing; set prompts.of=..."),
            (f"prompts=file prompts.path={'x' * 300}.txt", f"prompts.path={'x' * 300}.txt: cannot be read ("),
            (f"task=status work.folder={'x' * 300}", "work.folder: a name of 300 characters is too long"),
            (
                "prompts=file prompts.path=../files/pipe.txt",
                "prompts.path=../files/pipe.txt: cannot be read ([Errno 22] not a regular file: ",
            ),
            (
                "prompts=file prompts.path=../files/null.jsonl",
                "prompts.path=../files/null.jsonl: line 2: `prompt` must be a non-empty text",
            ),
            (
                "prompts=file prompts.path=../files/half.jsonl eval=geneval",
                "prompts.path=../files/half.jsonl: line 2: eval=geneval: no tag, which other prompts have",
            ),
            (
                "prompts=file prompts.path=../files/nan.jsonl",
                "prompts.path=../files/nan.jsonl: line 1: nan is not a number that JSON can hold; use null",
            ),
            (
                "prompts=file prompts.path=../files/tags.jsonl eval=geneval",
                "prompts.path=../files/tags.jsonl: line 2: eval=geneval: not a GenEval line (needs a tag of single_obj",
            ),
            (
                "prompts=file prompts.path=../files/good.txt prompts.count=3",
                "prompts.count=3: ../files/good.txt has 1 prompts; prompts.count=null takes all",
            ),
            ("-m method=glob(zz*)", "method=glob(zz*): matches no choice; choose from adakv, "),
            (
                "-m method=swa,random hydra/launcher=joblib hydra.launcher.n_jobs=0",
                "hydra.launcher.n_jobs=0: must be at least 1, or -1",
            ),
            ("model.sizes=[[1,1],[2,2]]", "model.sizes=[[1, 1], [2, 2]]: must end with [12, 12], "),
            ("method.naiv=true", "method.naiv: no such key"),
            ("method=heatkv method.order=x", "method.order: no such key; did you mean method.orders?"),
            ("model=", "model=: no such choice; choose from decoder, "),
            ("budget=null", "budget=null: must be a number or text"),
            (
                "method=heatkv budget=3 budget_unit=bytes",
                "budget=3 budget_unit=bytes: 1 sink scales need 1 of 255 tokens per head; the smallest feasible "
                "budget is 9216 bytes of a sequence, or 0.00785",
            ),
            (
                "model=reasoner_tiny prompts=math_tiny model.tensor_parallel=3",
                "model.tensor_parallel=3: must divide model.transformer.heads=4",
            ),
            (
                "model=llamagen_tiny model.transformer.grid=[16]",
                "model.transformer.grid=[16]: must be a list of 2: [a whole number, a whole number]",
            ),
            (
                "model=reasoner_tiny prompts=math_tiny method=hard_kv budget=0.2 method.mix=7",
                "method.mix=7: must lie in [0, 1]",
            ),
            (
                "model=reasoner_tiny prompts=math_tiny method=hard_kv budget=0.2 method.protected=-1",
                "method.protected=-1: must be at least 0",
            ),
            ("model.name=../../evil", "model.name=../../evil: must be a folder name"),
            ("model.name=a/b", "model.name=a/b: must be a folder name"),
            ("model.name=..", "model.name=..: must be a folder name"),
            ('model.name=""', "model.name=: must be a folder name"),
            ('runs_dir=""', "runs_dir is empty"),
            ("runs_dir=../files/plain/runs", "runs_dir=../files/plain/runs: cannot be written"),
            (
                "calibrate.orders=../files/plain/x.json",
                "calibrate.orders=../files/plain/x.json: cannot be written",
            ),
            ("task=evaluate", "task=evaluate: runs/infinity_tiny/full-"),
            ("task=evaluate method=heatkv budget=0.1", "task=evaluate: "),
        ],
    ),
)
def test_bad_command(folder: Path, command: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *command.split()])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert str(leaving.value).startswith(f"error: {told}")
    assert "\n" not in str(leaving.value)
    assert list(folder.rglob("*")) == []


BASES = (
    ("method=heatkv", "budget=0.2"),
    ("method=scalekv", "budget=0.2"),
    ("method=snapkv", "budget=0.2", "eval=paired"),
    ("method=rkv", "budget=0.2"),
    ("method=h2o", "budget=0.2"),
    ("method=hack", "budget=0.3"),
    ("method=hackpp", "budget=0.3", "method.attention_budget=0.4"),
    ("method=ams_kv", "budget=0.5"),
    ("method=ams_kv_fixed", "budget=0.5", "logger=wandb"),
    ("method=random", "budget=0.2", "prompts=file", "prompts.path=../files/prompts.txt"),
    ("method=scale_groups",),
    ("model=var_tiny", "prompts=imagenet", "prompts.classes=[0,1]", "method=streaming_llm", "budget=0.3"),
)
APART = ("model", "prompts", "method", "eval", "logger", "protect", "windows", "train", "sweeps", "published")
"""Groups, of which only single values are replaced here, and a key that is not read without a table."""
BAD: tuple[object, ...] = (
    None, True, -1, 0, 7, 10**23, -(10**23), 1e308, float("nan"), float("inf"), -0.5, 2.5, "", "abc", "../../evil",
    "a\0b", "a\nb", "os.getcwd", "x" * 300, [], [None], [-1], [[1]], {}, {"x": 1}, {"_target_": "os.getcwd"},
)  # fmt: skip


def keys(node: object, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a configuration, without those of networks and recipes, which the models' tests have."""
    for name, value in node.items() if isinstance(node, dict) else ():
        key = f"{prefix}{name}"
        if key.startswith(("model.transformer", "model.tokenizer", "model.sizes", "train", "sweeps")):
            continue
        if key not in APART:
            yield key
        if "_target_" not in key:
            yield from keys(value, f"{key}.")


def named(key: str, line: str) -> bool:
    """Whether a line names a key, a key that is checked with it, or the object that could not be made with it."""
    also = {
        "model.default_sinks": "sinks=",
        "protect.sinks": "method.sinks=",
        "protect.condensed": "method.condensed=",
        "protect.leading": "method.leading=",
        "protect.initial": "method.sinks=",
        "model.default_alpha": "method.alpha=",
        "model.default_tau": "method.tau=",
        "eval.geneval.detector.path": "eval.geneval.detector: ",
    }
    sampling = key.startswith("model.sampling") and line.startswith("model.sampling")
    target = key.endswith("._target_") and line.startswith(key.removesuffix("._target_") + ": ")
    sinks = key == "model.default_sinks" and "lower `sinks`" in line
    return key in line or target or sampling or sinks or line.startswith(also.get(key, key))


def prepare_job(cfg: DictConfig) -> None:
    """Do everything that a run does before it reads weights."""
    settings = read_settings(cfg)
    check_runs_dir(settings)
    job = make_job(cfg, settings)
    check_job(job)
    json.dumps(dict(job.config), allow_nan=False)
    needs, spec = job.method.needs(), job.model.spec
    artifact = None
    if isinstance(needs, Observer):
        needs.prepare(spec)
        artifact = Artifact(needs.kind, needs.average())
    job.method.prepare(spec, job.allowance.requested, artifact)
    assert (settings.runs_dir / job.model.name).resolve().parent == settings.runs_dir.resolve()


@pytest.fixture
def bases(folder: Path) -> Iterator[list[DictConfig]]:
    (folder.parent / "files" / "prompts.txt").write_text("a red circle\na blue ring\n")
    with hydra_of_kvbench():
        composed = [compose_job(list(base))[0] for base in BASES]
        yield composed


def find_fault(cfg: DictConfig, key: str) -> str | None:
    """What is wrong with how a configuration is told off; an empty text for one that is valid, None for a good line."""
    try:
        try:
            prepare_job(cfg)
        except Exception as error:
            if not is_expected(error):
                raise
            line = describe_error(error)
            return None if named(key, line) and "\n" not in line else line
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_four_hundred_bad_values_are_refused_or_valid(bases: list[DictConfig], folder: Path) -> None:
    rng, refused, faults = random.Random(0), 0, []
    for _ in range(400):
        cfg = rng.choice(bases).copy()
        key = rng.choice(list(keys(OmegaConf.to_container(cfg, resolve=False))))
        value = rng.choice(BAD)
        with open_dict(cfg):
            OmegaConf.update(cfg, key, value, merge=False)
        fault = find_fault(cfg, key)
        refused += fault is None
        if fault or list(folder.iterdir()):
            faults.append(f"{cfg.method._target_}: {key}={value!r:.40}: {fault}")
    assert not faults, "\n".join(faults)
    assert refused > 250


def test_a_job_uses_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated: Triton launches on the current device."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    chosen: list[object] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32
    )  # and then restored
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    with hydra_of_kvbench():
        cfg, _ = compose_job(["device=cuda:1"])
        make_job(cfg, read_settings(cfg))
    assert chosen == [1]
