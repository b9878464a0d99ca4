"""Feature spaces of the two Inception networks: clean-fid's and torch-fidelity's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvbench.core.config import Range
from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.spaces.base import Network, Space

SPATIAL_CHANNELS = 7  # number of first channels in sFID's features
ADM = Weight.at(
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    size=95_628_359,
    caches=TORCH_CACHES,
)
CLEAN = Weight.at(
    "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
)


@dataclass(frozen=True)
class Clean(Space):
    """Protocol `clean` (Parmar et al., arXiv:2104.11222) with clean-fid's resizer and network.

    Each channel is resized as a float image (PIL, bicubic) to 299 x 299; 2048 features of Inception.
    """

    network: Weight = CLEAN
    name: ClassVar[str] = "clean"
    real: ClassVar[str] = "real_clean"
    packages: ClassVar[tuple[str, ...]] = ("cleanfid",)

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 2048 features per image; raise ValueError for a wrong file."""
        from cleanfid.inception_torchscript import InceptionV3W
        from cleanfid.resize import build_resizer

        resize = build_resizer("clean")
        if not self.network.pinned:
            raise ValueError(
                f"{file} is a TorchScript archive, whose code runs when it is read: give its SHA-256"
            )
        if file.name != self.network.file:
            raise ValueError(f"{file}: clean-fid needs the file name {self.network.file}")
        network = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(device)

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            pixels = torch.from_numpy(np.stack([resize(image) for image in stack])).to(device)
            return {"features": network(pixels.permute(0, 3, 1, 2))}

        return find_features


@dataclass(frozen=True)
class Adm(Space):
    """Protocol of ADM's evaluator (Dhariwal and Nichol, arXiv:2105.05233) on torch-fidelity's Inception.

    TensorFlow 1's bilinear resize to 299 x 299 inside the network; 2048 features and 1008 logits without bias.
    """

    batch: Annotated[int, Range(1)] = 64
    network: Weight = ADM
    name: ClassVar[str] = "adm"
    reference_names: ClassVar[tuple[str, str] | None] = ("mu", "sigma")
    packages: ClassVar[tuple[str, ...]] = ("torch_fidelity",)

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 2048 features and 1008 `logits` per image."""
        network = load_inception(file, device)

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            outputs = network(torch.from_numpy(stack).to(device).permute(0, 3, 1, 2))
            return dict(zip(("features", "logits"), outputs, strict=True))

        return find_features


@dataclass(frozen=True)
class AdmSpatial(Adm):
    """Space of sFID (Nash et al., arXiv:2103.03841) in ADM's evaluator: 2023 features of `Adm`'s network.

    The features are the first 7 channels of the 1 x 1 branch of the fourth 17 x 17 block, after its ReLU, ordered by
    height, width and channel.
    """

    name: ClassVar[str] = "adm_spatial"
    paired: ClassVar[str] = "paired_adm"
    real: ClassVar[str] = "adm"
    distance: ClassVar[str] = "sfid"
    reference_names: ClassVar[tuple[str, str] | None] = ("mu_s", "sigma_s")

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 2023 features per image."""
        network = load_inception(file, device)
        captured: dict[str, Tensor] = {}
        network.get_submodule("Mixed_6d.branch1x1").register_forward_hook(
            lambda *arguments: captured.update(maps=arguments[-1][:, :SPATIAL_CHANNELS])
        )

        def find_features(stack: NDArray[np.uint8]) -> Mapping[str, Tensor]:
            network(torch.from_numpy(stack).to(device).permute(0, 3, 1, 2))
            return {"features": captured.pop("maps").permute(0, 2, 3, 1).flatten(1)}

        return find_features


def load_inception(file: Path, device: str) -> nn.Module:
    """Load torch-fidelity's Inception, which returns 2048 features and 1008 logits without bias per image."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # torch-fidelity unpickles any object; this call first rejects files with more than tensors and plain values.
    torch.load(file, map_location="cpu", weights_only=True)
    network: nn.Module = FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(file)
    )
    return network.to(device)
