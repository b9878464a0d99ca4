"""GenEval judged by its authors' own program: images out in its layout, its verdicts in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.geneval.score import (
    REWRITTEN,
    TAG,
    GenEvalMetrics,
    absent_tasks,
    geneval_summary,
    geneval_tags,
)
from kvbench.eval.protocol.base import Result, make_result
from kvbench.eval.protocol.official import require_results

FOLDER = "geneval_official"
LINE = ("tag", "include", "exclude", "prompt")

Place = tuple[str, str]


@dataclass(frozen=True)
class GenEvalOfficial(GenEvalMetrics):
    """`geneval[official]`: verdicts of evaluate_images.py (mmdetection, a GPU, an environment of its own).

    First the images are laid out in the run's folder as that program wants them, and the result says which command to
    run; then, with `verdicts`, what it wrote there is read. A run and its reference each have their own.

    Of rewritten prompts (`prompts.rewritten`) it is `geneval[official-rewritten]`; the originals are judged by.

    Attributes:
        verdicts: read them.
        protocol: names the metric.
    """

    verdicts: bool = False
    protocol: str = "official"

    def adapt(self, images: ImageSet) -> "GenEvalOfficial":
        """Return the evaluator under its name for rewritten prompts, where they are."""
        return replace(self, protocol=self.protocol + REWRITTEN) if images.rewritten else self

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images, or import their verdicts; reference and device are not used."""
        tags = geneval_tags(images)
        places = layout(images)
        path = images.folder.resolve() / FOLDER / "results.jsonl"
        command = (
            f"in GenEval's environment run: python evaluation/evaluate_images.py {path.parent} --outfile {path} "
            "--model-path <folder of the detector>"
        )
        require_results(
            path,
            command,
            "eval.geneval_official.verdicts",
            wanted=self.verdicts,
            export=lambda: export(images, places),
        )
        verdicts = read_verdicts(path)
        if absent := [place for place in places.values() if place not in verdicts]:
            raise ValueError(
                f"{path}: no verdict on {'/samples/'.join(absent[0])} ({len(absent)} are missing)"
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
        scores = geneval_summary(self.metric, tags, correct, images.clusters)
        return make_result(self, scores, columns, {path.name: file_sha256(path)}, absent_tasks(tags))


def layout(images: ImageSet) -> dict[int, Place]:
    """Folder (the prompt's number) and file of every image, by index."""
    prompts: dict[str, list[int]] = {}
    for index, prompt in zip(images.indices, images.clusters, strict=True):
        prompts.setdefault(prompt, []).append(index)
    places = {
        index: (f"{number:05d}", f"{copy:05d}.png")
        for number, indices in enumerate(prompts.values())
        for copy, index in enumerate(indices)
    }
    return {index: places[index] for index in images.indices}


def export(images: ImageSet, places: Mapping[int, Place]) -> None:
    """Lay the images out in the run's folder: 00000/metadata.jsonl, 00000/samples/00000.png, and so on."""
    root = images.folder.resolve() / FOLDER
    for index, (prompt, file) in places.items():
        samples = root / prompt / "samples"
        samples.mkdir(parents=True, exist_ok=True)
        line = {key: value for key, value in images.meta(index).items() if key in LINE}
        line["prompt"] = images.samples[index].original
        (root / prompt / "metadata.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        images.export(index, samples / file)


def read_verdicts(path: Path) -> dict[Place, Mapping[str, object]]:
    """Lines of results.jsonl by folder and file of the image.

    Raises:
        ValueError: a line is not one of that program's.
    """
    verdicts: dict[Place, Mapping[str, object]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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
