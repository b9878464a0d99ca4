"""Sources of weights: a local path or a part of a Hub repository, found, fetched, converted and staged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.claims import claim
from kvbench.core.files import resolve_path
from kvbench.models.files.checkpoints import Clean, WeightsError, is_safe, read, split_layers
from kvbench.models.files.hub import HubError, Listing, Part, fetch, find_fetched, list_part
from kvbench.models.files.stored import find_digest, find_home, stage, write_tensors


@dataclass(frozen=True)
class Source:
    """Location of a checkpoint.

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
        """Files of the Hub that it reads; only for a source without a path."""
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


def check_sources(weights: str, sources: Mapping[str, Source], *needed: str) -> None:
    """Check that a model whose `weights` are `files` names a source for each part.

    Raises:
        ValueError: naming the parts of the model that `model.sources` lacks.
    """
    if weights == "files" and (lacking := set(needed) - set(sources)):
        raise ValueError(
            f"model.weights=files: model.sources names no {' and no '.join(sorted(lacking))}; use model.weights=random"
        )


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
    if clean is not None and not is_safe(path):
        path = convert(path, clean, digest)
    return stage(path, digest), digest


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
