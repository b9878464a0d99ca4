"""Prompt sets for looks and preference: MJHQ-30K, ImageReward's benchmark. Their sentences are not shipped here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.eval.distribution.mjhq import CATEGORIES
from kvbench.eval.files.weights import Weight
from kvbench.prompts.base import check_choices
from kvbench.prompts.sets import Entry, PromptSet, read_file


@dataclass(frozen=True)
class Mjhq30k(PromptSet):
    """The 30 000 prompts of MJHQ-30K (Li et al., arXiv:2402.17245), 3000 of each of ten categories.

    Attributes:
        categories: those to take; the order stays that of the file.
    """

    categories: tuple[str, ...] = CATEGORIES
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "mjhq30k.json",
            url="https://huggingface.co/datasets/playgroundai/MJHQ-30K/resolve/main/meta_data.json",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices("categories", self.categories, CATEGORIES)

    def entries(self, place: Path) -> list[Entry]:
        """Read the prompts, each with its category and the name of its real image, `image_id`."""
        held = read_file(place, parse_json)
        try:
            every = [
                (str(entry["prompt"]).strip(), {"category": str(entry["category"]), "image_id": name})
                for name, entry in held.items()
            ]
        except (AttributeError, KeyError, TypeError):
            raise ConfigError(
                f"prompts.path={place}: not MJHQ-30K's meta_data.json (a JSON object of category and prompt by image)"
            ) from None
        if unknown := {meta["category"] for _, meta in every} - set(CATEGORIES):
            raise ConfigError(f"prompts.path={place}: {min(unknown)} is no category of MJHQ-30K")
        return [(text, {**meta}) for text, meta in every if meta["category"] in self.categories]


@dataclass(frozen=True)
class ImageReward(PromptSet):
    """The 100 prompts of ImageReward's benchmark (Xu et al., arXiv:2304.05977), 10 images of each in its tables."""

    per_prompt: int = 10
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "benchmark-prompts.json",
            url="https://raw.githubusercontent.com/THUDM/ImageReward/main/benchmark/benchmark-prompts.json",
        ),
    )

    def entries(self, place: Path) -> list[Entry]:
        """Read the prompts, each with its `id`."""
        held = read_file(place, parse_json)
        if not isinstance(held, list) or not all(
            isinstance(entry, Mapping) and {"id", "prompt"} <= set(entry) for entry in held
        ):
            raise ConfigError(f"prompts.path={place}: not a JSON list of objects with id and prompt")
        return [(str(entry["prompt"]), {"id": str(entry["id"])}) for entry in held]
