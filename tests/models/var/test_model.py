"""VAR as the harness sees it: prompts, shapes, published files and random weights."""

import hashlib
import re
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import Tensor, nn

from kvbench.core.budget import Budget
from kvbench.core.files import hash_path
from kvbench.core.settings import Settings
from kvbench.engine.cache import KVCache
from kvbench.engine.memory import paper_mib
from kvbench.methods.full import Full
from kvbench.models.base import Cache, read_labels
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import PromptNoise
from kvbench.models.var.model import VARModel
from kvbench.models.var.transformer import VARConfig
from kvbench.models.weights import Source, WeightsError
from kvbench.runs.job import Job
from tests.support.reference_var import TINY_VQ, golden, official_name, tokenizer, transformer


def model(name: str, *overrides: str) -> VARModel:
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        return instantiate(hydra.compose("config", overrides=[f"model={name}", *overrides]).model)


def full(one: VARModel | InfinityModel) -> Cache:
    method = Full()
    method.prepare(one.spec, Budget.parse(1, one.spec))
    return KVCache(one.spec, method, dtype=torch.float32)


@pytest.fixture
def tiny() -> VARModel:
    one = model("var_tiny", "model.weights=random")
    one.load("cpu")
    return one


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "side"),
    [
        ("var_d16", 310_283_520, 680, 16),
        ("var_d20", 600_917_136, 680, 16),
        ("var_d24", 1_033_399_360, 680, 16),
        ("var_d30", 2_010_020_356, 680, 16),
        ("var_d36", 2_353_893_904, 2240, 32),
    ],
)
def test_published_shapes(name: str, parameters: int, tokens: int, side: int) -> None:
    one = model(name)
    depth = int(name.removeprefix("var_d"))
    assert one.parameters == parameters + 108_948_355
    assert (one.spec.layers, one.spec.heads, one.spec.head_dim) == (depth, depth, 64)
    assert (one.spec.ends[-1], one.spec.segments[-1].height, one.spec.logit_scale) == (tokens, side, 1)
    assert one.sources["transformer"].file == f"{name}.pth"
    assert one.sources["tokenizer"].file == "vae_ch160v4096z32.pth"
    assert {source.repo for source in one.sources.values()} == {"FoundationVision/var"}


@pytest.mark.parametrize(("name", "batch", "printed"), [("var_d30", 50, 22.412), ("var_d36", 25, 53.156)])
def test_memory_of_all_tokens_is_what_papers_print(name: str, batch: int, printed: float) -> None:
    spec = model(name).spec
    assert paper_mib(spec.all_heads * spec.ends[-1], spec, batch) / 1000 == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize(
    ("prompt", "label"), [("3", 3), ("0 tench", 0), (" 9  two words ", 9), ("-1", 30), ("-1 anything", 30)]
)
def test_the_first_word_is_the_class(tiny: VARModel, prompt: str, label: int) -> None:
    assert read_labels([prompt], 30, tiny.name) == [label]
    found = tiny.generate([prompt], full(tiny), PromptNoise(0, (5,)))
    plain = tiny.generate([str(label if label < 30 else -1)], full(tiny), PromptNoise(0, (5,)))
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    "prompt", ["", "30", "-2", "3.5", "3x", "a red circle", "1000 no such class", "+3", "²"]
)
def test_other_prompts_are_refused_by_name(tiny: VARModel, prompt: str) -> None:
    message = re.escape(f"prompt {prompt!r}: var_tiny wants a class number from 0 to 29")
    with pytest.raises(ValueError, match=message):
        tiny.check_prompts(["3", prompt])
    with pytest.raises(ValueError, match=message):
        tiny.generate([prompt], full(tiny), PromptNoise(0, (0,)))


def test_images_depend_on_class_and_noise_and_on_nothing_else(tiny: VARModel) -> None:
    def images(prompts: list[str], seed: int) -> Tensor:
        return tiny.generate(prompts, full(tiny), PromptNoise(seed, range(len(prompts))))

    first = images(["3", "7"], 0)
    assert (first.shape, first.dtype) == ((2, 96, 96, 3), torch.uint8)
    again = model("var_tiny", "model.weights=random")
    again.load("cpu")
    assert again.weights_sha256 == tiny.weights_sha256
    assert torch.equal(again.generate(["3", "7"], full(again), PromptNoise(0, range(2))), first)
    assert not torch.equal(images(["4", "7"], 0)[0], first[0])
    assert not torch.equal(images(["3", "7"], 1)[0], first[0])


def test_random_weights_make_images_that_are_not_saturated(tiny: VARModel) -> None:
    images = tiny.generate(list("0123456789"), full(tiny), PromptNoise(0, range(10))).float()
    assert ((images == 0) | (images == 255)).float().mean() < 0.2
    assert 20 < images.std() < 100


@pytest.mark.parametrize("text", ["vocabulary", "t5"])
def test_random_infinity_needs_no_files(text: str) -> None:
    made = []
    for _ in range(2):
        one = model("infinity_tiny", "model.weights=random", f"model.text={text}")
        one.sources.clear()
        one.load("cpu")
        prompts = ["a red circle", "a blue square"]
        made.append((one.weights_sha256, one.generate(prompts, full(one), PromptNoise(0, range(2)))))
    (digest, images), (other, same) = made
    assert digest == other
    assert torch.equal(images, same)
    assert not torch.equal(images[0], images[1])
    assert 20 < images.float().std() < 100


def test_random_numbers_belong_to_the_shape() -> None:
    digests = set()
    for override in ("depth=4", "depth=3", "classes=9"):
        one = model("var_tiny", "model.weights=random", f"model.transformer.{override}")
        one.load("cpu")
        digests.add(one.weights_sha256)
    assert len(digests) == 3


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
    base = model("var_tiny")
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
    monkeypatch.setattr(nn.Module, "to", lambda module, *_: module)  # there is no GPU
    one = model("var_tiny", "model.weights=random", "model.transformer.shared_aln=true")
    one.load("cuda")
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
def test_keys_and_values_are_stored_as_the_official_program_computes(
    name: str, device: str, dtype: torch.dtype
) -> None:
    one = model(name)
    assert one.compute_dtype(device) == dtype
    for asked, stored in (("auto", dtype), ("bfloat16", torch.bfloat16)):
        settings = Settings("run", 1, 1, 0, 8, device, asked, Path("runs"))
        assert Job(settings, one, Full(), "full", []).dtype == stored


@pytest.mark.parametrize("part", ["transformer", "tokenizer"])
def test_swapped_files_are_refused(files: dict[str, Path], part: str) -> None:
    other = {"transformer": "tokenizer", "tokenizer": "transformer"}[part]
    with pytest.raises(WeightsError, match=rf"model\.sources\.{part}: the checkpoint does not fit"):
        reading(files, **{part: other}).load("cpu")


def test_a_file_without_names_is_refused(files: dict[str, Path]) -> None:
    torch.save([torch.zeros(3)], files["transformer"])
    with pytest.raises(WeightsError, match=r"transformer\.pth: not a readable checkpoint \(it holds a list"):
        reading(files).load("cpu")


def test_missing_weights_say_how_to_get_them() -> None:
    with pytest.raises(
        WeightsError, match=r"model\.sources\.transformer: weights missing.*var_d30\.pth.*revision"
    ):
        model("var_d30").load("cpu")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "~model.sources.tokenizer",
            "model.sources names no tokenizer; use model.weights=random",
        ),
        ("model.tokenizer.codes=64", "model.transformer.codes=256: model.tokenizer.codes is 64"),
        ("model.transformer.channels=4", "model.transformer.channels=4: model.tokenizer.channels is 8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(override: str, named: str) -> None:
    with pytest.raises(Exception, match=re.escape(named)):
        model("var_tiny", override)
