"""VAR as the harness sees it: prompts, shapes, published files and random weights."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.core.files import hash_path
from kvbench.core.settings import Settings
from kvbench.engine.memory import paper_mib
from kvbench.models.base import read_labels
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import build_on_meta, fill_random
from kvbench.models.files.weights import Source
from kvbench.models.var.model import VARModel
from kvbench.models.var.transformer import VAR, VARConfig
from kvbench.runs.cache_plan import find_dtype
from tests.support.reference_var import TINY_VQ, golden, official_name, tokenizer, transformer
from tests.support.small_models import configured


@pytest.mark.parametrize(("name", "batch", "printed"), [("var_d30", 50, 22.412), ("var_d36", 25, 53.156)])
def test_memory_of_all_tokens_is_what_papers_print(name: str, batch: int, printed: float) -> None:
    spec = configured(f"model={name}").spec
    assert paper_mib(spec.all_heads * spec.ends[-1], spec, batch) / 1000 == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize(
    ("prompt", "label"), [("3", 3), ("0 tench", 0), (" 9  two words ", 9), ("-1", 30), ("-1 anything", 30)]
)
def test_the_first_word_is_the_class(prompt: str, label: int) -> None:
    assert read_labels([prompt], 30, "var_tiny") == [label]


def test_random_numbers_belong_to_the_shape() -> None:
    shapes = ({"depth": 2}, {"depth": 3}, {"depth": 2, "classes": 9})
    base = VARConfig(1, 32, 2, (1, 2), classes=5, codes=16, channels=4)
    made = [fill_random(build_on_meta(lambda own=own: VAR(replace(base, **own)))) for own in shapes]
    assert len(set(made)) == 3


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference models as official files: flat, with the constant buffers, names without the extra level."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    state: dict[str, Tensor] = dict(transformer("sep").state_dict())
    state |= {"lvl_1L": torch.zeros(1, 66).long(), "attn_bias_for_masking": torch.zeros(1, 1, 66, 66)}
    state |= {f"blocks.{i}.attn.zero_k_bias": torch.zeros(64) for i in range(4)}
    book = {official_name(name): tensor for name, tensor in tokenizer().state_dict().items()}
    book["quantize.ema_vocab_hit_SV"] = torch.zeros(5, 128)
    paths = {part: tmp_path / f"{part}.pth" for part in ("transformer", "tokenizer")}
    torch.save(state, paths["transformer"])
    torch.save(book, paths["tokenizer"])
    return paths


def reading(files: dict[str, Path], **swapped: str) -> VARModel:
    sources = {part: Source(f"model.sources.{part}", str(files[swapped.get(part, part)])) for part in files}
    base = configured("model=var_tiny")
    config = VARConfig(4, 64, 4, (1, 2, 3, 4, 6), 10, 128, 8)
    return VARModel("var_golden", config, TINY_VQ, base.sampling, sources)


def test_official_files_are_read(files: dict[str, Path]) -> None:
    one = reading(files)
    one.load("cpu")
    expected = golden("sep")
    with torch.inference_mode():
        logits = one._transformer(expected["tf.label"], expected["tf.x_in"])
        image = one._tokenizer.decode(golden("vae_tiny")["fhat_in"])
    torch.testing.assert_close(logits, expected["tf.logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(image, golden("vae_tiny")["fhat_img"], atol=1e-4, rtol=0)
    digests = "".join(hash_path(files[part]) for part in ("transformer", "tokenizer"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()


def test_official_names_in_safetensors_are_read(files: dict[str, Path], tmp_path: Path) -> None:
    plain = reading(files)
    plain.load("cpu")
    for part, path in files.items():
        save_file(torch.load(path), tmp_path / f"{part}.safetensors")
    one = reading({part: tmp_path / f"{part}.safetensors" for part in files})
    one.load("cpu")
    for found, expected in ((one._transformer, plain._transformer), (one._tokenizer, plain._tokenizer)):
        assert all(torch.equal(p, q) for p, q in zip(found.parameters(), expected.parameters(), strict=True))


def test_on_a_gpu_temperatures_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARModel, "compute_dtype", lambda *_: VARModel.half)  # there is no GPU
    one = configured("model=var_tiny", "model.weights=random", "model.transformer.shared_aln=true")
    one.load("cpu")
    block = one._transformer.blocks[0]
    assert block.attn.scale_mul_1H11.dtype == block.ada_gss.dtype == torch.float32
    assert block.attn.mat_qkv.weight.dtype == block.ffn.fc2.bias.dtype == torch.float16
    assert one._transformer.head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("var_d30", "cuda", torch.float16),
        ("infinity_2b", "cuda:1", torch.bfloat16),
        ("var_d30", "cpu", torch.float32),
        ("infinity_tiny", "cpu", torch.float32),
    ],
)
def test_keys_and_values_are_stored_as_computed(name: str, device: str, dtype: torch.dtype) -> None:
    one = configured(f"model={name}")
    assert one.compute_dtype(device) == dtype
    for asked, stored in (("auto", dtype), ("bfloat16", torch.bfloat16)):
        settings = Settings("run", 1, 1, 0, 8, device, asked, Path("runs"))
        assert find_dtype(settings, one) == stored


@pytest.mark.parametrize("part", ["transformer", "tokenizer"])
def test_swapped_files_are_refused(files: dict[str, Path], part: str) -> None:
    other = {"transformer": "tokenizer", "tokenizer": "transformer"}[part]
    with pytest.raises(WeightsError, match=rf"model\.sources\.{part}: the checkpoint does not fit"):
        reading(files, **{part: other}).load("cpu")


def test_a_file_without_names_is_refused(files: dict[str, Path]) -> None:
    torch.save([torch.zeros(3)], files["transformer"])
    with pytest.raises(
        WeightsError, match=r"transformer\.pth: not a readable checkpoint \(it contains a list"
    ):
        reading(files).load("cpu")
