"""Feature spaces, each a resizer and a network, in which distributions of images are compared.

A space is the protocol of a metric. Its features come from the store, so that a set of images goes through a
network once, however many metrics ask.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.store import Arrays, Held, held
from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.component import Component, setting
from kvbench.eval.protocol.scores import Score
from kvbench.eval.spaces.networks import full_float32

Features = NDArray[np.float32]
Network = Callable[[NDArray[np.uint8]], Mapping[str, Tensor]]
"""`features` float32 [N, D] of images uint8 [N, H, W, 3], and what else the network gives."""

SPATIAL_CHANNELS = 7
PUBLISHED = 50_000  # samples behind FID on ImageNet in papers

ADM = Weight.at(
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    size=95_628_359,
    places=TORCH_CACHES,
)
CLEAN = Weight.at(
    "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
)


@dataclass(frozen=True)
class Space(Component, ABC):
    """Base class of feature spaces; a subclass implements `load`.

    Attributes:
        path: where the network's file lies, if neither in $KVBENCH_WEIGHTS nor in a library's cache.
        batch: images at a time; it changes rounding only.
        network: the file; its hash is checked before it is read.

    Class attributes: `name`, the name of Frechet's distance in it (`distance`), and the names under which ADM's
    reference batches hold the mean and covariance of its features (`reference_names`).
    """

    path: str | None = None
    batch: int = setting(32, 1)
    network: Weight = CLEAN
    name: ClassVar[str]
    distance: ClassVar[str] = "fid"
    reference_names: ClassVar[tuple[str, str] | None] = None

    @property
    def paired(self) -> str:
        """Suffix of metrics in it against a reference run."""
        return f"paired_{self.name}"

    @property
    def real(self) -> str:
        """Suffix of metrics in it against real images."""
        return self.name

    @property
    def weight(self) -> Weight:
        """The network's file."""
        return replace(self.network, path=self.path)

    def features(self, source: ImageSet, device: str) -> Held:
        """`features` float32 [n, D] (and what else the network gives), out of the store if they are there."""
        file, sha256 = self.weight.require()
        return held(
            source.digest, self.name, sha256, source.indices, lambda: self.compute(source, file, device)
        )

    def pair(self, images: ImageSet, reference: ImageSet, device: str) -> tuple[Held, Held]:
        """Features of two sets of the same samples."""
        return self.features(images, device), self.features(reference, device)

    @torch.inference_mode()
    def compute(self, source: ImageSet, file: Path, device: str) -> Arrays:
        """Run the network, in float32 without TF32."""
        network = self.load(file, device)
        with full_float32():
            stacks = source.stacks(self.batch, self.name)
            parts = [{name: found.cpu() for name, found in network(stack).items()} for stack in stacks]
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}

    @abstractmethod
    def load(self, file: Path, device: str) -> Network:
        """Read the network."""


@dataclass(frozen=True)
class Clean(Space):
    """Protocol `clean` (Parmar et al., arXiv:2104.11222) with clean-fid's own resizer and network.

    Each channel is resized as a float image (PIL, bicubic) to 299 x 299; 2048 features of Inception.
    """

    name: ClassVar[str] = "clean"
    real: ClassVar[str] = "real_clean"
    packages: ClassVar[tuple[str, ...]] = ("cleanfid",)

    def load(self, file: Path, device: str) -> Network:
        """Read the network, which gives 2048 features."""
        from cleanfid.inception_torchscript import InceptionV3W
        from cleanfid.resize import build_resizer

        resize = build_resizer("clean")
        if not self.network.pinned:
            raise ValueError(
                f"{file} is a TorchScript archive, whose code runs when it is read: give its SHA-256"
            )
        if file.name != self.network.file:
            raise ValueError(f"{file}: clean-fid wants the file to be called {self.network.file}")
        network = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(device)

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            pixels = torch.from_numpy(np.stack([resize(image) for image in stack])).to(device)
            return {"features": network(pixels.permute(0, 3, 1, 2))}

        return find_features


@dataclass(frozen=True)
class Adm(Space):
    """The protocol of ADM's evaluator (Dhariwal and Nichol, arXiv:2105.05233) on torch-fidelity's Inception.

    TensorFlow 1's bilinear resize to 299 x 299 inside the network; 2048 features and 1008 logits without bias.
    """

    batch: int = setting(64, 1)
    network: Weight = ADM
    name: ClassVar[str] = "adm"
    reference_names: ClassVar[tuple[str, str] | None] = ("mu", "sigma")
    packages: ClassVar[tuple[str, ...]] = ("torch_fidelity",)

    def load(self, file: Path, device: str) -> Network:
        """Read the network, which gives 2048 features and 1008 `logits`."""
        network = load_inception(file, device)

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            found = network(torch.from_numpy(stack).to(device).permute(0, 3, 1, 2))
            return dict(zip(("features", "logits"), found, strict=True))

        return find_features


@dataclass(frozen=True)
class AdmSpatial(Adm):
    """The space of sFID (Nash et al., arXiv:2103.03841) as ADM's evaluator has it: 2023 features of `Adm`'s network.

    They are the first 7 channels of the 1 x 1 branch of the fourth 17 x 17 block, after its ReLU, in the order height,
    width, channel.
    """

    name: ClassVar[str] = "adm_spatial"
    paired: ClassVar[str] = "paired_adm"
    real: ClassVar[str] = "adm"
    distance: ClassVar[str] = "sfid"
    reference_names: ClassVar[tuple[str, str] | None] = ("mu_s", "sigma_s")

    def load(self, file: Path, device: str) -> Network:
        """Read the network, which gives 2023 features."""
        network = load_inception(file, device)
        seen: dict[str, Tensor] = {}
        network.get_submodule("Mixed_6d.branch1x1").register_forward_hook(
            lambda *called: seen.update(maps=called[-1][:, :SPATIAL_CHANNELS])
        )

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            network(torch.from_numpy(stack).to(device).permute(0, 3, 1, 2))
            return {"features": seen.pop("maps").permute(0, 2, 3, 1).flatten(1)}

        return find_features


def load_inception(file: Path, device: str) -> nn.Module:
    """Read torch-fidelity's Inception, which returns 2048 features and 1008 logits without bias."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # The package unpickles without restraint; reading the file with restraint first refuses what is no state dict.
    torch.load(file, map_location="cpu", weights_only=True)
    network: nn.Module = FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(file)
    )
    return network.to(device)


@dataclass(frozen=True)
class SpaceEvaluator(Evaluator):
    """Base class of evaluators that work on features.

    Attributes:
        space: features and protocol.
    """

    space: Space = field(default_factory=Clean)

    @property
    def protocol(self) -> str:
        """The space."""
        return self.space.name


def require_samples(count: int, minimum: int, what: str) -> None:
    """Check the number of samples before any network runs.

    Raises:
        SkipEvaluation: there are fewer than `minimum` samples.
    """
    if count < minimum:
        raise SkipEvaluation(f"too few samples: {what} needs at least {minimum}, there are {count}")


def few_samples(count: int) -> str | None:
    """Return a caveat for values on fewer samples than papers use on ImageNet."""
    if count >= PUBLISHED:
        return None
    return f"{count} samples: not to be compared with published numbers on {PUBLISHED}"


def finish(
    evaluator: Evaluator, scores: dict[str, Score], sides: Mapping[str, Held], caveat: str | None = None
) -> Result:
    """Return a result that records for each side whether its features were computed or reused."""
    hashes = {file.name: sha256 for file, sha256 in (weight.require() for weight in evaluator.weights)}
    result = make_result(evaluator, scores, weights=hashes, caveat=caveat)
    result.provenance["features"] = provenance(sides)
    return result


def provenance(sides: Mapping[str, Held]) -> dict[str, str]:
    """`reused` or `computed` by side."""
    return {side: "reused" if one.reused else "computed" for side, one in sides.items()}
