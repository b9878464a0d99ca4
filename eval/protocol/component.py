"""Base class of evaluators, feature spaces and models, which need packages and weight files."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvbench.eval.files.weights import Snapshot, Weight


def setting(default: int, minimum: int) -> Any:
    """Return a dataclass field with a smallest valid value."""
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True)
class Component:
    """Base class of frozen dataclasses whose fields are settings, files (`Weight`, `Snapshot`) and components.

    Raises:
        ValueError: a field declared with `setting` is below its minimum.
    """

    def __post_init__(self) -> None:
        for one in fields(self):
            value, minimum = getattr(self, one.name), one.metadata.get("minimum")
            if minimum is not None and value < minimum:
                raise ValueError(f"{one.name}={value}: must be at least {minimum}")

    @property
    def parts(self) -> "list[Component]":
        """Fields that are components."""
        return [value for value in vars(self).values() if isinstance(value, Component)]

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that are imported; by default the packages of the parts."""
        return tuple(package for part in self.parts for package in part.packages)

    @property
    def weights(self) -> tuple[Weight | Snapshot, ...]:
        """Required files and folders; by default its own at `path`, then the files of the parts."""
        own = [value for value in vars(self).values() if isinstance(value, Weight | Snapshot)]
        path = getattr(self, "path", None)
        return (
            *(replace(one, path=path) for one in own),
            *(file for part in self.parts for file in part.weights),
        )
