"""Latents decoded as official programs decode them: dtypes, rounding to 8 bits, TF32, and names of runs."""

import threading
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.core.devices import tf32, use_device
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.autoencoder import ConvDecoder, NetworkConfig, Norm
from kvbench.models.parts.decoding import Decoding, round_pixels
from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.runs.job import Job
from tests.support import reference_emu3, reference_janus, reference_lumina
from tests.support.fake_run import job_in
from tests.support.marks import slow_except
from tests.support.small_models import SMALL_TOKENIZER, configured, full, load, shrink

LLAMAGEN = shrink("llamagen_b", *SMALL_TOKENIZER, heads=2, vocabulary=128, grid=[3, 4], classes=10)
MODELS = {
    "llamagen": (LLAMAGEN, "3"),
    "janus": (reference_janus.SMALL, "a red circle"),
    "lumina": (reference_lumina.SMALL, "a red circle"),
    "emu3": (reference_emu3.SMALL, "a red circle"),
    "infinity": (("model=infinity_tiny",), "a red circle"),
    "var": (("model=var_tiny",), "3"),
}


def draw(one: Any, prompt: str) -> Tensor:
    return one.generate([prompt], full(one), PromptNoise(0, (0,)))


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()}


@pytest.mark.parametrize("name", slow_except(("llamagen", "var").__contains__, MODELS))
def test_layers_are_cast_as_officially_and_pixels_near_those_in_single_precision(name: str) -> None:
    overrides, prompt = MODELS[name]
    exact, single = draw(load(*overrides), prompt).double(), {torch.float32}
    for dtype, least in (("float16", 55), ("bfloat16", 40)):
        half = load(*overrides, f"model.decoder_dtype={dtype}")
        decibels = 10 * (255**2 / (exact - draw(half, prompt).double()).square().mean()).log10()
        assert least < decibels < torch.inf
    tokenizer = half._tokenizer
    assert tokenizer.decoder.conv_in.conv.weight.is_contiguous(memory_format=torch.channels_last)
    norms = [one for one in tokenizer.decoder.modules() if isinstance(one, nn.GroupNorm)]
    convolutions = [one for one in tokenizer.decoder.modules() if isinstance(one, nn.Conv2d)]
    assert set().union(*map(dtypes, convolutions)) == {torch.bfloat16}
    official = single if name in ("infinity", "var") else {torch.bfloat16}
    assert set().union(*map(dtypes, norms)) == official
    if (before := getattr(tokenizer, "post_quant_conv", None)) is not None:
        assert dtypes(before) == ({torch.bfloat16} if name in ("var", "janus") else single)
    if name == "janus":
        assert dtypes(tokenizer) == {torch.bfloat16}


def test_autocast_rounds_as_torch_autocast() -> None:
    """On a GPU `torch.autocast` computes norms in float32; on a CPU it has no rule for them, so the test casts them."""
    config = NetworkConfig(
        base=32, encoder_widths=(32, 64), decoder_widths=(32, 64), latents=8, attention="middle"
    )
    tokenizer = VQVAE(VQConfig(codes=16, channels=8, widths=(32, 64)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer.decoder = ConvDecoder(config)
        latents = 3 * torch.randn(2, 8, 8, 8)
    official = deepcopy(tokenizer)
    for module in official.decoder.modules():
        if isinstance(module, Norm):
            module.forward = partial(official_norm, module.norm)  # type: ignore[method-assign]
    official.to(memory_format=torch.channels_last)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = official.decode(latents)
    tokenizer.cast_decoder(torch.bfloat16, "autocast")
    with torch.inference_mode():
        found = tokenizer.decode(latents)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def official_norm(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    x = nn.functional.group_norm(x.float(), norm.num_groups, norm.weight, norm.bias, norm.eps)
    return x * x.sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_truncated_pixels_are_the_official_arithmetic(dtype: torch.dtype) -> None:
    images = (torch.linspace(-1.2, 1.2, 6000).view(1, 3, 40, 50)).to(dtype)
    official = (
        images.clamp(-1, 1).add(1).mul(0.5).mul(255).to(torch.uint8)
    )  # Infinity and VAR, in their dtype
    assert torch.equal(round_pixels(images, "truncate", True), official)
    wide = ((images.double().clamp(-1, 1) + 1) / 2 * 255).float()  # Janus and Lumina, in float32
    assert torch.equal(round_pixels(images, "truncate", False), wide.to(torch.uint8))
    assert torch.equal(round_pixels(images, "nearest", True), wide.round().to(torch.uint8))
    if dtype != torch.float32:
        assert not torch.equal(official, wide.to(torch.uint8))


def test_what_auto_is() -> None:
    """On a CPU float32; on a GPU what the official program does, by family."""
    found = {name: configured(*overrides) for name, (overrides, _) in MODELS.items()}
    on_gpu = {name: one.resolve_settings("cuda:1")["decoder_dtype"] for name, one in found.items()}
    assert on_gpu == {
        "llamagen": "tf32", "janus": "cast bfloat16", "lumina": "tf32", "emu3": "tf32",
        "infinity": "autocast bfloat16", "var": "autocast float16",
    }  # fmt: skip
    assert {one.resolve_settings("cpu")["decoder_dtype"] for one in found.values()} == {"float32"}
    assert {one.decoding.products for one in found.values() if one.decoding.on_gpu == "tf32"} == {True, False}
    exact = configured("model=var_d16", "model.weights=random", "model.decoder_dtype=float32")
    assert exact.resolve_settings("cuda")["decoder_dtype"] == "float32"
    for name, (overrides, _) in MODELS.items():
        wide = configured(*overrides, "model.decoder_dtype=float32").decoding_bytes(3)
        assert wide == found[name].decoding_bytes(3) * (1 if on_gpu[name] == "tf32" else 2)


def named(tmp_path: Path, device: str, *overrides: str, model: str) -> Any:
    """The settings in the name of a run of a model on a device."""
    job = job_in(tmp_path)
    one = configured(f"model={model}", *overrides)
    config = {**job.config, "model": {"decoder_dtype": one.decoder_dtype, "rounding": one.rounding}}
    changed: Job = replace(job, model=one, config=config, settings=replace(job.settings, device=device))
    return changed.model_settings


def test_the_arithmetic_of_a_device_is_part_of_a_runs_name(tmp_path: Path) -> None:
    """As it is on the device, so that `auto` and the dtype that it means are one run."""
    tiny = partial(named, tmp_path, model="infinity_tiny")
    exact = {"decoder_dtype": "float32", "rounding": "nearest"}
    assert tiny("cpu") == tiny("cpu", "model.decoder_dtype=float32") == exact
    assert tiny("cuda", "model.decoder_dtype=float32") == exact
    assert tiny("cuda") == exact | {"decoder_dtype": "autocast bfloat16"}
    assert tiny("cpu", "model.rounding=truncate") == exact | {"rounding": "truncate"}


class Watcher:
    """A tokenizer that notes torch's settings while it decodes, and lets another thread use the device meanwhile."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def decode(self, latents: Tensor) -> Tensor:
        thread = threading.Thread(target=use_device, args=("cuda",))
        thread.start()
        thread.join()
        self.seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return latents


def test_tf32_is_of_the_decode_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread that makes the device current, as that of noise, does not end it; afterwards all is as before."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    watcher, latents = Watcher(), torch.zeros(1, 3, 2, 2)
    for products in (True, False):
        for arithmetic in ("tf32", "float32"):
            Decoding("tf32", products=products).decode(watcher, latents, 1, arithmetic, "nearest")  # type: ignore[arg-type]
    assert watcher.seen == [(True, True), (False, False), (True, False), (False, False)]
    assert torch.backends.cudnn.allow_tf32
    with pytest.raises(ZeroDivisionError), tf32(convolutions=False, products=True):
        1 / 0  # noqa: B018
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (True, False)
    use_device("cuda")
    assert not torch.backends.cudnn.allow_tf32
