"""Datasets of real images: a folder, its statistics, or the reference batch of ADM's evaluator.

`python -m kvbench.eval.distribution.dataset FOLDER OUT.safetensors --space clean` writes the statistics of a folder.
"""

import argparse
import contextlib
import pickle
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import ImageOps
from safetensors import SafetensorError
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.config import check_file as check_output
from kvbench.core.devices import check_device
from kvbench.core.files import check_file, hash_content
from kvbench.eval.distribution.frechet import moments
from kvbench.eval.files.digests import hash_files_at
from kvbench.eval.files.image_folder import SUFFIXES, mark_turned, warn_unread
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.pictures import MAX_PIXELS, find_flaw, find_orientation, open_picture
from kvbench.eval.files.samples import Sample, SampleSetError, map_in_threads
from kvbench.eval.files.store import StoredFeatures
from kvbench.eval.files.weights import Weight, WeightError, file_sha256
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.dinov2 import Dinov2
from kvbench.eval.spaces.evaluator import provenance
from kvbench.eval.spaces.inception import Adm, AdmSpatial, Clean

REFERENCE_BATCH = Weight.at(
    "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/256/"
    "VIRTUAL_imagenet256_labeled.npz"
)
DAMAGE_ERRORS = (
    OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError,
)  # fmt: skip
"""Exceptions of numpy and zipfile for files that are damaged or contain objects."""


def find_statistics(space: str) -> Weight:
    """Return the default statistics file of a space."""
    file = f"statistics-{space}.safetensors"
    how = (
        f"Make it with: python -m kvbench.eval.distribution.dataset FOLDER $KVBENCH_WEIGHTS/{file} --space {space}; "
        "or set statistics= to a folder of images or to such a file"
    )
    return Weight(file, how=how)


SPACES: dict[str, Callable[..., Space]] = {space.name: space for space in (Clean, Adm, AdmSpatial, Dinov2)}
"""Spaces whose statistics can be stored, by name."""
STATISTICS = find_statistics(Clean.name)
"""Listed by `kvbench.eval.files.fetch`, like every `Weight` of a module."""


class Pictures(ImageSet):
    """Images directly in a folder without hidden files, sorted by name and converted to RGB.

    Raises:
        SampleSetError: there are no images, or an image is damaged, transparent or has more than 8 bits per channel.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hashes = hash_files_at(folder)
        self.paths = [folder / name for name in hashes if Path(name).suffix.lower() in SUFFIXES]
        if not self.paths:
            raise SampleSetError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
        self.indices = list(range(len(self.paths)))
        self.samples = dict(enumerate(map_in_threads(self._check, self.indices)))
        digest = hash_content("".join(f"{path.name} {hashes[path.name]}\n" for path in self.paths))
        self.digest = mark_turned(folder, self.paths, digest)
        warn_unread(folder, folder.iterdir())

    def image(self, index: int) -> NDArray[np.uint8]:
        """Return the pixels uint8 [H, W, 3] of an image."""
        with open_picture(self.paths[index]) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))

    def _check(self, index: int) -> Sample:
        path = self.paths[index]
        with open_picture(path) as image:
            flaw = find_flaw(image)
            size = image.size[::-1] if find_orientation(image) > 4 else image.size
        if flaw is not None:
            raise SampleSetError(f"{path} {flaw}: images of 8 bits per channel are needed")
        return Sample(index, 0, "", "", size=size)


class Packed(ImageSet):
    """Images `arr_0`, uint8 [n, H, W, 3], streamed from an .npz file; a file without them raises SampleSetError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _pixels_of(path) as (_, shape):
            self.indices = list(range(shape[0]))
        self.digest = file_sha256(path)

    def stacks(self, size: int, title: str) -> Iterator[NDArray[np.uint8]]:
        """Yield pixels uint8 [N, H, W, 3], at most `size` images at a time."""
        with _pixels_of(self.path) as (stream, (count, *shape)):
            for start in range(0, count, size):
                rows = min(size, count - start)
                data = bytearray(stream.read(rows * int(np.prod(shape))))
                yield np.frombuffer(data, np.uint8).reshape(rows, *shape)


def read_moments(path: Path, space: Space, device: str) -> tuple[Tensor, Tensor, dict[str, object]]:
    """Return mean [D] and covariance [D, D], float64, of a dataset's features, and their origin.

    The origin has the digest and number of the images, and for a folder whether their features were reused.

    Args:
        path: folder of images, statistics (.safetensors) or reference batch (.npz).
        space: space of the features.
        device: torch device.

    Raises:
        SampleSetError: the file is damaged, contains pickled objects, or is from another space or network.
    """
    if path.is_dir():
        features, origin = read_features(path, space, device)
        return *moments(features.arrays["features"]), origin
    read = _from_npz if path.suffix == ".npz" else _from_safetensors
    mean, covariance, origin = read(path, space)
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"mean {tuple(mean.shape)} and covariance {tuple(covariance.shape)}"
        raise SampleSetError(f"{path}: {shapes} do not fit together; get it again")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise SampleSetError(f"{path}: its mean or covariance is not finite; get it again")
    symmetric = torch.allclose(covariance, covariance.T, rtol=1e-4, atol=1e-6)
    if not symmetric or (covariance.diagonal() < 0).any():
        raise SampleSetError(
            f"{path}: its covariance is not a covariance: not symmetric, or negative variances; get it again"
        )
    return mean.double(), (covariance.double() + covariance.double().T) / 2, origin


def read_features(path: Path, space: Space, device: str) -> tuple[StoredFeatures, dict[str, object]]:
    """Return the features of a dataset's images, and their origin as in `read_moments`.

    Raises:
        SampleSetError: the file is damaged or has no images.
    """
    if not path.is_dir() and path.suffix != ".npz":
        raise SampleSetError(f"{path}: images are needed here, not mean and covariance: a folder or an .npz")
    source: ImageSet = Pictures(path) if path.is_dir() else Packed(path)
    features = space.features(source, device)
    origin = {"digest": source.digest, "n": len(source.indices), **provenance({"features": features})}
    return features, origin


def save_statistics(source: ImageSet, space: Space, device: str, out: Path) -> None:
    """Write mean and covariance (float64) of a source's features, with space, network and number of images."""
    mean, covariance = moments(space.features(source, device).arrays["features"])
    metadata: dict[str, object] = {"space": space.name, "weights": space.weight.require()[1]}
    metadata |= {"images": source.digest, "count": len(source.indices)}
    checkpoint.save(out, {"mean": mean, "covariance": covariance}, metadata)


def main(arguments: list[str] | None = None) -> int:
    """Write the statistics of a folder of images."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.eval.distribution.dataset", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="images, not searched deeper")
    parser.add_argument("out", type=Path, help="file to write, .safetensors")
    parser.add_argument("--space", choices=sorted(SPACES), default="clean")
    parser.add_argument("--path", help="the network's file, if not in $KVBENCH_WEIGHTS")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    space = SPACES[options.space](path=options.path)
    try:
        if not options.folder.is_dir():
            raise SampleSetError(f"{options.folder} is not a folder; name a folder of images")
        check_output("OUT", str(options.out), ".safetensors")
        check_device(options.device)
        save_statistics(Pictures(options.folder), space, options.device, options.out)
    except (ConfigError, SampleSetError, WeightError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _from_npz(path: Path, space: Space) -> tuple[Tensor, Tensor, dict[str, object]]:
    if space.reference_names is None:
        how = find_statistics(space.name).how
        raise SampleSetError(
            f"{path}: a reference batch (.npz) belongs to the space adm, not {space.name}. {how}"
        )
    try:
        with np.load(check_file(path), allow_pickle=False) as archive:
            mean, covariance = (np.asarray(archive[name], np.float64) for name in space.reference_names)
    except DAMAGE_ERRORS as error:
        names = " and ".join(space.reference_names)
        raise SampleSetError(f"{path}: {names} cannot be read: {error}") from error
    return torch.from_numpy(mean), torch.from_numpy(covariance), {}


def _from_safetensors(path: Path, space: Space) -> tuple[Tensor, Tensor, dict[str, object]]:
    how = find_statistics(space.name).how
    try:
        tensors, metadata = checkpoint.load(path)
        mean, covariance = tensors["mean"], tensors["covariance"]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise SampleSetError(f"{path}: not statistics of a dataset: {error}. {how}") from error
    if metadata.get("space") != space.name:
        raise SampleSetError(f"{path}: statistics of the space {metadata.get('space')}, not {space.name}")
    if metadata.get("weights") != space.weight.require()[1]:
        raise SampleSetError(f"{path}: made with a different network from {space.weight.file}. {how}")
    return mean, covariance, {"digest": metadata.get("images"), "n": metadata.get("count")}


@contextlib.contextmanager
def _pixels_of(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Open `arr_0` of an .npz file; yield the stream after the header, and the shape."""
    try:
        with zipfile.ZipFile(check_file(path)) as archive, archive.open("arr_0.npy") as stream:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            shape, fortran, dtype = read[npy.read_magic(stream)](stream)
            if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran:
                raise SampleSetError(f"{path}: arr_0 is {dtype} {shape}, not uint8 [n, H, W, 3]")
            if shape[1] * shape[2] > MAX_PIXELS:
                raise SampleSetError(f"{path}: arr_0 is {shape}: more than {MAX_PIXELS} pixels an image")
            yield stream, shape
    except SampleSetError:
        raise
    except DAMAGE_ERRORS as error:
        raise SampleSetError(f"{path}: no images can be read from arr_0: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
