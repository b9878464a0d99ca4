"""Settings of models that cannot be, and shapes without end: each is refused in one line that names the key."""

from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from torch import nn

from kvbench.cli.config.messages import describe_error
from kvbench.core.segments import MAX_HEADS
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import MAX_TENSORS, build_on_meta, fill_random
from kvbench.models.infinity.model import InfinityModel
from tests.support.places import ROOT
from tests.support.small_models import composed

LACKING = object()
"""In place of a source: there is none."""
ENDLESS = 10**9
OWN_SHAPE = sorted(
    {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - {"decoder", "smollm2_135m"}
)
"""Models whose configuration has their shape; others read it from a config.json."""
BOUND = "must be at most 16777216"
SAMPLING = [
    ("sampling.top_k", -1, "must not be negative (0 turns it off)"),
    ("sampling.top_p", 1.5, "must be in "),
    ("sampling.top_p", -0.5, "must be in "),
]
REFUSED = {
    "var_d16": [
        ("sources.tokenizer", LACKING, "model.sources names no tokenizer; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.codes=4096: must be model.tokenizer.codes=64"),
        ("transformer.channels", 4, "must be model.tokenizer.channels=32"),
        *(("transformer.sides", sides, "must have at least 2 scales") for sides in ([1], [0, 4])),
        ("transformer.heads", 5, "model.transformer.width=1024: must be a multiple of heads=5"),
        ("sampling.cfg", -1.0, "must not be negative"),
        *SAMPLING,
    ],
    "llamagen_b": [
        ("sources.transformer", LACKING, "model.sources names no transformer; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.vocabulary=16384: must be model.tokenizer.codes=64"),
        ("text", "t5", "model.transformer.text_width is None; give both"),
        ("chunk", 0, "must be at least 1"),
        *(("transformer.grid", grid, "at least 2 tokens") for grid in ([1, 1], [0, 5], [-2, -2])),
        ("transformer.head_dim", 6, "must be a multiple of 4"),
        ("sampling.cfg", 0.5, "must be at least 1"),
        ("sampling.cfg_interval", -2, "must not be negative, or -1"),
        ("sampling.temperature", 0, "must be positive"),
        ("sampling.top_p", 0, "must be in (0, 1]"),
        *SAMPLING,
    ],
    "llamagen_xl_t2i": [("sources.text", LACKING, "model.sources names no text; use model.weights=random")],
    "janus_pro_1b": [
        ("sources.text", LACKING, "model.sources names no text; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.codes=16384: must be model.tokenizer.codes=64"),
        ("prompt_tokens", 0, "must be at least 1"),
        ("chunk", 0, "must be at least 1"),
        *(("transformer.image", image, "at least 2 tokens") for image in ([1, 1], [0, 5], [-2, -2])),
        ("transformer.codes", 0, "must be at least 1"),
        ("transformer.code_width", 0, "must be at least 1"),
    ],
    "lumina_mgpt_7b_768": [
        ("sources.weights", LACKING, "model.sources names no weights; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.codes=8192: must be model.tokenizer.codes=64"),
        *(("transformer.image", image, "two even numbers") for image in ([3, 4], [4, 5], [0, 4], [-2, -2])),
        ("transformer.vocabulary", 8198, "codes=8192 and 6 special tokens leave no text tokens"),
    ],
    "emu3_gen": [
        ("sources.text", LACKING, "model.sources names no text; use model.weights=random"),
        ("tokenizer.codes", 64, "model.transformer.codes=32768: must be model.tokenizer.codes=64"),
        ("tokenizer.latents", 8, "must equal channels=4"),
        ("tokenizer.widths", [], "must have the channels of at least one resolution"),
        *(("transformer.image", image, "at least 2 tokens") for image in ([0, 5], [5, 0], [-2, -2])),
        ("transformer.vocabulary", 32774, "codes=32768 and 6 special tokens leave no text tokens"),
        ("suffix", 3, "must be a string"),
        ("negative", [], "must be a string"),
    ],
    "qwen3_8b": [
        ("sources.weights", LACKING, "model.sources names no weights; use model.weights=random"),
        ("max_tokens", 1, "must be at least 2"),
        ("chunk", 0, "must be at least 1"),
        ("prompt_tokens", 0, "must be at least 1"),
        ("transformer.kv_heads", 3, "must divide heads=32"),
        ("transformer.head_dim", 7, "must be a multiple of 2"),
        ("transformer.rope_base", 0, "must be positive"),
        ("transformer.eps", -1, "must not be negative"),
        ("transformer.depth", 0, "must be at least 1"),
        ("sampling.temperature", -1, "must not be negative"),
        ("sampling.top_p", 0, "must be in (0, 1]"),
        *SAMPLING,
    ],
    "infinity_2b": [
        ("sources.text", LACKING, "model.sources names no text; use model.weights=random"),
        ("aspect", -1, "must be one of the published height / width 0.333, 0.4, 0.5,"),
        ("aspect", 1.78, "2.5, 3; 1.75 is nearest"),
        ("transformer.width", -1, "must be at least 1"),
        ("transformer.depth", 0, "must be at least 1"),
        ("transformer.heads", 24, "model.transformer.width=2048: must be a multiple of 4 x heads=24"),
        ("transformer.block_chunks", 5, "must divide depth=32"),
        *(("transformer.pool_heads", heads, "divides width=2048") for heads in (-1, 7)),
        ("transformer.hidden", -1, "must not be negative"),
        ("transformer.rope_base", 0, "must be positive"),
        ("sampling.cfg_layers", [5], "list 0 (the logits) or numbers from -31"),
        *(("sampling.cfg_layers", layers, f"={layers}: list 0") for layers in ([0, -40], [-32], [1], [])),
        ("sampling.cfg", 0, "must be positive"),
        ("sampling.cfg", [], "must be positive"),
        ("sampling.tau", [1.0, -1.0], "must be positive"),
        ("sampling.top_p", 0, "must be in (0, 1]"),
        ("sampling.top_p", 1.1, "must be in (0, 1]"),
        ("sampling.top_k", 0, "must be at least 1"),
    ],
    "infinity_tiny": [("text_heads", 3, "must divide model.transformer.text_width=160")],
    "llamagen_tiny": [
        ("text_heads", 0, "must divide model.transformer.text_width=128"),
        ("transformer.text_tokens", 13, "must be at least 14"),
    ],
}


def changed(name: str, key: str, value: object = ENDLESS, **more: object) -> Any:
    """A model of `conf/model` with one setting changed, and more with dots in their names."""
    settings = composed(f"model={name}").copy()
    with open_dict(settings):
        if value is LACKING:
            part, _, last = f"model.{key}".rpartition(".")
            del OmegaConf.select(settings, part)[last]
            return instantiate(settings.model)
        for part, one in {**more, key: value}.items():
            OmegaConf.update(settings, f"model.{part}", one, merge=False, force_add=True)
    return instantiate(settings.model)


ROWS = [
    *((name, *row) for name, rows in REFUSED.items() for row in rows),
    *(
        (name, f"transformer.{key}", ENDLESS, BOUND)
        for name in OWN_SHAPE
        for key in ("depth", "width", "heads")
    ),
    *(("infinity_tiny", f"tokenizer.{key}", ENDLESS, BOUND) for key in ("blocks", "scales")),
    ("qwen3_8b", "max_tokens", ENDLESS, BOUND),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), ROWS)
def test_bad_settings_are_refused_in_one_line(name: str, key: str, value: object, message: str) -> None:
    with pytest.raises(InstantiationException) as caught:
        changed(name, key, value)
    told = describe_error(caught.value)
    assert message in told
    assert "\n" not in told
    if not message.startswith("model."):
        assert f"model.{key}={value}: " in told


@pytest.mark.parametrize(
    ("widths", "told"), [([7, 9], "7 channels .* 32 or 24"), ([64, 48], "48 channels .* 32")]
)
def test_channels_are_divided_into_groups(widths: list[int], told: str) -> None:
    """Attention, in the lowest resolution, has 32 groups."""
    with pytest.raises(ValueError, match=f"^model.tokenizer: a level with {told}$"):
        print(changed("var_tiny", "tokenizer.widths", widths).parameters)


@pytest.mark.parametrize("layers", [[0], [-1], [-31], [-2, 0]])
def test_guidance_at_any_layer_there_is(layers: list[int]) -> None:
    assert isinstance(changed("infinity_2b", "sampling.cfg_layers", layers), InfinityModel)


def test_most_families_have_their_shape_in_the_configuration() -> None:
    assert len(OWN_SHAPE) > 20


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("transformer.depth", MAX_HEADS // 6 + 1, "heads of keys and values, at most 131072"),
        ("sizes", [[1, 1], [5000, 5000]], "tokens, at most 16777216"),
    ],
)
def test_heads_and_tokens_have_a_bound(key: str, value: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        print(changed("infinity_tiny", key, value, **{"tokenizer.mixers": 0}).spec)  # which decodes any grid


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("infinity_tiny", "tokenizer.mixers", ENDLESS),
        ("infinity_tiny", "tokenizer.blocks", 2**20),
        ("llamagen_tiny", "tokenizer.blocks", 2**20),
        ("var_tiny", "transformer.depth", 2**20),
        ("qwen3_8b", "transformer.depth", 2**20),
    ],
)
def test_modules_are_bounded_while_they_are_made(name: str, key: str, value: int) -> None:
    with pytest.raises(WeightsError, match=f"more than {MAX_TENSORS} tensors"):
        print(changed(name, key, value).parameters)


def test_the_bound_ends_with_the_module() -> None:
    made = [
        build_on_meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(MAX_TENSORS // 4))))
        for _ in range(3)
    ]
    assert sum(len(list(one.parameters())) for one in made) > MAX_TENSORS


def test_random_weights_fit_into_the_memory() -> None:
    module = build_on_meta(lambda: nn.Linear(2**21, 2**21, bias=False))
    with pytest.raises(WeightsError, match=r"model\.weights=random: 4\.4e\+12 parameters do not fit in "):
        fill_random(module)
    assert next(module.parameters()).device == torch.device("meta")
