"""Any wrong value of a composed configuration is refused in one line that names its key."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli.config.checks import check_runs_dir
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.messages import describe_error, is_expected
from kvbench.cli.tasks.job import make_job
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.runs.check import check_job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder beside one with a file of prompts."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "prompts.txt").write_text("a red circle\na blue ring\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


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
    job.method.prepare(spec, job.budget, artifact)
    assert (settings.runs_dir / job.model.name).resolve().parent == settings.runs_dir.resolve()


def find_fault(cfg: DictConfig, key: str) -> str | None:
    """What is wrong with how a configuration is told off; an empty text for one that is valid, None for a good line."""
    try:
        prepare_job(cfg)
    except Exception as error:
        if not is_expected(error):
            return f"{type(error).__name__}: {error}"
        line = describe_error(error)
        return None if named(key, line) and "\n" not in line else line
    return ""


@pytest.mark.slow
def test_four_hundred_bad_values_are_refused_or_valid(folder: Path) -> None:
    rng, refused, faults = random.Random(0), 0, []
    with hydra_of_kvbench():
        bases = [compose_job(list(base))[0] for base in BASES]
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


@pytest.mark.parametrize("answer", ["written", "read"])
def test_a_job_fits_its_prompts_to_its_model(answer: str) -> None:
    words = [
        "model=qwen3_8b",
        "model.weights=random",
        "prompts=needles",
        "prompts.count=2",
        "prompts.length=150",
    ]
    with hydra_of_kvbench():
        cfg, _ = compose_job([*words, f"prompts.answer={answer}"])
        job = make_job(cfg, read_settings(cfg))
    for prompt in (*job.prompts, *job.calibration_prompts):
        asked = prompt.text if prompt.reading is None else prompt.reading.parts[0].text
        assert len(asked.split()) == 150  # words are the tokens of random weights
    assert job.reads == (answer == "read")


def test_a_job_uses_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated: Triton launches on the current device."""
    chosen: list[str] = []
    monkeypatch.setattr("kvbench.cli.tasks.job.use_device", chosen.append)
    with hydra_of_kvbench():
        cfg, _ = compose_job(["device=cuda:1"])
        make_job(cfg, read_settings(cfg))
    assert chosen == ["cuda:1"]
