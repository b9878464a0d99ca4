"""Llama-style decoders as the harness sees them: folders, settings, and what is refused before loading."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kvbench.core.config import ConfigError
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.shared.view import View
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.hub import HubError
from kvbench.models.llama.model import LlamaModel
from kvbench.models.noise import PromptNoise
from kvbench.models.qwen3.model import Qwen3Model
from tests.support.engine import open_cache
from tests.support.reference_llama import reading, write_twin
from tests.support.reference_qwen3 import TEMPLATE, WORDS, write_tokenizer
from tests.support.small_models import configured, full

SHIPPED = "pkg://kvbench/assets/reasoner_tiny/model"
KEY = "model.sources.weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of SmolLM3, whose middle layer has no RoPE."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("smollm3")
    write_twin("smollm3", path)
    return path


def test_the_embedded_model_is_one_of_the_family() -> None:
    """Its folder gives the shape that conf/model/reasoner_tiny.yaml has, and the same texts."""
    known: Qwen3Model = configured("model=reasoner_tiny", "model.max_tokens=20")
    words = [f"{KEY}.path={SHIPPED}", "model.prompt_tokens=42", "model.max_tokens=20"]
    found: LlamaModel = configured("model=decoder", *words)
    own, given = asdict(found.shape), asdict(known.transformer)
    assert {key: own[key] for key in own if key != "context"} == {
        key: given[key] for key in own if key != "context"
    }
    assert replace(found.spec, name=known.name) == known.spec
    prompt = json.loads(Path(known.sources["weights"].locate() / "vocabulary.json").read_text())[5]
    for one in (known, found):
        one.load("cpu")
    texts = [one.generate([prompt] * 2, full(one), PromptNoise(0, (0, 1))) for one in (known, found)]
    assert texts[0] == texts[1]
    assert found.weights_sha256 == known.weights_sha256


def test_the_shape_is_known_before_the_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    spec = reading(tmp_path).spec
    assert (spec.layers, spec.heads, spec.head_dim, spec.unrotated) == (3, 2, 8, (1,))
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: .* contains no tokenizer"):
        reading(tmp_path).check_prompts(["one"])
    one = reading(tmp_path, weights="random")
    one.load("cpu")
    assert len(one.generate(["one"], full(one), PromptNoise(0, (0,)))) == 1


def test_random_weights_are_identified_by_the_whole_shape(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path, rms_norm_eps=0.5)
    settings = [reading(path, weights="random").resolve_settings("cpu") for path in (folder, tmp_path)]
    assert settings[0] != settings[1]
    assert reading(folder).resolve_settings("cpu") == {}


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("prepare", ["nothing", "empty", "file", "{", "[]", "3"])
def test_a_folder_without_a_shape_is_one_line(folder: Path, tmp_path: Path, prepare: str) -> None:
    place, line = (
        tmp_path,
        rf"{KEY}: {tmp_path}/config\.json: cannot be read \(.*\); copy the model's file again",
    )
    if prepare == "nothing":
        place, line = tmp_path / "no" / "where", rf"{KEY}\.path=.*where: does not exist"
    elif prepare == "empty":
        line = rf"{KEY}: {tmp_path} has no config\.json, which has the model's shape; give the model's folder"
    elif prepare == "file":
        place = next(folder.glob("*.safetensors"))
        line = rf"{KEY}: .*\.safetensors is a file; give the model's folder, with config\.json"
    else:
        (tmp_path / "config.json").write_text(prepare)
    with pytest.raises(WeightsError, match=f"^{line}$"):
        _ = reading(place).spec


def test_no_model_and_processes_that_do_not_divide_it_are_refused(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"^model\.sources\.weights: no model given; set .*\.path to"):
        _ = reading(None).spec
    message = "model.tensor_parallel=4: must divide model.transformer.heads=6"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        _ = reading(folder, tensor_parallel=4).spec


def test_a_path_that_does_not_exist_may_be_a_name_on_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    names = {
        path: reading(path).sources["weights"] for path in ("Owner/Llama-3.2-1B", "./a", "a/b/c", folder.name)
    }
    assert [(one.path, one.repo) for one in names.values()] == [
        (None, "Owner/Llama-3.2-1B"), ("./a", None), ("a/b/c", None), (folder.name, None)
    ]  # fmt: skip

    def refuse(*_: object) -> None:
        raise HubError("there is no network")

    monkeypatch.setattr("kvbench.models.files.weights.list_part", refuse)
    with pytest.raises(WeightsError, match=r"^model\.sources\.weights: .*: there is no network, or give"):
        _ = reading(None, "Owner/Llama-3.2-1B").spec


def test_a_sequence_longer_than_the_model_reads_is_refused(folder: Path) -> None:
    assert reading(folder, max_tokens=57).spec.segments[-1].end == 63
    with pytest.raises(ConfigError, match=r"^model=twin: .* 64 .*, not 65; lower model\.prompt_tokens"):
        _ = reading(folder, max_tokens=58).spec


def test_a_given_shape_is_compared_with_the_file(folder: Path) -> None:
    shape = reading(folder).shape
    reading(folder, transformer=shape).check_files()
    wrong = reading(folder, transformer=replace(shape, eps=1e-3, unrotated=()))
    line = "model.transformer.eps is 0.001, but the file gives 0.0001; "
    line += "model.transformer.unrotated is (), but the file gives (1,)"
    for call in (wrong.check_files, lambda: wrong.load("cpu")):
        with pytest.raises(WeightsError, match=re.escape(line)):
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

    cache: KVCache = open_cache(Watching(), one.spec, rotation=one.key_rotation())
    one.generate(["one plus two"], cache, PromptNoise(0, (0,)))
    assert same == {0: False, 1: True, 2: False}
