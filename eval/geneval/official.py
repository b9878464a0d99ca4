"""GenEval by its official code: export of images, import of its verdicts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.files import read_text
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.prompt_lines import parse_lines
from kvbench.eval.files.samples import group_indices
from kvbench.eval.geneval.score import (
    REWRITTEN_SUFFIX,
    TAG,
    GenEvalMetrics,
    describe_missing_tasks,
    read_tags,
    summarise_verdicts,
)
from kvbench.eval.protocol.official import Groups, Imported, OfficialProgram, check_names

LINE_KEYS = ("tag", "include", "exclude", "prompt")


@dataclass(frozen=True)
class GenEvalOfficial(OfficialProgram, GenEvalMetrics):
    """`geneval[official]`: verdicts of evaluate_images.py, which needs mmdetection, a GPU and its own environment.

    With rewritten prompts (`prompts.rewritten`) the metric is `geneval[official-rewritten]`; the original prompts are
    judged.

    Attributes:
        verdicts: read the verdicts, instead of exporting images for them.
        protocol: part of the metric's name.
    """

    verdicts: bool = False
    protocol: str = "official"
    folder: ClassVar[str] = "geneval_official"
    results: ClassVar[str] = "results.jsonl"
    switch: ClassVar[str] = "verdicts"
    picture: ClassVar[str] = "{0}"
    steps: ClassVar[str] = (
        "in GenEval's environment run: python evaluation/evaluate_images.py {folder} --outfile {path} "
        "--model-path <folder of the detector>"
    )

    def adapt(self, images: ImageSet) -> "GenEvalOfficial":
        """Return the evaluator, renamed if the prompts were rewritten."""
        return replace(self, protocol=self.protocol + REWRITTEN_SUFFIX) if images.rewritten else self

    def group(self, images: ImageSet) -> Groups:
        """Return each image by its path `<index of the prompt>/samples/<copy>.png`, in the order of the run."""
        prompts = enumerate(group_indices(images.indices, images.clusters).values())
        names = {
            index: f"{prompt:05d}/samples/{copy:05d}.png"
            for prompt, indices in prompts
            for copy, index in enumerate(indices)
        }
        return {names[index]: [index] for index in images.indices}

    def export(self, images: ImageSet, groups: Groups, folder: Path) -> None:
        """Write the images, and each prompt's line as metadata.jsonl in the folder above its images."""
        super().export(images, groups, folder)
        for name, [index] in groups.items():
            line = {key: value for key, value in images.meta(index).items() if key in LINE_KEYS}
            line["prompt"] = images.samples[index].original
            path = (folder / name).parent.with_name("metadata.jsonl")
            path.write_text(json.dumps(line) + "\n", encoding="utf-8")

    def read(self, images: ImageSet, groups: Groups, path: Path) -> Imported:
        """Return the scores from the official code's verdicts."""
        tags, verdicts = read_tags(images), read_verdicts(path)
        check_names(path, [name for name in verdicts if name in groups], groups)
        for name, [index] in groups.items():
            original = images.samples[index].original
            if verdicts[name].get("prompt", original) != original:
                raise ValueError(f"{path}: its verdict on {name} is about another prompt; make it again")
        judged = [verdicts[name] for name in groups]
        correct = [bool(verdict["correct"]) for verdict in judged]
        columns: dict[str, list[object]] = {
            "index": [*images.indices],
            TAG: [*tags],
            self.metric: [*correct],
            "reason": [str(verdict.get("reason", "")) for verdict in judged],
        }
        scores = summarise_verdicts(self.metric, tags, correct, images.clusters)
        return scores, columns, describe_missing_tasks(tags)


def read_verdicts(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the lines of results.jsonl by path of the image, as in `group`; raise ValueError if one is malformed."""
    verdicts: dict[str, Mapping[str, Any]] = {}
    for number, line, _ in parse_lines(read_text(path)):
        try:
            verdict = json.loads(line)
            parts = Path(verdict["filename"]).parts
            verdicts[f"{parts[-3]}/samples/{parts[-1]}"] = verdict
            verdict["correct"]
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f"{path}, line {number}: needs filename and correct; make it again") from None
    return verdicts
