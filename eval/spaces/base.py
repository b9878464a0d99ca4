"""Feature spaces, each a resizer and a network, in which distributions of images are compared.

A space is the protocol of a metric. Its features are stored, so that a network runs once for each set of images.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.core.config import Range
from kvbench.core.files import hash_content
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.store import Arrays, StoredFeatures, load_features
from kvbench.eval.files.weights import Weight, loading
from kvbench.eval.networks import Pixels, full_float32
from kvbench.eval.protocol.component import Component

Network = Callable[[Pixels], Mapping[str, Tensor]]
"""Function from images uint8 [N, H, W, 3] to `features` float32 [N, D] and any other outputs of the network."""


@dataclass(frozen=True)
class Space(Component, ABC):
    """Base class of feature spaces; a subclass implements `load`.

    Attributes:
        path: path of the network's file, if it is neither in $KVBENCH_WEIGHTS nor in a library's cache.
        batch: number of images in a batch; it changes rounding only.
        network: the network's file.
        name: name of the space.
        distance: name of the Frechet distance in the space.
        reference_names: names of mean and covariance of the features in ADM's reference batches; None without them.
    """

    path: str | None = None
    batch: Annotated[int, Range(1)] = 32
    network: Weight = field(kw_only=True)
    name: ClassVar[str]
    distance: ClassVar[str] = "fid"
    reference_names: ClassVar[tuple[str, str] | None] = None

    @property
    def paired(self) -> str:
        """Suffix of metrics against a reference run, such as `paired_clean`."""
        return f"paired_{self.name}"

    @property
    def real(self) -> str:
        """Suffix of metrics against real images, such as `clean`."""
        return self.name

    @property
    def weight(self) -> Weight:
        """File of the network's weights."""
        return replace(self.network, path=self.path)

    def features(self, source: ImageSet, device: str) -> StoredFeatures:
        """Return `features` float32 [n, D] and other outputs of the network, from the store if possible.

        The store's key contains the hash of the network's file, or of all files if there are several.
        """
        [file, *_], hashes = self.require()
        sha256 = hash_content(*hashes.values()) if len(hashes) > 1 else hashes[self.network.file]
        return load_features(
            source.digest, self.name, sha256, source.indices, lambda: self.compute(source, file, device)
        )

    def pair(
        self, images: ImageSet, reference: ImageSet, device: str
    ) -> tuple[StoredFeatures, StoredFeatures]:
        """Return the features of a run and of its reference, which have the same samples."""
        return self.features(images, device), self.features(reference, device)

    @torch.inference_mode()
    def compute(self, source: ImageSet, file: Path, device: str) -> Arrays:
        """Return the features of a source, computed in float32 without TF32."""
        with loading(self.weights):
            network = self.load(file, device)
        with full_float32():
            stacks = source.stacks(self.batch, self.name)
            parts = [{name: array.cpu() for name, array in network(stack).items()} for stack in stacks]
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}

    @abstractmethod
    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network as a function of images."""
