"""Checkpoints: the real models' names and shapes, every published form, and refusals that say why."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from kvbench.core.files import hash_path
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


@pytest.mark.parametrize("form", ["flat", "trainer", "gpt_fsdp"])
def test_torch_files_in_every_published_form(form: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    raw = official_extras(state)
    nested = {"flat": raw, "trainer": {"trainer": raw}, "gpt_fsdp": {"trainer": {"gpt_fsdp": raw, "step": 1}}}
    path = tmp_path / "model.pth"
    torch.save(nested[form], path)
    assert same(official_files.clean_transformer(checkpoints.read(path)), state)


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


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_folders(kind: str, state: dict[str, Tensor], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_of_shards_names_the_shard(
    name: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    write_shards(tmp_path, state, 2)
    assert same(dict(checkpoints.read(tmp_path)), state)
    damage, message = DAMAGES[name]
    paths = [tmp_path / f"model-{number}.safetensors" for number in (0, 1)]
    content = damage(*(path.read_bytes() for path in paths))
    paths[1].unlink()
    if content is not None:
        paths[1].write_bytes(content)
    with pytest.raises(WeightsError, match=rf"^{re.escape(str(tmp_path))}.*{message}[^\n]*$"):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": 3}}, r"model\.safetensors\.index\.json has no weight_map"),
        ([], r"model\.safetensors\.index\.json has no weight_map"),
        *(
            ({"weight_map": {"a": shard}}, "outside the folder")
            for shard in ("../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors")
        ),
        ({"weight_map": {"a": "gone.safetensors"}}, "not a readable checkpoint"),
        (None, r"no model\.safetensors, model\.safetensors.index.json"),
    ],
)
def test_an_index_must_name_files_of_its_folder(index: object, message: str, tmp_path: Path) -> None:
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty"])
def test_damaged_files_are_errors(suffix: str, damage: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    if suffix == "pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    whole = path.read_bytes()
    foreign = b"<!DOCTYPE html><html>not found</html>" * 9
    path.write_bytes({"truncated": whole[: len(whole) // 2], "foreign": foreign, "empty": b""}[damage])
    with pytest.raises(WeightsError, match="not a readable checkpoint"):
        checkpoints.read(path)


class Code:
    """Pickles as a call."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self._target)!r}, 'w').close()", "")


@pytest.mark.parametrize("plain", [False, True], ids=["torch", "pickle"])
def test_code_in_a_torch_file_is_never_run(plain: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "model.pth", tmp_path / "ran"
    if plain:
        path.write_bytes(pickle.dumps({"a": Code(trace)}))
    else:
        torch.save({"a": Code(trace)}, path)
    with pytest.raises(WeightsError, match="not a readable checkpoint"):
        checkpoints.read(path)
    assert not trace.exists()


def test_one_error_lists_everything_that_does_not_fit(state: dict[str, Tensor]) -> None:
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    parameters.check(state, module, "model")
    wrong = dict(state)
    del wrong["head.bias"]
    wrong["surprise"] = torch.zeros(1)
    wrong["pos_start"] = torch.zeros(2, 2)
    with pytest.raises(WeightsError) as caught:
        parameters.check(wrong, module, "model.transformer")
    message = str(caught.value)
    assert message.startswith("model.transformer: the checkpoint does not fit")
    for part in (
        "missing head.bias",
        "unexpected surprise",
        "pos_start is (2, 2), should be (1, 1, 64)",
        "fit (3 tensors): ",
    ):
        assert part in message
    with pytest.raises(WeightsError, match=r"does not fit \(\d\d tensors\)"):
        parameters.check({}, module, "model")


def unwrapped(name: str) -> str:
    """The name without the level that some files lack inside convolutions and norms."""
    return re.sub(r"\b((?:conv|norm)\w+|nin_shortcut|(?:up|down)sample\.conv)\.(?:conv|norm)\.", r"\1.", name)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "vae"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["unwrapped", "wrapped"])
def test_tokenizer_names_of_both_kinds(nested: bool, wrapped: bool) -> None:
    shape = {"blocks": 1, "stem": 2, "mixers": 1, "grid": (4, 4), "scales": 3}
    state = BSQ(
        BSQConfig(bits=8, base=32, encoder_widths=(32, 64, 64), decoder_widths=(32, 64, 64), **shape)
    ).state_dict()
    raw: dict[str, object] = {name if wrapped else unwrapped(name): tensor for name, tensor in state.items()}
    raw["quantizer.lfq.mask"] = torch.zeros(8)
    if not wrapped:
        assert not raw.keys() >= state.keys()
    assert same(official_files.clean_tokenizer({"vae": raw} if nested else raw), state)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.int8, torch.float8_e4m3fn])
def test_parameters_of_other_numbers_are_refused(
    dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Floats of 16 to 64 bits are read; a cast of others would give numbers without a word."""
    name = "word_embed.weight"
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    source = Source("model.sources.transformer", str(tmp_path / "x.safetensors"))
    save_file({**state, name: state[name].double()}, tmp_path / "x.safetensors")
    parameters.load_into(module, source, dict)
    assert torch.equal(module.state_dict()[name], state[name])
    save_file({**state, name: state[name].to(dtype)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match=rf"x.safetensors: {name} is {str(dtype)[6:]}; must be .* float32"):
        parameters.load_into(module, source, dict)


def test_official_files_are_converted_once(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(cache))
    path = tmp_path / "model.pth"
    halves = {name: t.half() for name, t in official_extras(state).items() if isinstance(t, Tensor)}
    torch.save({"trainer": {"gpt_fsdp": halves}}, path)
    digests = []
    for _ in range(2):
        module, source = (
            parameters.build_on_meta(lambda: Infinity(TINY)),
            Source("model.transformer", str(path)),
        )
        digests.append(parameters.load_into(module, source, official_files.clean_transformer))
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
        assert same(module.state_dict(), {name: tensor.half().float() for name, tensor in state.items()})
    assert digests == [hash_path(path)] * 2
    kept, note = sorted(cache.iterdir(), key=lambda path: path.suffix == ".sha256")
    assert note.read_text() == hash_path(kept)
    assert kept.name == f"model-{digests[0][:16]}.safetensors"
    assert load_file(kept).keys() == state.keys()


def test_a_damaged_file_of_a_model_is_refused_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"<!DOCTYPE html>" * 9)
    module = parameters.build_on_meta(lambda: Infinity(TINY))
    message = r"^model\.transformer\.path: .*model\.safetensors: not a readable checkpoint"
    with pytest.raises(WeightsError, match=message):
        parameters.load_into(module, Source("model.transformer", str(path)), official_files.clean_transformer)
