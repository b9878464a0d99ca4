"""Finding, reading and checking checkpoints; official files are converted to safetensors once."""

import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvbench.core.config import UserError
from kvbench.core.files import hash_values, parse_json, resolve_path
from kvbench.core.locks import claim
from kvbench.models.hub import HubError, Listing, Part, fetch, find_fetched, list_part
from kvbench.models.stored import find_digest, find_home, stage, write_tensors

M = TypeVar("M", bound=nn.Module)
State = dict[str, Tensor]
Clean = Callable[[Mapping[str, object]], State]
"""From a file's contents to a module's state: names as the module has them, nothing else."""
Place = Callable[[str, Tensor], Tensor]
"""From a parameter's name and a tensor to that tensor on its device, in its dtype."""
LAYER = re.compile(r"(?:.*\.)?(?:layers|blocks|block_chunks)\.\d+(?:\.module\.\d+)?(?=\.)")
"""Start of the names of a transformer layer's parameters in any published file."""
WHOLE = "model.safetensors"
"""The one file of a model's folder, or the start of the name of its index."""


class WeightsError(UserError, RuntimeError):
    """A checkpoint that is missing, unreadable or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies.

    Attributes:
        key: config key, for messages.
        path: local file or folder (`pkg://package/inside/it` for one that ships with a package); wins over the Hub.
        repo: Hub id, None where only a local copy will do.
        file: file or folder inside the repository, None for the files at its top.
        revision: branch, tag or commit of the repository; None for `main`.
    """

    key: str
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None

    @property
    def part(self) -> Part:
        """What it needs of the Hub; only of a source without a path."""
        assert self.repo is not None
        return Part(self.repo, self.revision or "main", self.file)

    def find(self) -> Path | None:
        """Return the local file or folder without asking the network; None if it is to be downloaded.

        Raises:
            WeightsError: a path where nothing is, or neither a path nor a repository.
        """
        if self.path is not None:
            path = resolve_path(self.path)
            if not path.exists():
                raise WeightsError(f"{self.key}.path={self.path}: does not exist")
            return path
        if self.repo is None:
            raise WeightsError(
                f"{self.key}: weights missing. Give a local copy of {self.file} with {self.key}.path=..."
            )
        listing = find_fetched(self.part)
        return None if listing is None else listing.path

    def locate(self) -> Path:
        """Return the local file or folder, downloaded from the Hub if need be.

        Raises:
            WeightsError: see `locate_all`.
        """
        return locate_all([self])[0]

    def describe(self) -> dict[str, str | None]:
        """Return where it was read from, the commit behind its revision, and the SHA-256 of what was read."""
        path = self.locate()
        origin = (
            {"path": self.path}
            if self.path is not None
            else {
                "repo": self.repo,
                "file": self.file,
                "revision": self.part.revision,
                "commit": listing.commit if (listing := find_fetched(self.part)) else None,
            }
        )
        return {**origin, "sha256": find_digest(path)}


def survey(sources: Iterable[Source]) -> list[Path | Listing]:
    """Return the local file or folder of each source, or what the Hub has of it.

    Raises:
        WeightsError: naming all that is missing.
    """
    found: list[Path | Listing] = []
    problems = []
    for source in sources:
        try:
            found.append(source.find() or list_part(source.part))
        except WeightsError as error:
            problems.append(str(error))
        except HubError as error:
            problems.append(
                f"{source.key}: weights missing: {error}, or give a local copy with {source.key}.path=..."
            )
    if problems:
        raise WeightsError("; ".join(problems))
    return found


def locate_all(sources: Sequence[Source]) -> list[Path]:
    """Return the local files or folders of sources; what is missing is downloaded after it was told how much that is.

    Raises:
        WeightsError: naming all that is missing, or why a download failed.
    """
    found = survey(sources)
    try:
        if listings := [one for one in found if isinstance(one, Listing)]:
            fetch(listings)
    except HubError as error:
        raise WeightsError(str(error)) from None
    return [one.path if isinstance(one, Listing) else one for one in found]


def read(path: Path) -> State:
    """Return the raw contents of a safetensors file, a torch file, or a folder as the Hugging Face Hub has it.

    Torch files are read with `weights_only=True`: nothing in them is executed.

    Raises:
        WeightsError: truncated, foreign or unsafe.
    """
    try:
        if path.is_dir():
            return _read_shards(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        mapped = zipfile.is_zipfile(path)  # files of old versions of torch cannot be
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(raw, Mapping):
            raise ValueError(f"it holds a {type(raw).__name__}, not tensors by name")
        return dict(raw)
    except UnpicklingError:  # torch's own words advise to unpickle it all the same
        raise WeightsError(
            f"{path}: not a readable checkpoint (it is damaged, or holds more than tensors)"
        ) from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path}: not a readable checkpoint ({reason})") from None


def _read_shards(folder: Path) -> State:
    if (folder / WHOLE).is_file():
        return load_file(folder / WHOLE)
    for name in (f"{WHOLE}.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            shards = sorted(set(parse_json((folder / name).read_text())["weight_map"].values()))
            merged: State = {}
            for shard in shards:
                if Path(shard).name != shard:
                    raise ValueError(f"the index names a file outside the folder: {shard}")
                merged |= read(folder / shard)
            return merged
    raise ValueError(f"no {WHOLE}, {WHOLE}.index.json or pytorch_model.bin.index.json in the folder")


class _NoInit(TorchFunctionMode):
    """Turns the functions of `torch.nn.init` into no-ops."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def build_on_meta(make: Callable[[], M]) -> M:
    """Build a module in evaluation mode whose parameters have shapes and no memory, for `load_into` or `fill_random`.

    Nothing is initialised: random numbers on the meta device would make torch import its compiler, two seconds long.
    """
    with torch.device("meta"), _NoInit():
        return make().eval()


def check(state: Mapping[str, Tensor], module: nn.Module, name: str, path: Path | None = None) -> None:
    """Compare names and shapes strictly with those of a module, which may live on the meta device.

    Args:
        state: tensors by name.
        module: what they are for.
        name: config key, for the message.
        path: file or folder, for the message.

    Raises:
        WeightsError: lists what is missing, unexpected, or of another shape.
    """
    expected = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in state.items()}
    problems = [f"missing {k}" for k in expected.keys() - found.keys()]
    problems += [f"unexpected {k} {found[k]}" for k in found.keys() - expected.keys()]
    problems += [
        f"{k} is {found[k]}, should be {expected[k]}"
        for k in expected.keys() & found.keys()
        if expected[k] != found[k]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        where = "" if path is None else f" (in {path})"
        raise WeightsError(f"{name}: the checkpoint does not fit in {len(problems)} places: {shown}{where}")


def split_layers(raw: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the contents of a checkpoint layer by layer, what belongs to no layer first; nesting stays.

    Conversions of one layer need no other, so that one at a time is in memory.
    """
    layers = dict.fromkeys(_list_layers(raw))
    for layer in [None, *(layer for layer in layers if layer is not None)]:
        yield _take_layer(raw, layer)


def _list_layers(raw: Mapping[str, object]) -> Iterator[str | None]:
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from _list_layers(value)
        else:
            yield _find_layer(name)


def _take_layer(raw: Mapping[str, object], layer: str | None) -> dict[str, object]:
    return {
        name: _take_layer(value, layer) if isinstance(value, Mapping) else value
        for name, value in raw.items()
        if isinstance(value, Mapping) or _find_layer(name) == layer
    }


def _find_layer(name: str) -> str | None:
    found = LAYER.match(str(name))
    return None if found is None else found[0]


def convert(path: Path, clean: Clean, digest: str) -> Path:
    """Return a safetensors file with the cleaned state of a checkpoint, in its dtypes, made once in the weights cache.

    Of processes that want the same one, one converts and the others wait.
    """
    target = find_home() / f"{path.stem}-{digest[:16]}.safetensors"
    if not target.is_file():
        with claim(target.with_name(f".{target.name}.claim")):
            if not target.is_file():
                groups = (clean(group) for group in split_layers(read(path)))
                write_tensors(target, groups, {"source_sha256": digest})
    return target


def prepare(source: Source, clean: Clean | None = None) -> tuple[Path, str]:
    """Return the file or folder of a source as it is to be read, and the SHA-256 of the source.

    It is downloaded, converted and copied to the node's disk if need be.

    Args:
        source: where the checkpoint lies.
        clean: from its contents to a module's state, None for what needs no conversion.

    Raises:
        WeightsError: see `Source.locate` and `read`.
        ConfigError: the node's disk has no room.
    """
    path = source.locate()
    digest = find_digest(path)
    if clean is not None and not _is_safe(path):
        path = convert(path, clean, digest)
    return stage(path, digest), digest


def to_float32(_: str, tensor: Tensor) -> Tensor:
    """Leave a tensor where it is, in float32."""
    return tensor.float()


def load_into(module: nn.Module, source: Source, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module built on the meta device layer by layer and return the SHA-256 of the source.

    Args:
        module: what to fill.
        source: where the checkpoint lies.
        clean: from its contents to the module's state.
        place: from the name of a parameter and its tensor, a mapped part of the file, to its device and dtype.

    Raises:
        WeightsError: see `Source.locate`, `read` and `check`.
    """
    given = source.locate()
    safe = _is_safe(given)
    try:
        path, digest = prepare(source, clean)
        raw = read(path)
    except WeightsError as error:
        raise WeightsError(f"{source.key}.path: {error}; give another copy") from None
    whole = module.state_dict()
    state: State = {}
    for group in split_layers(raw):
        cleaned = clean(group) if safe else group
        for name, tensor in cleaned.items():
            assert isinstance(tensor, Tensor)
            if name in whole and whole[name].shape == tensor.shape:
                put(module, name, place(name, tensor))
            state[name] = tensor.to("meta")
    check(state, module, source.key, given)
    return digest


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter, built on the meta device, its numbers."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    old = getattr(part, leaf)
    setattr(part, leaf, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)


def _is_safe(path: Path) -> bool:
    """Return whether a file, or a folder's files, can be read without being converted first."""
    return path.suffix == ".safetensors" or any(
        (path / name).is_file() for name in (WHOLE, f"{WHOLE}.index.json")
    )


def check_sources(weights: str, sources: Mapping[str, Source], *needed: str) -> None:
    """Check that a model whose `weights` are `files` names a source for each part.

    Raises:
        ValueError: naming the parts of the model that `model.sources` lacks.
    """
    if weights == "files" and (lacking := set(needed) - set(sources)):
        raise ValueError(
            f"model.weights=files: model.sources names no {' and no '.join(sorted(lacking))}; use model.weights=random"
        )


def fill(module: nn.Module, source: Source | None, clean: Clean, place: Place = to_float32) -> str:
    """Fill a module built on the meta device, with random numbers if it has no source, and return their SHA-256.

    For the arguments see `load_into`.

    Raises:
        WeightsError: see `load_into`.
    """
    return fill_random(module, place) if source is None else load_into(module, source, clean, place)


RANDOM_RECIPE = 1
"""Version of `fill_random`; it and the shapes stand for the numbers in a run's identity."""


@torch.no_grad()
def fill_random(module: nn.Module, place: Place = to_float32) -> str:
    """Fill a module built on the meta device with random numbers, drawn in float32, the same ones every time.

    Layers keep the variance of what they get, norms start as the identity, biases at 0, attention is sharpened
    eightfold and gates are open: activations stay finite, and what attention returns can be seen in the images.

    Args:
        module: what to fill.
        place: from the name of a parameter and its tensor to its device and dtype.

    Returns:
        SHA-256 of names, shapes and recipe, which determine the numbers.
    """
    listed = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    generator = torch.Generator().manual_seed(0)
    for path, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            drawn = _draw(owner, name, torch.empty(parameter.shape), generator)
            full = f"{path}.{name}".lstrip(".")
            put(module, full, place(full, drawn))
    return hash_values([RANDOM_RECIPE, listed])


def _draw(owner: nn.Module, name: str, numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Write the random numbers of a layer's parameter."""
    if name.endswith("bias"):
        return numbers.zero_()
    if name == "scale_mul_1H11":
        return numbers.fill_(math.log(8))
    if name != "weight":
        return numbers.normal_(0, 0.5, generator=generator)
    if numbers.ndim == 1:
        return numbers.fill_(1)
    spread = 1.0 if isinstance(owner, nn.Embedding) else numbers[0].numel() ** -0.5
    return numbers.normal_(0, spread, generator=generator)
