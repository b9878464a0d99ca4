"""Benchmark prompt sets: COCO, GenEval, UniGenBench, OneIG, HPSv2, DPG, PartiPrompts. Their texts are not included."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.eval.alignment.geneval2 import parse_line
from kvbench.eval.alignment.hps import STYLES
from kvbench.eval.alignment.oneig import CLASSES
from kvbench.eval.files.prompt_lines import parse_lines
from kvbench.eval.files.samples import REWRITTEN_FROM
from kvbench.eval.files.weights import Weight
from kvbench.eval.geneval.rules import Line
from kvbench.prompts.base import Count
from kvbench.prompts.sets import PromptEntry, PromptSet, TableSet, read_file

REWRITTEN_SOURCE = (
    "Needed: a JSON object with a string for every prompt, such as Infinity's prompt_rewrite_cache.json "
    "(https://github.com/user-attachments/files/18260941/prompt_rewrite_cache.json)"
)
ONEIG_CLASSES = dict(
    zip(
        ("Anime_Stylization", "Portrait", "General_Object", "Text_Rendering", "Knowledge_Reasoning"),
        CLASSES,
        strict=True,
    )
)
"""Class of each category of OneIG-Bench, which is the name of its folder of images."""


@dataclass(frozen=True)
class Coco(PromptSet):
    """The first caption of every image in a COCO captions file (JSON), in the file's order.

    HeatKV and ScaleKV use the 5000 images of val2017; FID-30K usually the 40 504 of val2014. `count` without `draw`
    takes the first images.
    """

    source: ClassVar[str] = (
        "captions_val2017.json (5000 images) or captions_val2014.json (40504), out of annotations_trainval2017.zip or "
        "annotations_trainval2014.zip at http://images.cocodataset.org/annotations/"
    )
    form: ClassVar[str] = (
        "a COCO captions file: `images` with id, and `annotations` with image_id and caption for each of them"
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the captions, each with its image's id, `image_id`."""
        contents = read_file(path, parse_json)
        first: dict[int, str] = {}
        for annotation in contents["annotations"]:
            first.setdefault(annotation["image_id"], str(annotation["caption"]).strip())
        ids = [image["id"] for image in contents["images"]]
        return [(first[image], {"image_id": image}) for image in ids]

    def _choose(self, total: int) -> list[int]:
        chosen = super()._choose(total)
        return list(range(len(chosen))) if self.draw is None else chosen


@dataclass(frozen=True)
class GenEval(PromptSet):
    """The 553 prompts of GenEval (Ghosh et al., arXiv:2310.11513) with their lines.

    Attributes:
        rewritten: JSON file of rewritten texts by prompt, as for Infinity's code; images are still judged by the line
            of the original prompt. None uses the prompts.
    """

    per_prompt: Count = 4
    rewritten: str | None = None
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "evaluation_metadata.jsonl",
            url="https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/evaluation_metadata.jsonl",
            sha256="5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
        ),
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with its line (tag, include, exclude) and, if it is rewritten, the original prompt."""
        lines = _read_lines(path, Line.parse, "a GenEval line (JSON with tag, include, prompt)")
        if self.rewritten is None:
            return lines
        texts = self._read_rewritten(Path(self.rewritten).expanduser())
        if unknown := [text for text, _ in lines if text not in texts]:
            raise ConfigError(
                f"prompts.rewritten={self.rewritten}: has no text for {unknown[0]!r} ({len(unknown)} of {len(lines)} "
                f"prompts are missing). {REWRITTEN_SOURCE}"
            )
        return [(texts[text], {**line, REWRITTEN_FROM: text}) for text, line in lines]

    def _read_rewritten(self, path: Path) -> dict[str, str]:
        try:
            texts = parse_json(read_text(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"prompts.rewritten={path}: cannot be read ({error}). {REWRITTEN_SOURCE}"
            ) from None
        if not isinstance(texts, dict) or not all(isinstance(t, str) and t.strip() for t in texts.values()):
            raise ConfigError(
                f"prompts.rewritten={path}: not an object of strings by prompt. {REWRITTEN_SOURCE}"
            )
        return texts


@dataclass(frozen=True)
class GenEval2(PromptSet):
    """The 800 prompts of GenEval2 (Kamath et al., arXiv:2512.16853) with their questions, one image of each."""

    source: ClassVar[str] = (
        "geneval2_data.jsonl of https://github.com/facebookresearch/GenEval2 (licence CC BY-NC 4.0, not commercial)"
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with its questions: vqa_list, skills and atom_count."""
        return _read_lines(
            path, parse_line, "a GenEval2 line (JSON with vqa_list, skills, atom_count, prompt)"
        )


@dataclass(frozen=True)
class UniGenBench(TableSet):
    """The 600 English prompts of UniGenBench++ (arXiv:2510.18701): a table with columns index and prompt_en."""

    per_prompt: Count = 4
    columns: ClassVar[Mapping[str, str]] = {"unigenbench_index": "index"}
    source: ClassVar[str] = (
        "data/test_prompts_en.csv of https://github.com/CodeGoat24/UniGenBench (CC BY 4.0)"
    )


@dataclass(frozen=True)
class OneIg(TableSet):
    """The 1120 English prompts of OneIG-Bench (arXiv:2506.07977): a table with columns category, id and prompt_en.

    Attributes:
        classes: the classes of prompts to take.
    """

    per_prompt: Count = 4
    classes: tuple[str, ...] = CLASSES
    columns: ClassVar[Mapping[str, str]] = {"oneig_class": "category", "oneig_id": "id"}
    parts: ClassVar[tuple[str, str, tuple[str, ...]]] = ("classes", "oneig_class", CLASSES)
    source: ClassVar[str] = (
        "OneIG-Bench.csv of https://github.com/OneIG-Bench/OneIG-Benchmark (CC BY-NC 4.0, not commercial)"
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with its class, `oneig_class`, and its id in the class, `oneig_id`."""
        entries = super().entries(path)
        if unknown := [
            meta["oneig_class"] for _, meta in entries if meta["oneig_class"] not in ONEIG_CLASSES
        ]:
            raise ConfigError(f"prompts.path={path}: {unknown[0]} is not one of {', '.join(ONEIG_CLASSES)}")
        return [
            (text, {**meta, "oneig_class": ONEIG_CLASSES[str(meta["oneig_class"])]}) for text, meta in entries
        ]


@dataclass(frozen=True)
class HpsV2(PromptSet):
    """The 3200 prompts of the HPSv2 benchmark (Wu et al., arXiv:2306.09341): a JSON list in a file for each style.

    Attributes:
        styles: the styles to take.
    """

    styles: tuple[str, ...] = STYLES
    files: ClassVar[tuple[Weight, ...]] = tuple(
        Weight(
            f"{style}.json",
            url=f"https://huggingface.co/datasets/zhwang/HPDv2/resolve/main/benchmark/{style}.json",
        )
        for style in STYLES
    )
    parts: ClassVar[tuple[str, str, tuple[str, ...]]] = ("styles", "style", STYLES)
    source: ClassVar[str] = (
        "anime.json, concept-art.json, paintings.json and photo.json (folder `benchmark` of the Hub's dataset "
        "zhwang/HPDv2) into one folder"
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts style by style, each with its style."""
        entries: list[PromptEntry] = []
        for style in self.styles:
            file = path / f"{style}.json"
            if not file.is_file():
                raise ConfigError(f"prompts.path={path}: {file.name} is missing. {self.remedy()}")
            texts = read_file(file, parse_json)
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"prompts.path={file}: not a JSON list of strings. {self.remedy()}")
            entries += [(text, {"style": style}) for text in texts]
        return entries


@dataclass(frozen=True)
class Dpg(PromptSet):
    """The 1065 prompts of DPG-Bench (Hu et al., arXiv:2403.05135): a folder of text files named by item."""

    per_prompt: Count = 4
    source: ClassVar[str] = (
        "the folder dpg_bench/prompts (1065 .txt) of https://github.com/TencentQQGYLab/ELLA"
    )

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts in the order of their files' names, each with its file's stem as `item_id`."""
        if not path.is_dir():
            raise ConfigError(f"prompts.path={path}: is not a folder. {self.remedy()}")
        return [(read_file(file, str.strip), {"item_id": file.stem}) for file in sorted(path.glob("*.txt"))]


@dataclass(frozen=True)
class Parti(TableSet):
    """The 1632 PartiPrompts (Yu et al., arXiv:2206.10789): a table with columns Prompt, Category and Challenge."""

    text: ClassVar[str] = "Prompt"
    columns: ClassVar[Mapping[str, str]] = {"category": "Category", "challenge": "Challenge"}
    tabs: ClassVar[bool] = True
    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "PartiPrompts.tsv",
            url="https://raw.githubusercontent.com/google-research/parti/main/PartiPrompts.tsv",
        ),
    )


def _read_lines(path: Path, check: Callable[[dict[str, object]], object], what: str) -> list[PromptEntry]:
    """Read a file of JSON lines with a `prompt` each; raise ConfigError if `check` finds that a line is not `what`."""
    entries: list[PromptEntry] = []
    for number, text, _ in read_file(path, parse_lines):
        try:
            line = parse_json(text)
            check(line)
            entries.append((str(line["prompt"]), line))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"prompts.path={path}: line {number} is not {what}") from None
    return entries
