"""LPIPS: learned perceptual distance on AlexNet."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.networks import expecting, to_unit
from kvbench.eval.paired.base import Measure, PairedScore
from kvbench.eval.protocol.scores import MetricSpec

ALEXNET = Weight.at(
    "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
    "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
    size=244_408_911,
    caches=TORCH_CACHES,
)


@dataclass(frozen=True)
class Lpips(PairedScore):
    """`lpips`: learned perceptual distance (Zhang et al., arXiv:1801.03924), version 0.1 on AlexNet.

    Attributes:
        path: path of AlexNet's file, if it is neither in $KVBENCH_WEIGHTS nor in torch's cache.
        trunk: AlexNet's file; the package `lpips` contains the heads.
    """

    path: str | None = None
    trunk: Weight = ALEXNET
    name: ClassVar[str] = "lpips"
    protocol: ClassVar[str] = "alex"
    packages: ClassVar[tuple[str, ...]] = ("lpips", "torchvision")
    metric: ClassVar[str] = name
    spec: ClassVar[MetricSpec] = MetricSpec("lower")

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return the loaded measure and the hashes of its files."""
        file, sha256 = replace(self.trunk, path=self.path).require()
        network = alex(file).to(device)
        unit = partial(to_unit, device=device)
        return lambda a, b: [network(unit(a), unit(b), normalize=True).flatten()], {file.name: sha256}


def alex(file: Path) -> torch.nn.Module:
    """Load LPIPS with a trunk from a local AlexNet state dict; raise ValueError if the dict lacks a tensor."""
    from lpips import LPIPS  # imports torchvision

    network: torch.nn.Module = LPIPS(net="alex", pnet_rand=True, verbose=False)
    state = torch.load(file, map_location="cpu", weights_only=True)
    # The package groups AlexNet's layers in slices: slice1.0.weight is features.0.weight.
    trunk = network.get_submodule("net")
    names = {name: "features." + name.split(".", 1)[1] for name in trunk.state_dict()}
    with expecting("an AlexNet state dict", file):
        trunk.load_state_dict({name: state[source] for name, source in names.items()})
    return network
