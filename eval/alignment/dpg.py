"""DPG-Bench (Hu et al., arXiv:2403.05135): questions about an image, each of which may rest on others."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kvbench.eval.alignment.vqa import BlipVqa, Vqa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Snapshot, Weight
from kvbench.eval.protocol.base import PartedEvaluator, Result, SkipEvaluation, make_result, read_meta
from kvbench.eval.protocol.scores import MetricSpec, share_score

CATEGORIES = ("entity", "attribute", "relation", "global", "other")
COLUMNS = ("item_id", "proposition_id", "dependency", "tuple", "question_natural_language")
DPG_CSV = Weight.at("https://raw.githubusercontent.com/TencentQQGYLab/ELLA/main/dpg_bench/dpg_bench.csv")


@dataclass(frozen=True)
class Question:
    """One question about an item.

    Attributes:
        number: within the item.
        text: what to ask.
        kind: the proposition it comes from, such as `attribute - color (dog, red)`.
        parents: questions without a yes to which it cannot be right.
    """

    number: int
    text: str
    kind: str
    parents: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """One of `CATEGORIES`."""
        return self.kind.split("(")[0].split("-")[0].strip()


def settled(questions: Sequence[Question], yes: Mapping[int, bool]) -> dict[int, bool]:
    """Return which answers to an image's questions count, by number.

    In the questions' order, a yes is void if a parent's is void by then; so it carries forward only.

    Raises:
        KeyError: a parent is not among the questions.
    """
    counts = dict(yes)
    for question in questions:
        if not all(counts[parent] for parent in question.parents):
            counts[question.number] = False
    return counts


def by_category(
    judged: Sequence[tuple[str, Sequence[Question], Mapping[int, bool]]],
) -> dict[str, tuple[list[float], list[str]]]:
    """Questions of judged images (item, questions, what counts) by category: 100 or 0 each, and their items."""
    found: dict[str, tuple[list[float], list[str]]] = {}
    for item, questions, counts in judged:
        for question in questions:
            values, items = found.setdefault(question.category, ([], []))
            values.append(100.0 * counts[question.number])
            items.append(item)
    return {category: found[category] for category in CATEGORIES if category in found}


def read_questions(path: Path, *, official: bool = False) -> dict[str, list[Question]]:
    """Questions by item out of dpg_bench.csv.

    Args:
        path: the file.
        official: leave out the first question, as the authors' program does.

    Raises:
        ValueError: a column is missing, or a line is malformed.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if absent := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {absent[0]}; needed: {', '.join(COLUMNS)}")
        items: dict[str, list[Question]] = {}
        for number, line in enumerate(reader):
            if not (official and number == 0):
                items.setdefault(line["item_id"], []).append(_question(path, number + 2, line))
    if not items:
        raise ValueError(f"{path} holds no questions")
    if not official and (resting := _dropped(items)):
        raise ValueError(f"{path}: item {min(resting)} has a question that depends on a missing question")
    return items


@dataclass(frozen=True)
class Dpg(PartedEvaluator):
    """`dpg[<vqa>]`: 100 x mean over prompts of the mean over their images of the share of questions answered yes.

    Attributes:
        vqa: answers the questions; an answer counts if it is `yes`.
        vqa_name: goes into the metric's name.
        questions: where dpg_bench.csv lies, if not in $KVBENCH_WEIGHTS.
        official: with the quirks of the authors' program: the file's first question is left out, and with it every
            item whose other questions rest on it; categories come from each prompt's last image, without voiding.
            Otherwise nothing is left out, and categories come from what counts of every image.
        table: the file of questions.
    """

    vqa: Vqa = field(default_factory=BlipVqa)
    vqa_name: str = "blip-vqa-large"
    questions: str | None = None
    official: bool = False
    table: Weight = DPG_CSV
    name: ClassVar[str] = "dpg"
    asks: ClassVar[str] = "item_id"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)
    part_names: ClassVar[tuple[str, ...]] = CATEGORIES

    @property
    def weights(self) -> tuple[Weight | Snapshot, ...]:
        """Questions and model."""
        return (replace(self.table, path=self.questions), *self.vqa.weights)

    @property
    def protocol(self) -> str:
        """The model's name, and whether the quirks are on."""
        return self.vqa_name + ("-official" if self.official else "")

    @property
    def metric(self) -> str:
        """The overall score's name."""
        return f"dpg[{self.protocol}]"

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Ask every question about every image; the reference is not used."""
        items = dict(zip(images.indices, dpg_items(images), strict=True))
        path, sha256 = replace(self.table, path=self.questions).require()
        questions = read_questions(path, official=self.official)
        if unknown := [item for item in items.values() if item not in questions]:
            raise ValueError(f"{path} has no questions about item {unknown[0]}")
        dropped = _dropped(questions)
        answer, hashes = self.vqa.load(device)
        rows, raw, judged = [], [], []
        for [index] in images.batches(1, self.name):
            item = items[index]
            if item in dropped:
                continue
            asked = questions[item]
            said = answer(images.image(index), [question.text for question in asked])
            yes = {question.number: text == "yes" for question, text in zip(asked, said, strict=True)}
            counts = settled(asked, yes)
            raw.append((item, asked, yes))
            judged.append((item, asked, counts))
            rows.append((index, item, 100 * sum(counts.values()) / len(counts), said))
        if not judged:
            raise SkipEvaluation("the official program drops every item of this run")
        names = ("index", "item_id", self.metric, "answers")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        means = _means(judged)
        scores = {self.metric: share_score(means, whole=100)}
        last = list({item: (item, asked, yes) for item, asked, yes in raw}.values())
        for category, (values, groups) in by_category(last if self.official else judged).items():
            scores[f"{self.metric}/{category}"] = share_score(values, groups, whole=100)
        caveat = f"left out, as the official program does: {', '.join(sorted(dropped))}" if dropped else None
        return make_result(self, scores, columns, {path.name: sha256, **hashes}, caveat)


def dpg_items(images: ImageSet) -> list[str]:
    """Return the item of every image."""
    return [str(item) for item in read_meta(images, "item_id", "DPG item", "(item_id): use prompts=dpg")]


def _means(judged: Sequence[tuple[str, Sequence[Question], Mapping[int, bool]]]) -> list[float]:
    """100 x mean over each item's images of the share that counts."""
    images: dict[str, list[float]] = {}
    for item, _, counts in judged:
        images.setdefault(item, []).append(100 * sum(counts.values()) / len(counts))
    return [sum(values) / len(values) for values in images.values()]


def _question(path: Path, line_number: int, line: Mapping[str, str]) -> Question:
    try:
        parents = tuple(int(part) for part in line["dependency"].split(","))
        number, text, kind = int(line["proposition_id"]), line["question_natural_language"], line["tuple"]
        if not text.strip():
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path}, line {line_number}: not a DPG question ({dict(line)})") from None
    return Question(number, text, kind, tuple(parent for parent in parents if parent != 0))


def _dropped(items: Mapping[str, Sequence[Question]]) -> set[str]:
    """Items with a question that rests on one that is not there."""
    known = {item: {question.number for question in questions} for item, questions in items.items()}
    return {i for i, questions in items.items() for q in questions if not known[i].issuperset(q.parents)}
