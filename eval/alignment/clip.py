"""CLIP networks of open_clip, and CLIP score."""

import contextlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import Pixels, expecting, full_float32, stack_pictures
from kvbench.eval.protocol.scores import MetricSpec

PACKAGES = ("open_clip", "torchvision")
OPENAI_VIT_L_14 = Weight.at(
    "https://openaipublic.azureedge.net/clip/models/"
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836/ViT-L-14.pt",
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836",
    caches=("~/.cache/clip",),
)
HEAD_LAYERS = (0, 2, 4, 6, 7)
"""Indices of the linear layers in a rating head; only dropout lies between them."""
SHAPE_BUFFERS = ("input_resolution", "context_length", "vocab_size")
"""Scalars that OpenAI's archives store as tensors."""


class Clip:
    """A CLIP network in float32 with its tokenizer and image transform.

    Args:
        model: architecture in open_clip.
        file: weights, whose hash the caller has checked.
        device: torch device.
        quick_gelu: use activations x sigmoid(1.702 x), as in OpenAI's networks. open_clip uses GELU by default,
            which changes the vectors without an error, so the network is checked.
        scripted: see `read_state`.

    Raises:
        ValueError: weights or activations do not match.
    """

    def __init__(
        self, model: str, file: Path, device: str, *, quick_gelu: bool, scripted: bool = False
    ) -> None:
        import open_clip  # slow to import

        state = read_state(file, scripted=scripted)
        network = open_clip.create_model(model, load_weights=False, force_quick_gelu=quick_gelu)
        expected = "QuickGELU" if quick_gelu else "GELU"
        kinds = {type(part).__name__ for name, part in network.named_modules() if name.endswith("mlp.gelu")}
        if kinds != {expected}:
            raise ValueError(f"open_clip built {model} with {', '.join(sorted(kinds))}, not {expected}")
        with expecting(f"a {model}", file):
            network.load_state_dict(state)
        self._network = network.float().eval().to(device)
        self._tokenize = open_clip.get_tokenizer(model)
        self._device = device
        size = network.visual.image_size
        self.side = int(size[0] if isinstance(size, Sequence) else size)
        self.transform = open_clip.image_transform(self.side, is_train=False)

    @torch.inference_mode()
    def images(self, pixels: Tensor) -> Tensor:
        """Return unit vectors float32 [N, D] of transformed images float32 [N, 3, side, side]."""
        with full_float32():
            return F.normalize(self._network.encode_image(pixels.to(self._device)), dim=-1)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors float32 [N, D] of texts, which are cut to the network's context length."""
        with full_float32():
            tokens = self._tokenize(list(texts)).to(self._device)
            return F.normalize(self._network.encode_text(tokens), dim=-1)


def cosines(clip: Clip, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the cosine float32 [N] between each transformed image, float32 [N, 3, side, side], and its prompt."""
    return (clip.images(pictures) * clip.texts(prompts)).sum(-1)


def read_state(file: Path, *, scripted: bool = False) -> Mapping[str, Tensor]:
    """Return the tensors in safetensors, a plain torch file or OpenAI's TorchScript archive, by name.

    Args:
        file: file to read.
        scripted: read TorchScript archives too. Reading runs their code, so the hash must be checked before.

    Raises:
        ValueError: the file has none of these formats, or is a TorchScript archive without `scripted`.
    """
    if _is_torchscript(file) and not scripted:
        raise ValueError(
            f"{file} is a TorchScript archive, whose code runs when it is read: its SHA-256 must be known"
        )
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if _is_torchscript(file):
            state = torch.jit.load(file, map_location="cpu").state_dict()
            return {name: value for name, value in state.items() if name not in SHAPE_BUFFERS}
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each format raises its own exceptions
        raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} holds no tensors by name; give the network's state dict")
    return {name.removeprefix("module."): value for name, value in state.items()}


def read_head(state: Mapping[str, Tensor], prefix: str, device: str) -> Callable[[Tensor], Tensor]:
    """Return a function from vectors float32 [N, D] to ratings [N]; raise KeyError if one of its layers is missing.

    `prefix` begins the layers' names in `state`.
    """
    layers = [
        [state[f"{prefix}{index}.{part}"].to(device, torch.float32) for part in ("weight", "bias")]
        for index in HEAD_LAYERS
    ]

    def rate(vectors: Tensor) -> Tensor:
        for weight, bias in layers:
            vectors = F.linear(vectors, weight, bias)
        return vectors[:, 0]

    return rate


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with contextlib.closing(zipfile.ZipFile(file)) as archive:
        return any("/code/" in name for name in archive.namelist())


@dataclass(frozen=True)
class ClipScore(PromptScore):
    """`clip_score[<model>]`: 100 x cosine between image and prompt, not below 0 (Hessel et al., arXiv:2104.08718).

    Images get the network's own transform: resize of the shorter side (PIL, bicubic) and centre crop, then float32.

    Attributes:
        model: architecture in open_clip, part of the metric's name.
        quick_gelu: use QuickGELU, as in OpenAI's networks.
        network: the network's file.
    """

    model: str = "ViT-L-14"
    quick_gelu: bool = True
    network: Weight = OPENAI_VIT_L_14
    name: ClassVar[str] = "clip_score"
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)

    @property
    def protocol(self) -> str:
        """Name of CLIP's model."""
        return self.model

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load the network; return its scorer and the hashes of its files."""
        [file], hashes = self.require()
        clip = Clip(self.model, file, device, quick_gelu=self.quick_gelu, scripted=self.network.pinned)

        def score(pixels: Pixels, prompts: Sequence[str]) -> Tensor:
            return (100 * cosines(clip, stack_pictures(pixels, clip.transform), prompts)).clamp(min=0)

        return score, hashes
