"""Image models as the harness sees them: official files give the official images, and other files are refused."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.core.files import hash_path
from kvbench.models.base import TextFeatures
from kvbench.models.emu3.model import Emu3Model
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.janus.model import JanusModel
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.lumina.model import LuminaModel
from kvbench.models.var.model import VARModel
from tests.support import reference_emu3 as emu3
from tests.support import reference_janus as janus
from tests.support import reference_llamagen as llamagen
from tests.support import reference_lumina as lumina
from tests.support import reference_var as var
from tests.support.reference import OneStream
from tests.support.small_models import configured, full


@dataclass(frozen=True)
class Official:
    """A reference model, and an image that the official program drew."""

    kind: type[Any]
    networks: tuple[Any, Any]
    """Shapes of transformer and tokenizer."""
    sampling: tuple[str, dict[str, Any]]
    """Model whose sampling is changed, and how."""
    files: dict[str, Callable[[], dict[str, object]]]
    """Contents of files by part and name, with what published ones hold besides; texts have no file that is read."""
    prompts: Sequence[str]
    seed: int
    image: Callable[[], Tensor]
    """Pixels uint8 [images, H, W, 3], or values in [-1, 1], [images, 3, H, W]."""
    differing: float = 1e-3
    """Share of pixels where float32 may lie across a whole number."""
    config: tuple[dict[str, object], str] = ({}, "")
    """Wrong contents of the `config.json` beside `weights`, and how they are refused."""
    more: dict[str, Any] = field(default_factory=dict)


def zeros(*names: str) -> dict[str, object]:
    return {name: torch.zeros(2) for name in names}


def write_var() -> dict[str, object]:
    buffers = {"lvl_1L": torch.zeros(1, 66).long(), "attn_bias_for_masking": torch.zeros(1, 1, 66, 66)}
    biases = {f"blocks.{i}.attn.zero_k_bias": torch.zeros(64) for i in range(4)}
    return {**var.transformer("sep").state_dict(), **buffers, **biases}


def write_var_tokenizer() -> dict[str, object]:
    state = {var.official_name(name): tensor for name, tensor in var.tokenizer().state_dict().items()}
    return {**state, "quantize.ema_vocab_hit_SV": torch.zeros(5, 128)}


def write_vqgan() -> dict[str, object]:
    state = {**lumina.official_state("vqgan"), **zeros("loss.logvar", "encoder.conv_in.bias")}
    return {"state_dict": state, "epoch": 3}


def write_vq() -> dict[str, object]:
    return {"model": {**llamagen.official_state("vq_tiny"), **zeros("quantize.codebook_used")}, "steps": 7}


FOREIGN = ("aligner.layers.0.weight", "vision_model.pos_embed", "gen_vision_model.quantize.codebook_used")
OFFICIAL = {
    "janus": Official(
        JanusModel, (janus.CONFIGS["mha"], janus.TINY_VQ), ("janus_pro_1b", {"cfg": 2.0, "temperature": 0.7}),
        {"weights pytorch_model.bin": lambda: {**janus.whole_state(), **zeros(*FOREIGN)}, "text tokenizer.json": dict},
        [janus.prompt_of("mha", "sample_t07_cfg2")] * 3, 7, lambda: janus.golden("mha")["sample_t07_cfg2.image_u8"],
        config=({"language_config": {"rms_norm_eps": 1e-5, "vocab_size": 5}},
                r"config\.json: language_config\.vocab_size is 5, .*; language_config\.rms_norm_eps"),
        more={"prompt_tokens": 10},
    ),
    "lumina": Official(
        LuminaModel, (lumina.CONFIGS["lm"], lumina.TINY_VQ),
        ("lumina_mgpt_7b_768", {"cfg": 2.0, "top_k": 50, "temperature": 0.9}),
        {"weights model.safetensors": lambda: dict(lumina.official_state("lm")), "tokenizer vqgan.ckpt": write_vqgan,
         "text tokenizer.json": dict},
        [lumina.prompt_of("sample_cfg2_k50_t09")], 7, lambda: lumina.golden()["sample_cfg2_k50_t09.image_u8"], 1e-2,
        ({"rope_theta": 1e6, "swin_norm": True}, r"config\.json: rope_theta is 1000000\.0, .*; swin_norm is True"),
        {"prompt_tokens": 12},
    ),
    "emu3": Official(
        Emu3Model, (emu3.CONFIG, emu3.TINY_VQ), ("emu3_gen", {"top_k": 20}),
        {"weights model.safetensors": lambda: dict(emu3.official_state()), "text tokenizer.json": dict},
        ["a red cube"] * 2, emu3.meta()["cases"]["sampled"]["seed"], lambda: emu3.golden()["sampled.image_u8"], 1e-2,
        ({"text_config": {"rope_theta": 1e4, "vocab_size": 5, "rope_scaling": {"rope_type": "default"}}},
         r"config\.json: text_config\.vocab_size is 5, .*; text_config\.rope_theta is 10000\.0, [^;]*; set [^;]*$"),
        {"suffix": emu3.SUFFIX, "negative": emu3.NEGATIVE, "prompt_tokens": 40},
    ),
    "llamagen": Official(
        LlamaGenModel, (llamagen.CONFIGS["c2i"], llamagen.TINY_VQ),
        ("llamagen_b", {"cfg": 3.0, "temperature": 0.9, "top_k": 40, "top_p": 0.95}),
        {"transformer c2i.pt": lambda: {**llamagen.official_state("c2i_tiny"), **zeros("freqs_cis")},
         "tokenizer vq.pt": write_vq},
        [str(label) for label in llamagen.golden("c2i")["cond"].tolist()], 1,
        lambda: llamagen.golden("c2i")["sampled.img"],
    ),
    "llamagen with captions": Official(
        LlamaGenModel, (llamagen.CONFIGS["t2i"], llamagen.TINY_VQ), ("llamagen_xl_t2i", {"top_k": 50}),
        {"transformer t2i.pt": lambda: {"model": llamagen.official_state("t2i_tiny")}, "tokenizer vq.pt": write_vq,
         "text t5.pt": dict},
        ["A  Cat,dog", "(two)"], 1, lambda: llamagen.golden("t2i")["sampled.img"], more={"text": "t5"},
    ),
    "var": Official(
        VARModel, (var.transformer("sep").config, var.TINY_VQ), ("var_tiny", {"cfg": 1.5, "top_k": 40, "top_p": 0.96}),
        {"transformer sep.pth": write_var, "tokenizer vae.pth": write_var_tokenizer},
        ["3", "7"], 0, lambda: var.golden("sep")["sampled.img"] * 2 - 1,
    ),
}  # fmt: skip
each = pytest.mark.parametrize("family", OFFICIAL)


class Encoded:
    """In place of Flan-T5: the reference run's features of two captions; notes settings and captions."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def load(self, source: Source, *settings: object) -> tuple["Encoded", str]:
        self.asked.append(settings)
        return self, hash_path(source.locate())

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        self.asked += prompts
        golden = llamagen.golden("t2i")
        lengths = tuple(golden["t5_mask"].sum(1).tolist())
        rows = [row[:length] for row, length in zip(golden["t5_emb"], lengths, strict=True)]
        return TextFeatures(torch.cat(rows), lengths)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Encoded:
    """No text encoder; prompts of Janus and Lumina are token numbers."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    for module, reference in (("janus", janus), ("lumina", lumina)):
        monkeypatch.setattr(
            f"kvbench.models.{module}.model.read_tokenizer",
            lambda source, *_, reference=reference: (reference.read_numbers(), hash_path(source.locate())),
        )
    encoder = Encoded()
    monkeypatch.setattr("kvbench.models.llamagen.model.load_t5", encoder.load)
    return encoder


def write(path: Path, state: dict[str, object]) -> None:
    """A file of weights, or words in place of what is not read."""
    if not state:
        path.write_text("numbers")
    elif path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor)}, path)
    else:
        torch.save(state, path)


def write_files(family: str, folder: Path) -> dict[str, Path]:
    paths = {}
    for name, content in OFFICIAL[family].files.items():
        part, file = name.split()
        paths[part] = folder / file
        write(paths[part], content())
    if family == "emu3":
        pytest.importorskip("tokenizers")
        emu3.write_tokenizer(paths["text"])
    return paths


def reading(family: str, paths: dict[str, Path]) -> Any:
    given, (name, changed) = OFFICIAL[family], OFFICIAL[family].sampling
    sources = {part: Source(f"model.sources.{part}", str(p)) for part, p in paths.items()}
    sampling = replace(configured(f"model={name}").sampling, **changed)
    return given.kind("golden", *given.networks, sampling, sources, **given.more)


@each
def test_official_files_give_the_official_images(family: str, tmp_path: Path, encoded: Encoded) -> None:
    given, paths = OFFICIAL[family], write_files(family, tmp_path)
    if "captions" in family:
        pytest.importorskip("ftfy")
    one = reading(family, paths)
    one.load("cpu")
    images = one.generate(given.prompts, full(one), OneStream(given.seed, len(given.prompts)))
    expected = given.image()
    if expected.is_floating_point():
        expected = (expected * 127.5 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    expected = expected.reshape(images.shape)
    assert (images.int() - expected.int()).abs().max() <= 1
    assert (images != expected).float().mean() < given.differing
    digests = "".join(map(hash_path, paths.values()))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert list(one.calls) == ["text", "transformer", "decode"]
    if "captions" in family:
        assert encoded.asked == [("cpu", torch.float32, 120), "a cat, dog", "two"]


@pytest.mark.parametrize("family", [family for family, given in OFFICIAL.items() if given.config[0]])
def test_another_number_in_config_json_is_refused(family: str, tmp_path: Path, encoded: Encoded) -> None:
    paths, (contents, message) = write_files(family, tmp_path), OFFICIAL[family].config
    paths["weights"].with_name("config.json").write_text(json.dumps(contents))
    with pytest.raises(WeightsError, match=message):
        reading(family, paths).load("cpu")


def test_what_captions_need_is_named(
    tmp_path: Path, encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reading("llamagen with captions", write_files("llamagen with captions", tmp_path))
    monkeypatch.setattr("kvbench.models.llamagen.model.find_spec", lambda _: None)
    with pytest.raises(WeightsError, match=r"^model\.text=t5: install the `text` extra, which cleans"):
        one.load("cpu")
