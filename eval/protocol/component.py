"""Base class of evaluators, feature spaces and models, which need packages and weight files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_origin

from kvbench.core.config import check_value, list_types
from kvbench.eval.files.weights import Snapshot, Weight


@dataclass(frozen=True)
class Component:
    """Base class of frozen dataclasses whose fields are settings, files (`Weight`, `Snapshot`) and components.

    Attributes:
        paths: name of the setting that holds a file's path, by the file's field; other files use `path`.

    Raises:
        ConfigError: a field is outside of its `Range`, or is none of its literals.
    """

    paths: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, hint in list_types(kind).items():
            if get_origin(hint) in (Annotated, Literal):
                check_value(getattr(self, name), hint, name)

    @property
    def parts(self) -> "list[Component]":
        """Fields that are components themselves."""
        return [value for value in vars(self).values() if isinstance(value, Component)]

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that are imported; by default the packages of the parts."""
        return tuple(package for part in self.parts for package in part.packages)

    @property
    def files(self) -> tuple[Weight | Snapshot, ...]:
        """Own files and folders, at the configured paths."""
        return tuple(
            replace(value, path=getattr(self, self.paths.get(name, "path"), None))
            for name, value in vars(self).items()
            if isinstance(value, Weight | Snapshot)
        )

    @property
    def weights(self) -> tuple[Weight | Snapshot, ...]:
        """Files and folders that the component requires, followed by those that its parts require."""
        return (*self.files, *(file for part in self.parts for file in part.weights))

    def require(self) -> tuple[list[Path], dict[str, str]]:
        """Return the paths of own files and folders, and the hashes of their files by name; see `Weight.require`."""
        paths: list[Path] = []
        hashes: dict[str, str] = {}
        for file in self.files:
            path, sha256 = file.require()
            paths.append(path)
            hashes |= {file.file: sha256} if isinstance(sha256, str) else sha256
        return paths, hashes
