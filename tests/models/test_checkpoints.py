"""Checkpoints: the real models' names and shapes, every published form, and refusals that say why."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from kvbench.models.files import checkpoints, official_files, parameters
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity, InfinityConfig

TINY = InfinityConfig(2, 64, 2, 2, 8, text_width=128, text_maxlen=4, rope_grid=(4, 4), levels=3)


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Infinity(TINY).state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def official_extras(state: dict[str, Tensor]) -> dict[str, object]:
    """What official files hold besides the weights, and one shape they have otherwise."""
    flat: dict[str, object] = {
        name: tensor.flatten() if name.endswith("scale_mul_1H11") else tensor
        for name, tensor in state.items()
    }
    buffers = ("lvl_1L", "attn_bias_for_masking", "block_chunks.0.module.0.sa.zero_k_bias")
    return {**flat, **{name: torch.zeros(3) for name in buffers}, "epoch": 3}


def write_shards(folder: Path, state: dict[str, Tensor], count: int, kind: str = "safetensors") -> None:
    """A folder of shards with their index."""
    index: dict[str, str] = {}
    for number in range(count):
        shard = {name: state[name].contiguous() for name in sorted(state)[number::count]}
        file = f"model-{number}.{kind}"
        (save_file if kind == "safetensors" else torch.save)(shard, folder / file)
        index |= dict.fromkeys(shard, file)
    top = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (folder / f"{top}.index.json").write_text(json.dumps({"weight_map": index}))


def test_files_of_every_published_form_are_read(state: dict[str, Tensor], tmp_path: Path) -> None:
    raw, path = official_extras(state), tmp_path / "model.pth"
    for form in (raw, {"trainer": raw}, {"trainer": {"gpt_fsdp": raw, "step": 1}}):
        for zipped in (True, False):  # old versions of torch
            torch.save(form, path, _use_new_zipfile_serialization=zipped)
            assert same(official_files.clean_transformer(checkpoints.read(path)), state)
    for kind in ("bin", "safetensors"):
        write_shards(tmp_path, state, 3, kind)
        assert same(official_files.clean_transformer(checkpoints.read(tmp_path)), state)


DAMAGES: dict[str, tuple[Callable[[bytes, bytes], bytes | None], str]] = {
    "lost": (lambda first, own: None, r"files of the index are missing: model-1\.safetensors"),
    "cut": (lambda first, own: own[:-100], r"model-1\.safetensors: not a readable checkpoint"),
    "another": (
        lambda first, own: first, r"model-1\.safetensors lacks \d+ tensors of the index, such as .*; copy it again"
    ),
    "joined": (
        lambda first, own: save(load(first) | load(own)), r"model-1\.safetensors and model-0\.safetensors both hold "
    ),
}  # fmt: skip
"""Contents of the second shard by those of both, and how they are refused."""


def test_a_damaged_folder_of_shards_names_the_shard(state: dict[str, Tensor], tmp_path: Path) -> None:
    for damage, message in DAMAGES.values():
        write_shards(tmp_path, state, 2)
        assert same(dict(checkpoints.read(tmp_path)), state)
        paths = [tmp_path / f"model-{number}.safetensors" for number in (0, 1)]
        content = damage(*(path.read_bytes() for path in paths))
        paths[1].unlink()
        if content is not None:
            paths[1].write_bytes(content)
        with pytest.raises(WeightsError, match=rf"^{re.escape(str(tmp_path))}.*{message}[^\n]*$"):
            checkpoints.read(tmp_path)


def test_an_index_must_name_files_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no model\.safetensors, model\.safetensors.index.json"):
        checkpoints.read(tmp_path)
    for index, message in (
        ({"weight_map": {"a": 3}}, r"model\.safetensors\.index\.json has no weight_map"),
        ([], r"model\.safetensors\.index\.json has no weight_map"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "outside the folder"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, "outside the folder"),
        ({"weight_map": {"a": "a/b.safetensors"}}, "outside the folder"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightsError, match=message):
            checkpoints.read(tmp_path)


def test_damaged_files_are_refused_by_the_key_of_their_path(state: dict[str, Tensor], tmp_path: Path) -> None:
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match=r"list\.pth: not a readable checkpoint \(it contains a list"):
        checkpoints.read(tmp_path / "list.pth")
    for suffix, save_as in (("pth", torch.save), ("safetensors", save_file)):
        path = tmp_path / f"model.{suffix}"
        save_as(state, path)
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"<!DOCTYPE html><html>not found</html>" * 9, b""):
            path.write_bytes(content)
            line = rf"^key\.path: .*model\.{suffix}: not a readable checkpoint"
            with pytest.raises(WeightsError, match=line):
                parameters.load_into(module, Source("key", str(path)), official_files.clean_transformer)


class Code:
    """Pickles as a call."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self._target)!r}, 'w').close()", "")


def test_code_in_a_torch_file_is_never_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "model.pth", tmp_path / "ran"
    for write in (torch.save, lambda code, path: path.write_bytes(pickle.dumps(code))):
        write({"a": Code(trace)}, path)
        with pytest.raises(WeightsError, match="not a readable checkpoint"):
            checkpoints.read(path)
        assert not trace.exists()


def test_one_error_lists_everything_that_does_not_fit(state: dict[str, Tensor]) -> None:
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    parameters.check(state, module, "model")
    wrong = state | {"surprise": torch.zeros(1), "pos_start": torch.zeros(2, 2)}
    del wrong["head.bias"]
    with pytest.raises(WeightsError, match=r"^model: the checkpoint does not fit \(3 tensors\): ") as caught:
        parameters.check(wrong, module, "model")
    for part in ("missing head.bias", "unexpected surprise", "pos_start is (2, 2), should be (1, 1, 64)"):
        assert part in str(caught.value)


def test_tokenizer_names_of_both_kinds() -> None:
    """Some files lack a level of names inside convolutions and norms, and some have the tokenizer under `vae`."""
    lacking = re.compile(r"\b((?:conv|norm)\w+|nin_shortcut|(?:up|down)sample\.conv)\.(?:conv|norm)\.")
    widths = {"encoder_widths": (32, 64), "decoder_widths": (32, 64)}
    state = BSQ(BSQConfig(bits=8, base=32, **widths, blocks=1, scales=3)).state_dict()
    raw = {lacking.sub(r"\1.", name): one for name, one in state.items()} | {"quantizer.mask": torch.zeros(8)}
    assert not raw.keys() >= state.keys()
    assert same(official_files.clean_tokenizer({"vae": raw}), state)
    assert same(official_files.clean_tokenizer({**state}), state)


def test_parameters_of_other_numbers_are_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Floats of 16 to 64 bits are read; a cast of others would give numbers without a word."""
    name, path = "word_embed.weight", tmp_path / "x.safetensors"
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    source = Source("model.sources.transformer", str(path))
    save_file({**state, name: state[name].double()}, path)
    parameters.load_into(module, source, dict)
    assert torch.equal(module.state_dict()[name], state[name])
    for dtype in (torch.complex64, torch.int8, torch.float8_e4m3fn):
        save_file({**state, name: state[name].to(dtype)}, path)
        with pytest.raises(WeightsError, match=rf"{name} is {str(dtype)[6:]}; must be .* float32"):
            parameters.load_into(module, source, dict)
