"""Prompt sets for preference metrics: MJHQ-30K, ImageReward's benchmark. Their texts are not included."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.eval.distribution.mjhq import CATEGORIES
from kvbench.eval.files.weights import Weight
from kvbench.prompts.base import Count
from kvbench.prompts.sets import PromptEntry, PromptSet, read_file


@dataclass(frozen=True)
class Mjhq30k(PromptSet):
    """The 30 000 prompts of MJHQ-30K (Li et al., arXiv:2402.17245), 3000 of each of ten categories.

    Attributes:
        categories: categories whose prompts are taken, in the file's order.
    """

    categories: tuple[str, ...] = CATEGORIES
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "mjhq30k.json",
            url="https://huggingface.co/datasets/playgroundai/MJHQ-30K/resolve/main/meta_data.json",
        ),
    )
    parts: ClassVar[tuple[str, str, tuple[str, ...]]] = ("categories", "category", CATEGORIES)
    form: ClassVar[str] = "MJHQ-30K's meta_data.json, a JSON object of category and prompt by image"

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with its category and the name of its real image, `image_id`."""
        entries: list[PromptEntry] = [
            (str(entry["prompt"]).strip(), {"category": str(entry["category"]), "image_id": name})
            for name, entry in read_file(path, parse_json).items()
        ]
        if unknown := {str(meta["category"]) for _, meta in entries} - set(CATEGORIES):
            raise ConfigError(f"prompts.path={path}: {min(unknown)} is no MJHQ-30K category. {self.remedy()}")
        return entries


@dataclass(frozen=True)
class ImageReward(PromptSet):
    """The 100 prompts of ImageReward's benchmark (Xu et al., arXiv:2304.05977), 10 images of each in its tables."""

    per_prompt: Count = 10
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "benchmark-prompts.json",
            url="https://raw.githubusercontent.com/THUDM/ImageReward/main/benchmark/benchmark-prompts.json",
        ),
    )
    form: ClassVar[str] = "a JSON list of objects with id and prompt"

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with its `id`."""
        contents = read_file(path, parse_json)
        return [(str(entry["prompt"]), {"id": str(entry["id"])}) for entry in contents]
