"""Models of conf/model: settings that cannot be, and small ones, whose images depend on prompt and noise alone."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from kvbench.cli.config.messages import describe_error
from kvbench.core.segments import MAX_HEADS
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import MAX_TENSORS, build_on_meta, fill_random
from kvbench.models.noise import PromptNoise
from tests.support import reference_emu3, reference_janus, reference_lumina
from tests.support.marks import slow_except
from tests.support.small_models import SMALL_QWEN3, SMALL_TOKENIZER, composed, configured, full, load, shrink

LACKING = object()
"""In place of a source: there is none."""
ENDLESS = 10**9
BOUND = "must be at most 16777216"
REFUSED = {
    "var_d16": [
        ("sources.tokenizer", LACKING, "model.sources names no tokenizer; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.codes=4096: must be model.tokenizer.codes=64"),
        ("transformer.sides", [0, 4], "must have at least 2 scales"),
        ("transformer.heads", 5, "model.transformer.width=1024: must be a multiple of heads=5"),
        ("transformer.depth", ENDLESS, BOUND),
        ("sampling.cfg", -1.0, "must not be negative"),
        ("sampling.top_k", -1, "must not be negative (0 turns it off)"),
    ],
    "llamagen_b": [
        ("tokenizer.codes", 64, "model.transformer.vocabulary=16384: must be model.tokenizer.codes=64"),
        ("text", "t5", "model.transformer.text_width is None; give both"),
        ("chunk", 0, "must be at least 1"),
        *(("transformer.grid", grid, "at least 2 tokens") for grid in ([1, 1], [-2, -2])),
        ("transformer.head_dim", 6, "must be a multiple of 4"),
        ("sampling.cfg", 0.5, "must be at least 1"),
        ("sampling.top_k", -1, "must not be negative (0 turns it off)"),
        ("sampling.top_p", 0, "must be in (0, 1]"),
    ],
    "janus_pro_1b": [
        ("sources.text", LACKING, "model.sources names no text; use model.weights=random"),
        ("transformer.code_width", 0, "must be at least 1"),
        ("prompt_tokens", 0, "must be at least 1"),
    ],
    "lumina_mgpt_7b_768": [
        *(("transformer.image", image, "two even numbers") for image in ([3, 4], [0, 4])),
        ("transformer.vocabulary", 8198, "codes=8192 and 6 special tokens leave no text tokens"),
    ],
    "emu3_gen": [
        ("tokenizer.latents", 8, "must equal channels=4"),
        ("tokenizer.widths", [], "must have the channels of at least one resolution"),
        ("suffix", 3, "must be a string"),
    ],
    "qwen3_8b": [
        ("sources.weights", LACKING, "model.sources names no weights; use model.weights=random"),
        ("max_tokens", 1, "must be at least 2"),
        ("transformer.kv_heads", 3, "must divide heads=32"),
        ("transformer.head_dim", 7, "must be a multiple of 2"),
        ("transformer.rope_base", 0, "must be positive"),
        ("transformer.depth", 0, "must be at least 1"),
        ("sampling.temperature", -1, "must not be negative"),
        ("sampling.top_k", -1, "must not be negative (0 turns it off)"),
        ("sampling.top_p", 0, "must be in (0, 1]"),
    ],
    "infinity_2b": [
        *(
            ("aspect", aspect, f"{near} is nearest")
            for aspect, near in ((1.78, 1.75), (9.0, 3), (0.1, 0.333))
        ),
        ("transformer.width", -1, "must be at least 1"),
        ("transformer.depth", ENDLESS, BOUND),
        ("transformer.heads", 24, "model.transformer.width=2048: must be a multiple of 4 x heads=24"),
        ("transformer.block_chunks", 5, "must divide depth=32"),
        ("transformer.pool_heads", 7, "divides width=2048"),
        ("transformer.rope_base", 0, "must be positive"),
        *(("sampling.cfg_layers", layers, f"={layers}: list 0") for layers in ([0, -40], [-32], [1], [])),
        *(("sampling.cfg", cfg, "must be positive") for cfg in (0, [])),
        ("sampling.tau", [1.0, -1.0], "must be positive"),
        ("sampling.top_k", 0, "must be at least 1"),
    ],
    "infinity_tiny": [
        ("text_heads", 3, "must divide model.transformer.text_width=160"),
        *((f"tokenizer.{key}", ENDLESS, BOUND) for key in ("blocks", "scales")),
    ],
    "llamagen_tiny": [("transformer.text_tokens", 13, "must be at least 14")],
}


def changed(name: str, key: str, value: object = ENDLESS) -> Any:
    """A model of `conf/model` with one setting changed."""
    settings = composed(f"model={name}").copy()
    with open_dict(settings):
        if value is LACKING:
            part, _, last = f"model.{key}".rpartition(".")
            del OmegaConf.select(settings, part)[last]
            return instantiate(settings.model)
        OmegaConf.update(settings, f"model.{key}", value, merge=False, force_add=True)
    return instantiate(settings.model)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_in_one_line(name: str) -> None:
    for key, value, message in REFUSED[name]:
        with pytest.raises(InstantiationException) as caught:
            changed(name, key, value)
        told = describe_error(caught.value)
        assert message in told
        assert "\n" not in told
        if not message.startswith("model."):
            assert f"model.{key}={value}: " in told


@pytest.mark.parametrize(
    ("name", "key", "value", "read", "told"),
    [
        ("var_tiny", "tokenizer.widths", [7, 9], "parameters", "a level with 7 channels .* 32 or 24"),
        ("qwen3_8b", "transformer.depth", MAX_HEADS // 8 + 1, "spec", "heads of keys and .*, at most 131072"),
        ("var_tiny", "transformer.sides", [1, 5000], "spec", "tokens, at most 16777216"),
        ("infinity_2b", "pixels", "2M", "spec", "model.pixels=2M: must be one of 0.06M, 0.25M, 0.60M, 1M"),
        ("infinity_tiny", "tokenizer.mixers", ENDLESS, "parameters", f"more than {MAX_TENSORS} tensors"),
    ],
)
def test_shapes_that_cannot_be_are_refused_while_they_are_made(
    name: str, key: str, value: object, read: str, told: str
) -> None:
    """Attention, in the lowest resolution of a tokenizer, has 32 groups."""
    with pytest.raises((ValueError, WeightsError), match=told):
        getattr(changed(name, key, value), read)


def test_random_weights_fit_into_the_memory() -> None:
    module = build_on_meta(lambda: nn.Linear(2**21, 2**21, bias=False))
    with pytest.raises(WeightsError, match=r"model\.weights=random: 4\.4e\+12 parameters do not fit in "):
        fill_random(module)
    assert next(module.parameters()).device == torch.device("meta")


CAPTIONS = ["a red circle", "two blue rings and a dog", "a blue circle"]
CLASSES = ["3", "7 tench", "4"]


@dataclass(frozen=True)
class Case:
    """A small image model and its prompts: two for a batch and one more, and `alike`, the two in other words."""

    overrides: tuple[str, ...]
    size: tuple[int, int]
    prompts: list[str]
    roomy: bool = False  # whether prompts are tokens
    alike: tuple[str, str] | None = None


_LLAMAGEN = {"heads": 2, "vocabulary": 128, "grid": [5, 6]}
CASES = {
    "janus": Case(reference_janus.SMALL, (20, 24), CAPTIONS, roomy=True),
    "lumina": Case(reference_lumina.SMALL, (24, 24), CAPTIONS, roomy=True),
    "emu3": Case(reference_emu3.SMALL, (20, 24), CAPTIONS, roomy=True),
    "llamagen": Case(
        shrink("llamagen_b", *SMALL_TOKENIZER, **_LLAMAGEN, classes=10), (20, 24), CLASSES, alike=("3 x", "7")
    ),
    "llamagen with captions": Case(
        shrink("llamagen_xl_t2i", *SMALL_TOKENIZER, **_LLAMAGEN, text_width=24, text_tokens=8),
        (20, 24),
        ["a b c d e f g h i j", *CAPTIONS[1:]],
        alike=("a b c d e f g x", CAPTIONS[1]),  # cut
    ),
    "var": Case(("model=var_tiny", "model.weights=random"), (96, 96), CLASSES, alike=("3 x", "7")),
    "infinity": Case(
        ("model=infinity_tiny", "model.weights=random", "model.text=t5", "model.sizes=[[1,1],[2,2],[12,12]]"),
        (96, 96),
        CAPTIONS,
    ),
    "infinity with a vocabulary": Case(
        ("model=infinity_tiny", "model.weights=random", "model.sizes=[[1,1],[2,2],[12,12]]"),
        (96, 96),
        ["a red circle", "a blue square", "a blue circle"],
    ),
}


@pytest.fixture
def tiny(case: str) -> Any:
    return loaded(case)


@cache
def loaded(case: str) -> Any:
    return load(*CASES[case].overrides)


@pytest.mark.parametrize("case", slow_except(("janus", "llamagen", "infinity").__contains__, CASES))
def test_images_depend_on_prompt_and_noise_and_on_nothing_else(case: str, tiny: Any) -> None:
    def draw(prompts: list[str], seed: int = 0, first: int = 0, model: Any = tiny) -> Tensor:
        noise = PromptNoise(seed, range(first, first + len(prompts)))
        return model.generate(prompts, full(model), noise)

    given = CASES[case]
    prompts, other = given.prompts[:2], given.prompts[2]
    tiny.check_prompts(prompts)
    images = draw(prompts)
    assert (images.shape, images.dtype) == ((2, *given.size, 3), torch.uint8)
    assert 20 < images.float().std() < 100
    assert ((images == 0) | (images == 255)).float().mean() < 0.2
    again = replace(tiny, sources={})  # random weights need no files
    again.load("cpu")
    assert again.weights_sha256 == tiny.weights_sha256
    assert torch.equal(draw(prompts, model=again), images)
    if given.alike:
        assert torch.equal(draw(list(given.alike)), images)
    assert not torch.equal(draw([other, prompts[1]])[0], images[0])
    assert not torch.equal(draw(prompts, seed=1)[0], images[0])
    assert (draw(prompts[1:], first=1)[0].int() - images[1].int()).abs().max() <= 1
    if given.roomy:
        roomy = replace(tiny, prompt_tokens=20)
        roomy.load("cpu")
        assert (draw(prompts, model=roomy).int() - images.int()).abs().max() <= 1


def test_an_unconditional_prompt_that_is_too_long_is_refused() -> None:
    words = "one two three four five six seven eight"
    long = configured(*reference_emu3.SMALL, f"model.negative='{words}'")
    needed = "needs 13 tokens, more than model.prompt_tokens=12; set it to 13"
    for ask in (lambda: long.check_prompts(["a red circle"]), lambda: long.load("cpu")):
        with pytest.raises(ValueError, match=rf"^model\.negative='one .* {needed}"):
            ask()
    replace(long, sampling=replace(long.sampling, cfg=1.0)).check_prompts(["a red circle"])


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [(reference_janus.SMALL, 10), (reference_lumina.SMALL, 13), ((*SMALL_QWEN3, "model.prompt_tokens=7"), 8)],
)
def test_prompts_too_long_are_refused_by_name(overrides: tuple[str, ...], needed: int) -> None:
    """Of eight words, one more than fit."""
    prompt = "one two three four five six seven eight"
    told = f"prompt {prompt!r} has {needed} tokens: raise model.prompt_tokens={needed - 1} to {needed}"
    refuses(load(*overrides), prompt, told)


@pytest.mark.parametrize("case", ["llamagen", "var"])
def test_prompts_that_name_no_class_are_refused_by_name(tiny: Any) -> None:
    for prompt in ("", "30", "-2", "3.5", "3x", "a red circle", "²"):
        refuses(tiny, prompt, f"prompt {prompt!r}: {tiny.name} needs a class number from 0 to ")


def refuses(one: Any, prompt: str, message: str) -> None:
    for ask in (one.check_prompts, lambda given: one.generate(given, full(one), PromptNoise(0, range(4)))):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask([prompt])
