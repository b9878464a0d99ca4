"""Llama-style decoders give logits and greedy texts of transformers on the same files, on the engine."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.llama.model import LlamaModel
from tests.support import reference_qwen3 as reference
from tests.support.reference_llama import TWINS, official, reading, write_twin

pytest.importorskip("transformers")
UNEQUAL = [[5, 9, 20, 33, 41, 96, 7], [3, 88], [60, 61, 62, 2]]
EQUAL = [[5, 9, 20, 33], [3, 88, 17, 4]]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder of shards and transformers' model, by name of the twin."""
    made = {}
    for name in TWINS:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, write_twin(name, folder)
    return made


def load(folder: Path, **settings: Any) -> LlamaModel:
    one = reading(folder, **settings)
    one.load("cpu")
    return one


@pytest.mark.parametrize(
    ("name", "prompts"), [*((name, UNEQUAL) for name in TWINS), ("qwen2", EQUAL), ("smollm3", EQUAL)]
)
def test_logits_are_those_of_transformers(
    folders: dict[str, tuple[Path, Any]], name: str, prompts: list[list[int]]
) -> None:
    folder, theirs = folders[name]
    answers = torch.randint(2, 97, (len(prompts), 25), generator=torch.Generator().manual_seed(1))
    expected = reference.official_logits(theirs, prompts, answers)
    with torch.inference_mode():
        found = reference.step_logits(load(folder)._transformer, prompts, answers, torch.float32)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_in_bfloat16_they_differ_by_rounding(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, theirs = folders[name]
    answers = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(2))
    exact = reference.official_logits(theirs, UNEQUAL, answers)
    rounded = (reference.official_logits(official(name).bfloat16(), UNEQUAL, answers) - exact).abs()
    model = load(folder)._transformer.bfloat16()
    with torch.inference_mode():
        ours = (reference.step_logits(model, UNEQUAL, answers, torch.bfloat16) - exact).abs()
    assert rounded.mean() > 1e-3
    assert ours.mean() < 1.5 * rounded.mean()
    assert ours.max() < 2 * rounded.max()


@pytest.mark.parametrize("name", ["llama3", "smollm2", "smollm3", "phi3"])
def test_greedy_texts_are_those_of_transformers(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, theirs = folders[name]
    reference.check_greedy(load(folder, thinking=False), theirs)


def test_a_file_that_holds_the_tied_embedding_twice_loads(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = folders["smollm2"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(twice | {"lm_head.weight": twice["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected output\.weight"):
        load(tmp_path)


def test_a_missing_weight_is_named(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Of a shard and its index; and one that no module has."""
    shutil.copytree(folders["qwen3"][0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = tmp_path / index["weight_map"].pop(UP)
    state = load_file(shard)
    del state[UP]
    index["weight_map"]["value_head.weight"] = shard.name
    path.write_text(json.dumps(index))
    save_file({**state, "value_head.weight": torch.zeros(2)}, shard)
    unexpected = "unexpected value_head.weight (outside model.) (2,)"
    line = f"(2 tensors): missing layers.1.feed_forward.w3.weight; {unexpected} (in {tmp_path})"
    with pytest.raises(WeightsError, match=re.escape(line)):
        load(tmp_path)
