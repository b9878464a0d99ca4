"""GenEval by its authors' program: export of images, import of its verdicts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvbench.core.files import read_text
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.geneval.score import (
    REWRITTEN_SUFFIX,
    TAG,
    GenEvalMetrics,
    describe_missing_tasks,
    read_tags,
    summarise_verdicts,
)
from kvbench.eval.protocol.base import Result, make_result
from kvbench.eval.protocol.official import group_images, require_results

FOLDER, RESULTS = "geneval_official", "results.jsonl"
LINE_KEYS = ("tag", "include", "exclude", "prompt")

Place = tuple[str, str]


@dataclass(frozen=True)
class GenEvalOfficial(GenEvalMetrics):
    """`geneval[official]`: verdicts of evaluate_images.py (mmdetection, a GPU, an environment of its own).

    The first call exports the images to the run's folder, and the result says which command to run. With `verdicts` the
    output of the program is read. A run and its reference have separate outputs.

    With rewritten prompts (`prompts.rewritten`) the metric is `geneval[official-rewritten]`; the original prompts are
    judged.

    Attributes:
        verdicts: read the verdicts.
        protocol: part of the metric's name.
    """

    verdicts: bool = False
    protocol: str = "official"

    def adapt(self, images: ImageSet) -> "GenEvalOfficial":
        """Return the evaluator, renamed if the prompts were rewritten."""
        return replace(self, protocol=self.protocol + REWRITTEN_SUFFIX) if images.rewritten else self

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the verdicts of the program, if they are read."""
        return {"verdicts": run / FOLDER / RESULTS} if self.verdicts else {}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images or import their verdicts; reference and device are not used."""
        tags = read_tags(images)
        places = layout(images)
        path = images.folder.resolve() / FOLDER / RESULTS
        command = (
            f"in GenEval's environment run: python evaluation/evaluate_images.py {path.parent} --outfile {path} "
            "--model-path <folder of the detector>"
        )
        write = partial(export, images, places)
        require_results(path, command, "eval.geneval_official.verdicts", self.verdicts, write)
        verdicts = read_verdicts(path)
        if missing := [place for place in places.values() if place not in verdicts]:
            raise ValueError(
                f"{path}: no verdict on {'/samples/'.join(missing[0])}, {len(missing)} are missing"
            )
        for index, place in places.items():
            original = images.samples[index].original
            if verdicts[place].get("prompt", original) != original:
                raise ValueError(f"{path}: its verdict on {'/samples/'.join(place)} is about another prompt")
        judged = [verdicts[place] for place in places.values()]
        correct = [bool(verdict["correct"]) for verdict in judged]
        columns: dict[str, list[object]] = {
            "index": [*images.indices],
            TAG: [*tags],
            self.metric: [*correct],
            "reason": [str(verdict.get("reason", "")) for verdict in judged],
        }
        scores = summarise_verdicts(self.metric, tags, correct, images.clusters)
        return make_result(
            self, scores, columns, {path.name: file_sha256(path)}, describe_missing_tasks(tags)
        )


def layout(images: ImageSet) -> dict[int, Place]:
    """Return the folder (number of the prompt) and file name of each image, by index."""
    prompts = group_images(images, images.clusters)
    places = {
        index: (f"{number:05d}", f"{copy:05d}.png")
        for number, indices in enumerate(prompts.values())
        for copy, index in enumerate(indices)
    }
    return {index: places[index] for index in images.indices}


def export(images: ImageSet, places: Mapping[int, Place]) -> None:
    """Write 00000/metadata.jsonl, 00000/samples/00000.png and so on into the run's folder."""
    root = images.folder.resolve() / FOLDER
    for index, (prompt, file) in places.items():
        samples = root / prompt / "samples"
        samples.mkdir(parents=True, exist_ok=True)
        line = {key: value for key, value in images.meta(index).items() if key in LINE_KEYS}
        line["prompt"] = images.samples[index].original
        (root / prompt / "metadata.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        images.export(index, samples / file)


def read_verdicts(path: Path) -> dict[Place, Mapping[str, object]]:
    """Return the lines of results.jsonl by folder and file name of the image.

    Raises:
        ValueError: a line is malformed.
    """
    verdicts: dict[Place, Mapping[str, object]] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            verdict = json.loads(line)
            parts = Path(verdict["filename"]).parts
            verdicts[parts[-3], parts[-1]] = verdict
            verdict["correct"]
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f"{path}, line {number}: not a verdict with filename and correct") from None
    return verdicts
