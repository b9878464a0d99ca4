"""Llama-style decoders as the harness sees them: folders, settings, and what is refused before loading."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.config import ConfigError
from kvbench.methods.full import Full
from kvbench.methods.shared.view import View
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.hub import HubError
from kvbench.models.noise import PromptNoise
from tests.support.engine import open_cache
from tests.support.reference_llama import reading, write_twin
from tests.support.reference_qwen3 import TEMPLATE, WORDS, write_tokenizer
from tests.support.small_models import full

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


def test_texts_end_with_the_tokens_of_every_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path, eos_token_id=[20, 1])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [30, 31]}))
    text, _ = reading(tmp_path)._read_text("cpu")
    assert (set(text.ends), text.pad) == ({1, 20, 30, 31}, 0)


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
