"""CLIP networks through open_clip, and CLIP score on them."""

import contextlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.base import Result, SkipEvaluation, make_result
from kvbench.eval.protocol.intervals import are_classes
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.base import check_minimum
from kvbench.eval.spaces.float32 import full_float32

PACKAGES = ("open_clip", "torchvision")
OPENAI_VIT_L_14 = Weight(
    "ViT-L-14.pt",
    url="https://openaipublic.azureedge.net/clip/models/"
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836/ViT-L-14.pt",
    sha256="b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836",
    places=("~/.cache/clip",),
)
SHAPE_BUFFERS = ("input_resolution", "context_length", "vocab_size")
"""Numbers that OpenAI's archives keep among the tensors."""


Scorer = Callable[[NDArray[np.uint8], Sequence[str]], list[float]]
"""Scores of images uint8 [N, H, W, 3], one of each with its prompt."""


def score_prompted(images: ImageSet, score: Scorer, batch: int, what: str) -> list[float]:
    """Return the score of every image with its prompt, `batch` of them at a time; `what` names the progress bar."""
    values: list[float] = []
    for indices in images.batches(batch, what):
        values += score(images.stack(indices), [images.samples[index].prompt for index in indices])
    return values


class Clip:
    """A CLIP network in float32 with its tokenizer and its own image transform.

    Args:
        model: name of the architecture in open_clip.
        file: its weights; the caller has checked the hash.
        device: where it runs.
        quick_gelu: activations are x sigmoid(1.702 x), as in OpenAI's networks. open_clip takes the other kind
            unless told, and no error follows, only other numbers; so the built network is looked at.
        scripted: see `read_state`.

    Raises:
        ValueError: the weights are not of this architecture, or the activations not of this kind.
    """

    def __init__(
        self, model: str, file: Path, device: str, *, quick_gelu: bool, scripted: bool = False
    ) -> None:
        import open_clip  # seconds to import

        network = open_clip.create_model(model, load_weights=False, force_quick_gelu=quick_gelu)
        wanted = "QuickGELU" if quick_gelu else "GELU"
        kinds = {type(part).__name__ for name, part in network.named_modules() if name.endswith("mlp.gelu")}
        if kinds != {wanted}:
            raise ValueError(f"open_clip built {model} with {', '.join(sorted(kinds))}, not {wanted}")
        try:
            network.load_state_dict(read_state(file, scripted=scripted))
        except RuntimeError as error:
            raise ValueError(
                f"{file} does not hold a {model}: {str(error).splitlines()[-1].strip()}"
            ) from None
        self._network = network.float().eval().to(device)
        self._tokenize = open_clip.get_tokenizer(model)
        self._device = device
        size = network.visual.image_size
        self.side = int(size[0] if isinstance(size, Sequence) else size)
        self.transform = open_clip.image_transform(self.side, is_train=False)

    @torch.inference_mode()
    def images(self, pixels: Tensor) -> Tensor:
        """Transformed images float32 [N, 3, side, side] to unit vectors [N, D]."""
        with full_float32():
            return F.normalize(self._network.encode_image(pixels.to(self._device)), dim=-1)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors [N, D] of texts, cut to the tokens that the network reads."""
        with full_float32():
            return F.normalize(
                self._network.encode_text(self._tokenize(list(texts)).to(self._device)), dim=-1
            )


def read_state(file: Path, *, scripted: bool = False) -> Mapping[str, Tensor]:
    """Return tensors by name out of safetensors, a plain torch file or OpenAI's TorchScript archives.

    Args:
        file: what to read.
        scripted: read TorchScript archives too. Code in them runs while they are read, so this is for files whose hash
            was compared with a known one.

    Raises:
        ValueError: it is none of these.
    """
    if _is_torchscript(file) and not scripted:
        raise ValueError(
            f"{file} is a TorchScript archive, whose code runs when it is read: its SHA-256 must be known beforehand"
        )
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if _is_torchscript(file):
            state = torch.jit.load(file, map_location="cpu").state_dict()
            return {name: value for name, value in state.items() if name not in SHAPE_BUFFERS}
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own kinds
        raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    state = held.get("state_dict", held) if isinstance(held, Mapping) else held
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} holds no tensors by name")
    return {name.removeprefix("module."): value for name, value in state.items()}


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with contextlib.closing(zipfile.ZipFile(file)) as archive:
        return any("/code/" in name for name in archive.namelist())


def check_texts(images: ImageSet) -> None:
    """Make sure that prompts are sentences.

    Raises:
        SkipEvaluation: they are class numbers, some are not known, or the model received other texts.
    """
    if images.rewritten:
        raise SkipEvaluation(
            "the prompts were rewritten for the model: a score of image and text would not tell which text it means"
        )
    if not all(sample.prompt for sample in images.samples.values()):
        raise SkipEvaluation("the images have no prompts, and texts are needed (--prompts)")
    if are_classes(images.clusters):
        raise SkipEvaluation("the prompts are class numbers, and texts are needed")


@dataclass(frozen=True)
class ClipScore:
    """`clip_score[<model>]`: 100 x cosine between image and prompt, not below 0 (Hessel et al., arXiv:2104.08718).

    The network's own transform: the shorter side to its resolution (PIL, bicubic), centre crop. Float32.

    Attributes:
        model: architecture in open_clip; names the metric.
        path: the network's file, if neither in $KVBENCH_WEIGHTS nor in CLIP's cache.
        batch: images at a time.
        quick_gelu: the kind of activation it was trained with; OpenAI's networks: yes.
        network: the file; its hash is checked before it is read.
    """

    model: str = "ViT-L-14"
    path: str | None = None
    batch: int = 32
    quick_gelu: bool = True
    network: Weight = OPENAI_VIT_L_14
    name: ClassVar[str] = "clip_score"
    needs_reference: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def __post_init__(self) -> None:
        check_minimum("batch", self.batch, 1)

    @property
    def protocol(self) -> str:
        """The model's name."""
        return self.model

    @property
    def metrics(self) -> dict[str, MetricSpec]:
        """The mean score."""
        return {f"clip_score[{self.model}]": MetricSpec("higher", digits=2)}

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The network."""
        return (replace(self.network, path=self.path),)

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Score of each image; the reference is not looked at."""
        check_texts(images)
        [weight] = self.weights
        file, sha256 = weight.require()
        clip = Clip(self.model, file, device, quick_gelu=self.quick_gelu, scripted=weight.pinned)
        values: list[float] = []
        for batch in images.batches(self.batch, self.name):
            pixels = torch.stack([clip.transform(Image.fromarray(image)) for image in images.stack(batch)])
            texts = clip.texts([images.samples[index].prompt for index in batch])
            values += (100 * (clip.images(pixels) * texts).sum(-1)).clamp(min=0).tolist()
        [name] = self.metrics
        scores = {name: mean_score(values, images.clusters)}
        return make_result(self, scores, {"index": images.indices, name: values}, {self.network.file: sha256})
