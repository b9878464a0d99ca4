"""Decoders of the Llama kind as the harness sees them: shapes of config.json, folders, settings, and refusals."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.core.config import ConfigError
from kvbench.methods.full import Full
from kvbench.methods.shared.view import View
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.hub import HubError
from kvbench.models.llama.config_json import ARCHITECTURES, find_stop_tokens, read_shape
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.rotary import RopeScaling
from tests.support.engine import open_cache
from tests.support.reference_llama import reading, write_twin
from tests.support.reference_qwen3 import TEMPLATE, WORDS, write_tokenizer
from tests.support.small_models import full

SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 9, "num_attention_heads": 32
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
SHAPE = RopeScaling(8.0, 1.0, 4.0, 8192)


def read(kind: str = "llama", **changes: object) -> Any:
    return read_shape({**SIZES, "model_type": kind, **changes}, "key: config.json")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keys_that_a_file_lacks_have_the_values_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoConfig.for_model(kind, **SIZES), read(kind)
    base, tied = theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings
    assert (ours.eps, ours.rope_base, ours.tied) == (theirs.rms_norm_eps, base, tied)
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, getattr(theirs, "head_dim", 8))
    still = [layer for layer, turns in enumerate(getattr(theirs, "no_rope_layers", ())) if not turns]
    assert list(ours.unrotated) == still
    assert ours.context == getattr(theirs, "sliding_window", None)


READ: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": None}, {"rope_base": 5e5, "rope_scaling": None}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_scaling": RopeScaling(4.0)}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": SHAPE}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_base": 7.0}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": SHAPE}),
    ("mistral", {"max_position_embeddings": 32768}, {"context": 4096, "kv_heads": 8}),
    ("mistral", {"max_position_embeddings": 32768, "sliding_window": None}, {"context": 32768}),
    ("qwen2", {"max_position_embeddings": 32768, "sliding_window": 16}, {"context": 32768, "qkv_bias": True}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, {"context": 16}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 32, "head_dim": 8}),
    ("phi3", {"partial_rotary_factor": 0.75}, {"rotary_dim": 6}),
    ("smollm3", {"no_rope_layers": [1, 0] * 5}, {"unrotated": (1, 3, 5, 7)}),
    ("smollm3", {"no_rope_layer_interval": 2}, {"unrotated": (1, 3, 5, 7)}),
]  # fmt: skip


def test_keys_of_both_versions_of_transformers_are_read() -> None:
    for kind, given, expected in READ:
        shape = read(kind, **given)
        assert {name: getattr(shape, name) for name in expected} == expected, (kind, given)


REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    ("llama", {"model_type": "mixtral"}, "model_type is 'mixtral', but kvbench supports only llama, mistral, phi3, qw"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but kvbench supports only 'silu'"),
    ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, but"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.type is 'yarn', but kvbench supports"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; must be a number above 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "model.transformer.rope_scaling.factor=0.5: "),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but kvbench supports only 1 for model_ty"),
    ("phi3", {"partial_rotary_factor": 0.01}, "model.transformer.rotary_dim=0: must be even and at most head_dim=8"),
    ("qwen3", {"layer_types": ["linear_attention"]}, "layer_types is ['linear_attention'], but"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is [1], but must be a list with a value for each of 9 layers"),
    ("smollm3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be at most 16777216"),
    ("llama", {"hidden_size": None}, "hidden_size is None, but must be a whole number of at least 1"),
    ("llama", {"num_key_value_heads": 5}, "model.transformer.kv_heads=5: must divide heads=32"),
    ("llama", {"num_attention_heads": 7}, "num_attention_heads is 7, but must divide hidden_size=256"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1, but must be a number above 0"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', but must be true or false"),
]  # fmt: skip


def test_what_is_not_supported_is_refused_by_its_key() -> None:
    for kind, change, line in REFUSED:
        with pytest.raises(WeightsError, match=rf"^key: config\.json: {re.escape(line)}[^\n]*$"):
            read(**{"kind": kind, **change})


def test_texts_end_with_the_tokens_of_every_file(folder: Path, tmp_path: Path) -> None:
    assert find_stop_tokens({"eos_token_id": 2}, {"eos_token_id": [7, 2]}) == (7, 2)
    assert find_stop_tokens({"eos_token_id": [1, 3]}, {}) == (1, 3)
    assert find_stop_tokens({"eos_token_id": None}, {}) == ()
    for wrong in ("end", [1, "2"], -1, True):
        with pytest.raises(WeightsError, match=r"^config\.json: eos_token_id is .*must be a token or a list"):
            find_stop_tokens({"eos_token_id": wrong}, {})
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path, eos_token_id=[20, 1])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [30, 31]}))
    text, _ = reading(tmp_path)._read_text("cpu")
    assert (set(text.ends), text.pad) == ({1, 20, 30, 31}, 0)


KEY = r"model\.sources\.weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of SmolLM3, whose middle layer has no RoPE."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("smollm3")
    write_twin("smollm3", path)
    return path


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_shape_is_known_before_the_weights_and_identifies_random_ones(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    one = reading(tmp_path, weights="random")
    assert (one.spec.layers, one.spec.heads, one.spec.head_dim, one.spec.unrotated) == (3, 2, 8, (1,))
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: .* contains no tokenizer"):
        reading(tmp_path).check_prompts(["one"])
    one.load("cpu")
    assert len(one.generate(["one"], full(one), PromptNoise(0, (0,)))) == 1
    change(tmp_path, rms_norm_eps=0.5)
    assert reading(tmp_path, weights="random").resolve_settings("cpu") != one.resolve_settings("cpu")
    assert reading(folder).resolve_settings("cpu") == {}


def test_a_folder_without_a_shape_is_one_line(folder: Path, tmp_path: Path) -> None:
    file, config = next(folder.glob("*.safetensors")), tmp_path / "config.json"
    for place, line in (
        (None, rf"{KEY}: no model given; set {KEY}\.path to .*"),
        (tmp_path / "no" / "where", rf"{KEY}\.path=.*where: does not exist"),
        (tmp_path, rf"{KEY}: {tmp_path} has no config\.json, which has .*; give the model's folder"),
        (file, rf"{KEY}: .*\.safetensors is a file; give the model's folder, with config\.json"),
    ):
        with pytest.raises(WeightsError, match=f"^{line}$"):
            _ = reading(place).spec
    for contents in ("{", "[]"):
        config.write_text(contents)
        with pytest.raises(WeightsError, match=rf"^{KEY}: {config}: cannot be read \(.*\); copy the model's"):
            _ = reading(tmp_path).spec


def test_a_path_that_does_not_exist_may_be_a_name_on_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    own = f"{folder.parent.name}/{folder.name}"
    names = {path: reading(path).sources["weights"] for path in ("Owner/Llama-3.2-1B", "./a", "a/b/c", own)}
    assert [(one.path, one.repo) for one in names.values()] == [
        (None, "Owner/Llama-3.2-1B"), ("./a", None), ("a/b/c", None), (own, None)
    ]  # fmt: skip

    def refuse(*_: object) -> None:
        raise HubError("there is no network")

    monkeypatch.setattr("kvbench.models.files.weights.list_part", refuse)
    with pytest.raises(WeightsError, match=r"^model\.sources\.weights: .*: there is no network, or give"):
        _ = reading(None, "Owner/Llama-3.2-1B").spec


def test_settings_that_do_not_fit_the_file_are_refused(folder: Path) -> None:
    shape = reading(folder).shape
    reading(folder, transformer=shape).check_files()
    assert reading(folder, max_tokens=57).spec.segments[-1].end == 63
    wrong = reading(folder, transformer=replace(shape, eps=1e-3, unrotated=()))
    differs = (
        "eps is 0.001, but the file gives 0.0001; model.transformer.unrotated is (), but the file gives (1,)"
    )
    for call, line in (
        (lambda: reading(folder, tensor_parallel=4).spec, "model.tensor_parallel=4: must divide model.tran"),
        (lambda: reading(folder, max_tokens=58).spec, "not 65; lower model.prompt_tokens"),
        (wrong.check_files, differs),
        (lambda: wrong.load("cpu"), differs),
    ):
        with pytest.raises((ConfigError, WeightsError), match=re.escape(line)):
            call()


def test_a_prompt_does_not_depend_on_the_day(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ strftime_now('%d %m %d') }} " + TEMPLATE)
    shutil.copy(folder / "config.json", tmp_path)
    text, _ = reading(tmp_path)._read_text("cpu")
    assert text.encode("one") == [26, WORDS.index("?"), 26, 2, WORDS.index("one"), 3]


def test_methods_see_no_rotation_in_a_layer_without_one(folder: Path) -> None:
    """In this layer alone, attention sees the keys of `keys(rotated=False)`."""
    one, same = reading(folder), {}
    one.load("cpu")

    class Watching(Full):
        static = False

        def keep(self, view: View) -> torch.Tensor:
            if view.segment.index == 0:
                same[view.layer] = torch.equal(view.keys(), view.keys(rotated=False))
            return view.position >= 0

    cache = open_cache(Watching(), one.spec, rotation=one.key_rotation())
    one.generate(["one plus two"], cache, PromptNoise(0, (0,)))
    assert same == {0: False, 1: True, 2: False}
