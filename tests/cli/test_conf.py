"""Every configuration file composes and builds its object; sweeps name what exists."""

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_values
from kvbench.cli.config.messages import check_arguments
from kvbench.core.segments import ModelSpec
from kvbench.core.settings import Settings
from kvbench.eval.protocol.scores import MetricSpec
from kvbench.methods.shared.base import Method
from kvbench.report.papers.comparison import BASELINE_METHODS
from kvbench.report.papers.published import find
from tests.support.marks import slow_except
from tests.support.methods import class_of, list_variants, methods_for
from tests.support.places import ROOT

CONF = ROOT / "conf"
MODELS, METHODS, PROMPT_SETS, EVALS, LOGGERS, RECIPES = (
    [(group, path.stem) for path in sorted((CONF / group).glob("*.yaml"))]
    for group in ("model", "method", "prompts", "eval", "logger", "train")
)
TOGETHER = [
    *(
        [choice for choice in row if choice]
        for row in zip_longest(MODELS, METHODS, PROMPT_SETS, EVALS, LOGGERS)
    ),
    *([recipe] for recipe in RECIPES),
]
"""Every file once; those of different groups are composed together."""
QUICK = {
    ("model", "decoder"), ("model", "infinity_tiny"), ("method", "heatkv"), ("prompts", "own"), ("eval", "psnr"),
    ("logger", "wandb"), ("train", "reasoner_tiny"),
}  # fmt: skip
"""Files that `make test` composes, with those beside them."""
SWEEPS, METHOD_SWEEPS, ALL_SWEEPS = (
    sorted((CONF / "sweeps").glob(pattern)) for pattern in ("*.yaml", "methods/*.yaml", "**/*.yaml")
)
OWN = ("budget", "calibrations", "emu3_gen", "equal_bytes", "full_bits", "pricekv_prompts")
"""Sweeps of no paper's table."""


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def composed(*overrides: str) -> DictConfig:
    with hydra_of_kvbench():
        return compose_job(list(overrides))[0]


def read_sweep(path: Path) -> tuple[dict[str, str], str]:
    """What a sweep's jobs differ by, also in the sweep that it builds on, and the name of their model."""
    file = OmegaConf.load(path)
    entries = file.get("defaults", [])
    bases = [CONF / "sweeps" / f"{one}.yaml" for one in entries if isinstance(one, str)]
    params = {key: value for base in bases if base.is_file() for key, value in read_sweep(base)[0].items()}
    params |= {key: str(value) for key, value in file.hydra.sweeper.params.items()}
    models = [one["override /model"] for one in entries if "override /model" in one]
    return params, params.get("model", models[0] if models else "infinity_tiny")


def values(cfg: DictConfig) -> dict[str, object]:
    return dict(read_values(cfg))


PER_PROMPT = {"imagereward": 10, **dict.fromkeys(("dpg", "geneval", "oneig", "unigenbench"), 4)}
"""Images of a prompt in the protocols of benchmarks."""
MORE = {
    ("prompts", "own"): ["prompts@prompts.of=scenes"],
    ("prompts", "file"): ["prompts.path=my.txt"],
    ("prompts", "ruler"): ["prompts.path=my.jsonl"],
    ("model", "decoder"): [
        "model.sources.weights.path=pkg://kvbench/assets/reasoner_tiny/model",
        "model.name=decoder",
    ],
}
"""Settings that the file of a choice requires from the command, by group and choice."""


@pytest.mark.parametrize(
    "choices",
    slow_except(lambda choices: not QUICK.isdisjoint(choices), TOGETHER),
    ids=lambda choices: " ".join(map("=".join, choices)),
)
def test_every_file_builds_its_object(choices: list[tuple[str, str]], tmp_path: Path) -> None:
    task = "train" if "train" in dict(choices) else "run"
    more = [word for choice in choices for word in MORE.get(choice, ())]
    if dict(choices).get("train", "").startswith("infinity_emoji"):
        more.append(f"train.pictures={tmp_path}")
    cfg = composed(*map("=".join, choices), f"task={task}", *more)
    Settings.of(values(cfg))
    for group, choice in choices:
        check_object(group, choice, cfg.get(group))


def check_object(group: str, choice: str, node: Any) -> None:
    """The object of a choice is of its group's kind."""
    if group == "eval":
        objects = {name: instantiate(entry) for name, entry in (node or {}).items()}
        assert all(isinstance(q, MetricSpec) for one in objects.values() for q in one.metrics.values())
    elif group == "model":
        model = instantiate(node)
        assert isinstance(model.spec, ModelSpec)
        assert model.name == choice
    elif group == "method":
        assert isinstance(instantiate(node), Method)
    elif group == "prompts":
        assert getattr(instantiate(node), "per_prompt", 1) == PER_PROMPT.get(choice, 1)
    elif node is not None:
        instantiate(node)


def test_every_sweep_names_choices_that_exist() -> None:
    for path in ALL_SWEEPS:
        params, _ = read_sweep(path)
        entries = [entry for entry in OmegaConf.load(path).get("defaults", []) if not isinstance(entry, str)]
        for key, value in [*params.items(), *(pair for entry in entries for pair in entry.items())]:
            folder = CONF / key.removeprefix("beside.").rpartition("/")[2]
            names = re.findall(r"[\w/]+", str(value)) if folder.is_dir() else []
            assert all((folder / f"{name}.yaml").is_file() for name in names), (path, key)


@pytest.mark.parametrize(
    "path",
    slow_except(lambda path: path.stem == "heatkv_table1", ALL_SWEEPS),
    ids=lambda path: f"{path.parent.stem}/{path.stem}",
)
def test_every_job_of_a_sweep_composes(path: Path) -> None:
    name = path.relative_to(CONF / "sweeps").with_suffix("")
    params, _ = read_sweep(path)
    words = [f"{key}={value}" for key, value in params.items() if key != "cuda_graph"]  # an error on a CPU
    assert check_arguments([f"sweeps={name}", *words]) is None


def test_a_sweep_ends_with_the_table_it_is_named_after() -> None:
    for path in SWEEPS:
        if path.stem in OWN:
            continue
        params, _ = read_sweep(path)
        table = find(OmegaConf.load(path).published)
        assert table.name == path.stem
        for key in table.keys:
            swept = params.get(key.replace("latency.batch", "batch_size"), "").split(",")
            if swept != [""] and key != "budget":
                printed = {value for where in table.rows for value in where.get(key, swept)}
                assert set(swept) - {*BASELINE_METHODS} <= printed, path


QUALITY = {path.stem for path in SWEEPS} - {
    "ams_kv_table6", "full_bits", "headkv_table4", "headkv_table6", "heatkv_fig6", "hard_kv_fig19",
}  # fmt: skip
"""Sweeps that compare the quality of methods; docs/reproduction.md and docs/tables.md say why the others do not."""


def test_a_sweep_that_compares_quality_has_what_looks_at_nothing() -> None:
    for path in SWEEPS:
        params, model = read_sweep(path)
        methods = {name for key in ("method", "beside.method") for name in params.get(key, "").split(",")}
        wanted = {*BASELINE_METHODS} if model.startswith(("infinity", "var")) else {"random"}
        assert methods & {*BASELINE_METHODS} == (wanted if path.stem in QUALITY else set()), path


@pytest.mark.parametrize(("model", "sinks"), [("infinity_2b", 3), ("var_d30", 2)])
def test_sinks_come_from_the_model_unless_set(model: str, sinks: int) -> None:
    for words, expected in (((), sinks), (("sinks=1",), 1)):
        assert instantiate(composed(f"model={model}", "method=heatkv", *words).method).sinks == expected


@pytest.mark.slow
@pytest.mark.parametrize(("protect", "h2o", "ams", "leading"), [("equal", 3, 3, 2), ("paper", 0, 2, 0)])
def test_protect_says_who_keeps_leading_scales_and_first_tokens(
    protect: str, h2o: int, ams: int, leading: int
) -> None:
    expected = {"swa": 0, **dict.fromkeys(("h2o", "hackpp", "rkv", "scalekv", "snapkv"), h2o)}
    expected |= dict.fromkeys(("ams_kv", "ams_kv_fixed", "hack"), ams)
    expected |= dict.fromkeys(("random", "streaming_llm", "heatkv", "binary_heatkv"), 3)
    for name, sinks in expected.items():
        node = composed(f"method={name}", "sinks=3", f"protect={protect}").method
        assert node.get("sinks", node.get("condensed")) == sinks, name
    for name, tokens in {"h2o": leading, "hard_kv": 2, "random": leading, "pricekv/blocks": leading}.items():
        words = (f"method={name}", f"protect={protect}", "protect.leading=2")
        assert composed(*words, "model=reasoner_tiny").method.leading == tokens, name


NO_BUDGET = {"ams_kv", "scale_groups", "diagonal", "sta", "sparvar", "quest"}
"""Methods that hold what their rule says, or everything."""
OF_SCALES = {"first_scales", "heatkv", "heatkv_naive", "binary_heatkv", "binary_heatkv_naive"}
"""Methods by scales, which elsewhere are rows of an image or parts of a text; `heatkv` stands for them there."""
LEFT_OUT = {
    "infinity_tiny": NO_BUDGET | {"binary_heatkv_naive"},
    "llamagen_tiny": NO_BUDGET | OF_SCALES | {"hard_kv"},
    "reasoner_tiny": NO_BUDGET | OF_SCALES | {"ssd", "forecast"},
}


def methods_of(path: Path) -> set[str]:
    return set(OmegaConf.load(path).hydra.sweeper.params.method.split(","))


@pytest.mark.parametrize("path", METHOD_SWEEPS, ids=lambda path: path.stem)
def test_every_method_that_fits_is_there(path: Path) -> None:
    family = "next-scale" if path.stem == "infinity_tiny" else "next-token"
    own = {name for name in methods_for(family) if class_of(name).__module__.startswith("kvbench.")}
    named = {name for name in methods_of(path) if "/" not in name} - {"heatkv"}
    assert named == own - LEFT_OUT[path.stem] - {"heatkv"}
    priced = {name for name in list_variants() if name.startswith("pricekv/") and "menu" not in name}
    of_images = set() if path.stem != "reasoner_tiny" else {"pricekv/by_score", "pricekv/by_token"}
    assert {name for name in methods_of(path) if name.startswith("pricekv/")} == priced - of_images
