"""Base class of whatever needs packages and weight files: evaluators, feature spaces and models."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvbench.eval.files.weights import Snapshot, Weight


def setting(default: int, minimum: int) -> Any:
    """Return a dataclass field that refuses values below a minimum."""
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True)
class Component:
    """Base class of frozen dataclasses whose fields are settings, files (`Weight`, `Snapshot`) and further components.

    Raises:
        ValueError: a field that was declared with `setting` is below its minimum.
    """

    def __post_init__(self) -> None:
        for one in fields(self):
            value, minimum = getattr(self, one.name), one.metadata.get("minimum")
            if minimum is not None and value < minimum:
                raise ValueError(f"{one.name}={value}: must be at least {minimum}")

    @property
    def parts(self) -> "list[Component]":
        """The components among its fields."""
        return [value for value in vars(self).values() if isinstance(value, Component)]

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that it imports; by default those of its parts."""
        return tuple(package for part in self.parts for package in part.packages)

    @property
    def weights(self) -> tuple[Weight | Snapshot, ...]:
        """Files and folders that it needs; by default its own ones at `path`, and those of its parts."""
        own = [value for value in vars(self).values() if isinstance(value, Weight | Snapshot)]
        path = getattr(self, "path", None)
        return (
            *(replace(one, path=path) for one in own),
            *(file for part in self.parts for file in part.weights),
        )
