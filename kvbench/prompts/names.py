"""Names of pictures, for models that are trained on pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.prompts.sets import PromptEntry, PromptSet
from kvbench.scenes.names import read_names


@dataclass(frozen=True)
class Names(PromptSet):
    """Names of a file (`kvbench.scenes.names`), each with its category.

    Attributes:
        held_out: true for the names that training leaves out, false for the names that it uses.
    """

    held_out: bool = False
    source: ClassVar[str] = "names.csv (kvbench/assets/infinity_emoji/names.csv is an example)"

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the names in the order of the file."""
        try:
            names = read_names(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompts.path={path}: cannot be read ({error}). {self.remedy()}") from None
        split = "held_out" if self.held_out else "train"
        return [(name.caption, {"category": name.category}) for name in names if name.split == split]
