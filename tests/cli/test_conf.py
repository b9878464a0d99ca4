"""Every configuration file composes and builds its object; sweeps name what exists."""

import json
import logging
import logging.config
import sys
from functools import cache
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
from kvbench.methods.heatkv.method import HeatKV
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
    ("model", "decoder"), ("model", "infinity_tiny"), ("model", "qwen3_4b"), ("method", "full"), ("method", "heatkv"),
    ("method", "hard_kv"), ("prompts", "own"), ("prompts", "imagenet"), ("eval", "fid"), ("eval", "psnr"),
    ("logger", "wandb"), ("train", "reasoner_tiny"),
}  # fmt: skip
"""Files that `make test` composes, with those beside them."""
SWEEPS, METHOD_SWEEPS = (
    sorted(folder.glob("*.yaml")) for folder in (CONF / "sweeps", CONF / "sweeps/methods")
)
OWN = ("budget", "calibrations", "emu3_gen", "equal_bytes", "full_bits", "pricekv_prompts")
"""Sweeps of no paper's table."""


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def composed(*overrides: str) -> DictConfig:
    with hydra_of_kvbench():
        return compose_job(list(overrides))[0]


def read_sweep(path: Path) -> tuple[dict[str, str], str, str | None]:
    """What a sweep's jobs differ by, the name of their model, and the table that the sweep prints."""
    file = OmegaConf.load(path)
    params = {key: str(value) for key, value in file.hydra.sweeper.params.items()}
    models = [one["override /model"] for one in file.get("defaults", []) if "override /model" in one]
    return params, params.get("model", models[0] if models else "infinity_tiny"), file.get("published")


def values(cfg: DictConfig) -> dict[str, object]:
    return dict(read_values(cfg))


CAPTIONS = [{"image_id": number, "caption": "a dog"} for number in range(2)]
COCO = json.dumps({"images": [{"id": 0}, {"id": 1}], "annotations": CAPTIONS})
TAGGED = json.dumps({"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a dog"})
ASKED = {"atom_count": 1, "vqa_list": [["Is there a dog?", "Yes"]], "skills": ["object"]}
WRONG = {f"Incorrect Answer {number}": number for number in (1, 2, 3)}
PROBLEMS = "".join(json.dumps({"problem": f"what is {n}?", "answer": n}) + "\n" for n in range(2))
FILES: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("aime24", "aime25", "aime26", "hmmt25", "math500", "gsm8k", "umath"), (2, PROBLEMS)),
    "file": (2, "a red circle\n\ntwo blue rings\n"),
    "ruler": (1, json.dumps({"input": "Who? Those are", "outputs": ["Bo"]})),
    "geneval": (4, TAGGED),
    "parti": (1, "Prompt\tCategory\tChallenge\na dog\tAnimals\tBasic\n"),
    "coco5k": (2, COCO),
    "coco30k": (2, COCO),
    "geneval2": (1, json.dumps({"prompt": "a dog", **ASKED})),
    "unigenbench": (4, 'index,prompt_en,sub_dims_en\n1,a dog,"{}"\n'),
    "oneig": (4, "category,id,prompt_en\nPortrait,000,a dog\n"),
    "mjhq30k": (1, json.dumps({"a0": {"category": "animals", "prompt": "a dog"}})),
    "imagereward": (10, json.dumps([{"id": "1", "prompt": "a dog"}])),
    "gpqa_diamond": (1, json.dumps({"Question": "what?", "Correct Answer": 0, **WRONG})),
}
"""Number of prompts and a small file of each set that reads one."""
COUNTS = {name: count for name, (count, _) in FILES.items()} | {
    "emoji_heldout": 104, "imagenet": 50_000, "imagenet50k": 50_000, "hpsv2": 4, "dpg": 4, "texts": 8, "passkey": 20,
    "planted_facts": 20, **dict.fromkeys(("needles", "chains", "word_counts"), 20),
}  # fmt: skip
"""Prompts of the sets that have not 96."""


def stand_in(choice: str, folder: Path) -> list[str]:
    """Overrides that point a prompt set to a small file or folder of its kind."""
    if choice in FILES:
        (folder / "prompts").write_text(FILES[choice][1])
        return [f"prompts.path={folder / 'prompts'}", *["prompts.count=2"] * (choice == "coco30k")]
    if choice in ("hpsv2", "dpg"):
        for style in ("anime", "concept-art", "paintings", "photo"):
            (folder / f"{style}.json").write_text('["a dog"]')
        (folder / "item.txt").write_text("a dog")
        return [f"prompts.path={folder}"]
    return ["prompts@prompts.of=scenes"] * (choice == "own")


@pytest.mark.parametrize(
    "choices",
    slow_except(lambda choices: not QUICK.isdisjoint(choices), TOGETHER),
    ids=lambda choices: " ".join(map("=".join, choices)),
)
def test_every_file_builds_its_object(choices: list[tuple[str, str]], tmp_path: Path) -> None:
    task = "train" if "train" in dict(choices) else "run"
    more = [word for group, choice in choices if group == "prompts" for word in stand_in(choice, tmp_path)]
    if ("model", "decoder") in choices:  # its files give its shape
        folder = "pkg://kvbench/assets/reasoner_tiny/model"
        more += [f"model.sources.weights.path={folder}", "model.name=decoder"]
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
        source = instantiate(node)
        prompts = source.load()
        assert len(prompts) == COUNTS.get(choice, 96)
        own = {prompt.text for prompt in prompts}
        others = source.load_others(1, 0)
        assert choice.startswith(("imagenet", "scene_classes")) or not own & {
            prompt.text for prompt in others
        }
    elif node is not None:
        instantiate(node)


@pytest.mark.slow
def test_a_terminal_breaks_logged_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra_of_kvbench():
        form = OmegaConf.to_container(compose_job([])[1].job_logging.formatters.simple)
    formatter = logging.config.DictConfigurator({}).configure_formatter(form)  # type: ignore[attr-defined]
    record = logging.makeLogRecord({"msg": "one two three /a/long/path"})
    assert formatter.format(record) == record.msg
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert formatter.format(record) == "one two\nthree\n/a/long/path"


@cache
def list_new_sweeps() -> set[Path]:
    """The sweeps that set a key which none before them sets; keys of a method count by the methods, too."""
    known, found = set[tuple[str, str]](), set[Path]()
    for path in (*SWEEPS, *METHOD_SWEEPS):
        params, _, _ = read_sweep(path)
        methods = params.get("method", "")
        keys = {(key, methods if key.startswith("method.") else "") for key in params}
        if not keys <= known:
            found.add(path)
        known |= keys
    return found


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", [*SWEEPS, *METHOD_SWEEPS], ids=lambda path: path.stem)
def test_every_sweep_names_what_exists(path: Path, whole: bool) -> None:
    """Its jobs compose and are valid; `make test` looks for files, and composes one of each where a key is new."""
    params, _, _ = read_sweep(path)
    shared = not any(key.startswith("method.") for key in params)
    entries = [entry for entry in OmegaConf.load(path).get("defaults", []) if not isinstance(entry, str)]
    for key, value in [*params.items(), *(pair for entry in entries for pair in entry.items())]:
        folder = CONF / key.removeprefix("beside.").rpartition("/")[2]
        if folder.is_dir():
            names = value.strip("[]").split(",")
            assert all((folder / f"{name}.yaml").is_file() for name in names), key
            if key in params and shared and not whole and not value.startswith("["):
                params[key] = names[0]
    if whole or path in list_new_sweeps():
        name = path.relative_to(CONF / "sweeps").with_suffix("")
        assert (
            check_arguments([f"sweeps={name}", *(f"{key}={value}" for key, value in params.items())]) is None
        )


@pytest.mark.parametrize(
    "path", [path for path in SWEEPS if path.stem not in OWN], ids=lambda path: path.stem
)
def test_a_sweep_ends_with_the_table_it_is_named_after(path: Path) -> None:
    params, _, published = read_sweep(path)
    table = find(published)
    assert table.name == path.stem
    for key in table.keys:
        swept = params.get(key.replace("latency.batch", "batch_size"), "").split(",")
        if swept != [""] and key != "budget":
            printed = {value for where in table.rows for value in where.get(key, swept)}
            assert set(swept) - {*BASELINE_METHODS} <= printed


QUALITY = {path.stem for path in SWEEPS} - {
    "ams_kv_table6", "full_bits", "headkv_table4", "headkv_table6", "heatkv_fig6", "hard_kv_fig19",
}  # fmt: skip
"""Sweeps that compare the quality of methods; docs/reproduction.md and docs/tables.md say why the others do not."""


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_that_compares_quality_has_what_looks_at_nothing(path: Path) -> None:
    params, model, _ = read_sweep(path)
    methods = {name for key in ("method", "beside.method") for name in params.get(key, "").split(",")}
    wanted = {*BASELINE_METHODS} if model.startswith(("infinity", "var")) else {"random"}
    assert methods & {*BASELINE_METHODS} == (wanted if path.stem in QUALITY else set())


@pytest.mark.parametrize(
    ("model", "sinks"), [("infinity_tiny", 1), ("infinity_2b", 3), ("infinity_8b", 3), ("var_d30", 2)]
)
def test_sinks_come_from_the_model_unless_set(model: str, sinks: int) -> None:
    method = instantiate(composed(f"model={model}", "method=heatkv").method)
    assert isinstance(method, HeatKV)
    assert method.sinks == sinks
    assert instantiate(composed(f"model={model}", "method=heatkv", "sinks=2").method).sinks == 2


def test_settings_hold_no_configuration_objects() -> None:
    cfg = composed("shard.index=1", "shard.count=3", "plan.gpu_gib=24")
    settings = Settings.of({**values(cfg), "runs_dir": "~/x"})
    assert (settings.shard.index, settings.shard.count, settings.plan.gpu_gib) == (1, 3, 24)
    assert settings.runs_dir == Path.home() / "x"


def test_every_line_of_the_manual_says_what_it_is_for() -> None:
    lines = (ROOT / "conf" / "config.yaml").read_text().split("hydra:\n")[0].splitlines()
    settable = [
        line for line in lines if ": " in line and not line.startswith(("#", "  - override", "  - _self_"))
    ]
    assert len(settable) > 20
    assert [line for line in settable if "#" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(("protect", "scorers", "ams"), [("equal", 3, 3), ("paper", 0, 2)])
def test_protect_says_who_keeps_the_leading_scales(protect: str, scorers: int, ams: int) -> None:
    expected = {"swa": 0}
    expected |= dict.fromkeys(("h2o", "hackpp", "rkv", "scalekv", "snapkv"), scorers)
    expected |= dict.fromkeys(("ams_kv", "ams_kv_fixed", "hack"), ams)
    expected |= dict.fromkeys(("random", "streaming_llm", "heatkv", "binary_heatkv"), 3)
    for name, sinks in expected.items():
        node = composed(f"method={name}", "sinks=3", f"protect={protect}").method
        assert node.get("sinks", node.get("condensed")) == sinks, name


@pytest.mark.parametrize(("protect", "h2o", "hard_kv"), [("equal", 2, 2), ("paper", 0, 2)])
def test_protect_says_who_keeps_the_first_tokens(protect: str, h2o: int, hard_kv: int) -> None:
    for name, tokens in {"h2o": h2o, "hard_kv": hard_kv, "random": h2o, "pricekv/blocks": h2o}.items():
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
