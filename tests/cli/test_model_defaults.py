"""Prompts and metrics that a model's file names, and who overrides them."""

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.loader import USUAL_CHOICES
from kvbench.core.config import ConfigError
from tests.support.places import ROOT


def choices(*words: str) -> tuple[str, list[str]]:
    """The class of the prompts, and the names of the metrics' entries."""
    with hydra_of_kvbench():
        cfg, _ = compose_job(list(words))
        return cfg.prompts._target_.rsplit(".", 1)[1], sorted(cfg.eval or {})


ANSWERS = ["exact_answer", "exact_answer_change", "text_length"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("model=llamagen_tiny", ("Scenes", "scenes")),
        ("model=reasoner_tiny", ("MathTiny", ANSWERS)),
        ("model=reasoner_notes_tiny", ("NotesTiny", ANSWERS)),
        ("model=smollm2_135m", ("Texts", ["kl", "same_top1"])),
        ("model=var_tiny", ("SceneClasses", "scenes")),
        ("model=reasoner_tiny prompts=scenes", ("Scenes", ANSWERS)),
        ("model=reasoner_tiny eval=none", ("MathTiny", [])),
        ("model=smollm2_135m prompts.length=300 eval=[kl]", ("Texts", ["kl"])),
        ("model=reasoner_tiny +prompts.other=1", ("MathTiny", ANSWERS)),
        ("sweeps=hackpp_table2", ("SceneClasses", "paired")),
        ("sweeps=hackpp_table2 model=reasoner_tiny", ("SceneClasses", "paired")),
        ("model=infinity_tiny +model.default_prompts=scene_classes", ("SceneClasses", "scenes")),
    ],
)
def test_what_is_named_last_decides(words: str, expected: tuple[str, str | list[str]]) -> None:
    prompts, metrics = expected  # names of metrics, or a file of conf/eval
    names = choices(f"eval={metrics}")[1] if isinstance(metrics, str) else metrics
    assert choices(*words.split()) == (prompts, names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("model=reasoner_tiny method=snapkv", (16, "grid", 5)),  # of its published tables
        ("model=reasoner_tiny method=snapkv windows=text", (8, "last", 7)),
        ("model=smollm2_135m method=snapkv", (8, "last", 7)),
        ("model=smollm2_135m method=adakv windows=image", (16, "grid", 5)),
        ("model=llamagen_tiny method=pyramidkv/text", (8, "last", 7)),
    ],
)
def test_windows_are_those_of_texts_where_the_model_says_so(
    words: str, expected: tuple[int, str, int]
) -> None:
    with hydra_of_kvbench():
        method = compose_job(words.split())[0].method
        assert (method.window, method.queries, method.kernel) == expected


def test_the_words_of_the_command_stay_what_was_typed() -> None:
    with hydra_of_kvbench():
        compose_job(["model=reasoner_tiny", "budget=128"])
        own = HydraConfig.get()
        assert list(own.overrides.task) == ["model=reasoner_tiny", "budget=128"]
        assert own.runtime.choices["prompts"] == "math_tiny"


@pytest.mark.parametrize("value", ["nothing", "[]", "7", "[kl,nothing]"])
def test_an_unknown_choice_of_a_model_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.default_eval=.*: not a choice; choose from alignment, "):
        choices("model=reasoner_tiny", f"model.default_eval={value}")


def test_usual_choices_are_those_of_the_configuration() -> None:
    listed = OmegaConf.load(ROOT / "conf" / "config.yaml").defaults
    found = {key: value for entry in listed if not isinstance(entry, str) for key, value in entry.items()}
    assert {group: found[group] for group in USUAL_CHOICES} == USUAL_CHOICES
