"""FID against the reference run: on Inception with clean-fid's protocol, and on the scenes network."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.eval.base import Better, Result, Score, SkipEvaluation, ok, with_interval
from kvbench.eval.features import OnScenes
from kvbench.eval.frechet import Features, frechet_distance
from kvbench.eval.images import ImageSet
from kvbench.eval.intervals import jackknife
from kvbench.eval.weights import Weight

INCEPTION = Weight(
    "inception-2015-12-05.pt",
    url="https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    sha256="f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
    places=("/tmp",),  # where clean-fid keeps it
)


@dataclass(frozen=True)
class Fid:
    """`fid_paired_clean`: distance between the Inception features of the run and of its reference.

    The protocol `clean` (Parmar et al., arXiv:2104.11222) with clean-fid's own resizer and network: each
    channel resized as a float image (PIL, bicubic) to 299 x 299, 2048 features. The number is small because
    both sides share their seeds; it is not a FID against real images.

    Attributes:
        path: where the network's file lies, if neither in $KVBENCH_WEIGHTS nor in clean-fid's cache.
        batch: images at a time.
        network: the TorchScript file; its hash is checked before it is read.
    """

    path: str | None = None
    batch: int = 32
    network: Weight = INCEPTION
    name: ClassVar[str] = "fid"
    protocol: ClassVar[str] = "clean"
    needs_reference: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("cleanfid",)
    gives: ClassVar[Mapping[str, Better]] = {"fid_paired_clean": "lower"}

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The Inception network."""
        return (replace(self.network, path=self.path),)

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Features of both sides, then their distance."""
        assert reference is not None
        file, sha256 = self.weights[0].require()
        ours, theirs = (self.features(side, file, device) for side in (images, reference))
        return ok(
            self,
            {"fid_paired_clean": distance_score(ours, theirs, images.clusters)},
            weights={file.name: sha256},
            caveat=_caveat(ours),
        )

    @torch.inference_mode()
    def features(self, images: ImageSet, file: Path, device: str) -> NDArray[np.float32]:
        """Inception features float32 [n, 2048]."""
        from cleanfid.inception_torchscript import InceptionV3W
        from cleanfid.resize import build_resizer

        resize = build_resizer("clean")
        if file.name != self.network.file:
            raise ValueError(f"{file}: clean-fid wants the file to be called {self.network.file}")
        network = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(device)
        parts = []
        with _full_float32():
            for batch in images.batches(self.batch, self.name):
                pixels = np.stack([resize(images.image(index)) for index in batch])
                parts.append(network(torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)).cpu().numpy())
        return np.concatenate(parts)


@dataclass(frozen=True)
class FidScenes(OnScenes):
    """`fid_scenes`: the same distance on the features of the scenes network."""

    name: ClassVar[str] = "fid_scenes"
    protocol: ClassVar[str] = "paired"
    gives: ClassVar[Mapping[str, Better]] = {"fid_scenes": "lower"}

    @torch.inference_mode()
    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Features of both sides, then their distance."""
        assert reference is not None
        network, weights = self.network(device)
        parts = [network.features(both).cpu().chunk(2) for both in self.pairs(images, reference, device)]
        ours, theirs = (torch.cat(side).numpy() for side in zip(*parts, strict=True))
        scores = {"fid_scenes": distance_score(ours, theirs, images.clusters)}
        return ok(self, scores, weights=weights, caveat=_caveat(ours))


def distance_score(first: Features, second: Features, clusters: list[str]) -> Score:
    """Frechet distance of paired features [n, D]; its jackknife leaves out the same samples on both sides.

    Raises:
        SkipEvaluation: there are fewer than two samples.
    """
    if len(first) < 2:
        raise SkipEvaluation("too few samples: a distance between distributions needs at least two")
    value = frechet_distance(first, second)
    interval = jackknife(lambda kept: frechet_distance(first[kept], second[kept]), value, clusters)
    return with_interval(Score(value, "lower", "", len(first)), interval)


def _caveat(features: Features) -> str | None:
    count, dimensions = features.shape
    if count > dimensions:
        return None
    return (
        f"{count} samples for {dimensions} features: the covariance is singular and the value biased upward"
    )


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Switches TF32 off: it moves FID in the third digit."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
