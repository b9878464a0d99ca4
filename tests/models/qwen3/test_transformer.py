"""Qwen3's language model gives the logits of transformers' on the same files, step by step on the engine."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import build_on_meta, load_into
from kvbench.models.files.weights import Source
from kvbench.models.parts.decoder_files import clean_decoder
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.transformer import Qwen3Config
from tests.support import reference_qwen3 as reference
from tests.support.reference_qwen3 import CONFIGS

pytest.importorskip("transformers")
ANSWER = 11
UNEQUAL = [[5, 9, 20, 33, 41, 96, 7], [3, 88], [60, 61, 62, 2]]
EQUAL = [[5, 9, 20, 33], [3, 88, 17, 4]]
each = pytest.mark.parametrize("name", ["shared heads", "tied"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder of shards and transformers' model, by name of the configuration."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp("qwen3")
        made[name] = folder, reference.write_folder(config, folder)
    return made


def load(folder: Path, config: Qwen3Config, dtype: torch.dtype = torch.float32) -> TextDecoder:
    model = build_on_meta(lambda: TextDecoder(config))
    load_into(
        model,
        Source("model.sources.weights", str(folder)),
        partial(clean_decoder, shape=config),
        lambda _, tensor: tensor.to(dtype),
    )
    return model.requires_grad_(False)


@each
@pytest.mark.parametrize("prompts", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_official_logits(folders: dict[str, tuple[Path, Any]], name: str, prompts: list[list[int]]) -> None:
    folder, official = folders[name]
    answers = torch.randint(2, 97, (len(prompts), ANSWER), generator=torch.Generator().manual_seed(1))
    expected = reference.official_logits(official, prompts, answers)
    found = reference.step_logits(load(folder, CONFIGS[name]), prompts, answers, torch.float32)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@each
def test_in_bfloat16_they_differ_by_rounding(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, official = folders[name]
    answers = torch.randint(2, 97, (3, ANSWER), generator=torch.Generator().manual_seed(2))
    exact = reference.official_logits(official, UNEQUAL, answers)
    half = reference.official(CONFIGS[name]).bfloat16()
    theirs = (reference.official_logits(half, UNEQUAL, answers) - exact).abs()
    model = load(folder, CONFIGS[name], torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16
    ours = (reference.step_logits(model, UNEQUAL, answers, torch.bfloat16) - exact).abs()
    assert theirs.mean() > 1e-3
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


def test_a_file_that_holds_the_tied_embedding_twice_loads(tmp_path: Path) -> None:
    config = CONFIGS["tied"]
    reference.write_folder(config, tmp_path, "10MB")
    state = load_file(tmp_path / "model.safetensors")
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "model.safetensors")
    load(tmp_path, config)
    save_file(twice | {"lm_head.weight": twice["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected output\.weight"):
        load(tmp_path, config)


def test_a_missing_weight_is_named(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    config = CONFIGS["shared heads"]
    folder, _ = folders["shared heads"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = next(file for name, file in index["weight_map"].items() if name.endswith("1.mlp.up_proj.weight"))
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = load_file(folder / shard)
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / shard)
    with pytest.raises(
        WeightsError, match=r"lacks 1 tensors of the index, such as model\.layers\.1\.mlp\.up_proj"
    ):
        load(tmp_path, config)
    index["weight_map"].pop("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    place = f" (in {tmp_path})"
    message = "model.sources.weights: the checkpoint does not fit in 1 places: missing layers.1.feed_forward.w3.weight"
    with pytest.raises(WeightsError, match=re.escape(message + place)):
        load(tmp_path, config)
    save_file({**state, "value_head.weight": torch.zeros(2)}, tmp_path / shard)
    index["weight_map"]["value_head.weight"] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"unexpected value_head\.weight \(outside model\.\) \(2,\)"):
        load(tmp_path, config)
    (tmp_path / shard).unlink()
    with pytest.raises(WeightsError, match="not a readable checkpoint"):
        load(tmp_path, config)


@pytest.mark.parametrize(("name", "wrong"), [("shared heads", "tied"), ("tied", "shared heads")])
def test_files_of_another_size_fail(folders: dict[str, tuple[Path, Any]], name: str, wrong: str) -> None:
    with pytest.raises(WeightsError, match="the checkpoint does not fit"):
        load(folders[name][0], CONFIGS[wrong])
