"""DPG-Bench (Hu et al., arXiv:2403.05135): questions about an image that may depend on other questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kvbench.eval.alignment.vqa import BlipVqa, Vqa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Snapshot, Weight, loading
from kvbench.eval.protocol.base import PartedEvaluator, Result, SkipEvaluation, make_result, read_meta
from kvbench.eval.protocol.intervals import split_groups
from kvbench.eval.protocol.official import read_table
from kvbench.eval.protocol.scores import MetricSpec, share_score

CATEGORIES = ("entity", "attribute", "relation", "global", "other")
COLUMNS = ("item_id", "proposition_id", "dependency", "tuple", "question_natural_language")
DPG_CSV = Weight.at("https://raw.githubusercontent.com/TencentQQGYLab/ELLA/main/dpg_bench/dpg_bench.csv")


@dataclass(frozen=True)
class Question:
    """One question about an item.

    Attributes:
        number: number within the item.
        text: the question.
        kind: its proposition, such as `attribute - color (dog, red)`.
        parents: numbers of the questions that need a yes before this one counts.
    """

    number: int
    text: str
    kind: str
    parents: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """One of `CATEGORIES`."""
        return self.kind.split("(")[0].split("-")[0].strip()


def void_answers(questions: Sequence[Question], yes: Mapping[int, bool]) -> dict[int, bool]:
    """Return whether each answer about an image counts, by number.

    A yes is void if a parent has no valid yes. Questions are checked in order, so later parents are not.

    Raises:
        KeyError: a parent is not one of the questions.
    """
    counts = dict(yes)
    for question in questions:
        if not all(counts[parent] for parent in question.parents):
            counts[question.number] = False
    return counts


def group_by_category(
    judged: Sequence[tuple[str, Sequence[Question], Mapping[int, bool]]],
) -> dict[str, tuple[list[float], list[str]]]:
    """Return 100 or 0 for each question, and its item, by category; from (item, questions, counts) of each image."""
    groups = split_groups(
        (one.category, 100.0 * counts[one.number], item) for item, own, counts in judged for one in own
    )
    return {category: groups[category] for category in CATEGORIES if category in groups}


def read_questions(path: Path, *, official: bool = False) -> dict[str, list[Question]]:
    """Return the questions of dpg_bench.csv by item; `official` leaves out the first one, as the authors' program does.

    Raises:
        ValueError: a column is missing, or a line is malformed.
    """
    items: dict[str, list[Question]] = {}
    for number, row in enumerate(read_table(path, COLUMNS)):
        if not (official and number == 0):
            items.setdefault(row["item_id"], []).append(_read_question(path, number + 2, row))
    if not items:
        raise ValueError(f"{path} holds no questions")
    if not official and (incomplete := _find_incomplete(items)):
        raise ValueError(f"{path}: item {min(incomplete)} has a question that depends on a missing question")
    return items


@dataclass(frozen=True)
class Dpg(PartedEvaluator):
    """`dpg[<vqa>]`: 100 x mean over prompts of the mean over their images of the share of questions answered yes.

    Attributes:
        vqa: model that answers the questions; only `yes` counts.
        vqa_name: name of the model, part of the metric's name.
        questions: path of dpg_bench.csv, if it is not in $KVBENCH_WEIGHTS.
        official: follow the quirks of the authors' program: the file's first question is left out, and so is every
            item with questions that depend on it; categories use each prompt's last image, without voiding.
            Otherwise nothing is left out, and categories use the answers that count on all images.
        table: the file of questions.
    """

    vqa: Vqa = field(default_factory=BlipVqa)
    vqa_name: str = "blip-vqa-large"
    questions: str | None = None
    official: bool = False
    table: Weight = DPG_CSV
    name: ClassVar[str] = "dpg"
    required_meta: ClassVar[str] = "item_id"
    meta_keys: ClassVar[tuple[str, ...]] = ("item_id",)
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)
    part_names: ClassVar[tuple[str, ...]] = CATEGORIES

    @property
    def weights(self) -> tuple[Weight | Snapshot, ...]:
        """File of questions and files of the model."""
        return (replace(self.table, path=self.questions), *self.vqa.weights)

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the file of questions."""
        return {"questions": replace(self.table, path=self.questions).find()}

    @property
    def protocol(self) -> str:
        """Name of the model, with a suffix for the official quirks."""
        return self.vqa_name + ("-official" if self.official else "")

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Answer every question about every image; the reference is not used."""
        items = dict(zip(images.indices, read_items(images), strict=True))
        path, sha256 = replace(self.table, path=self.questions).require()
        questions = read_questions(path, official=self.official)
        if unknown := [item for item in items.values() if item not in questions]:
            raise ValueError(f"{path} has no questions about item {unknown[0]}")
        dropped = _find_incomplete(questions)
        with loading(self.vqa.weights):
            answer, hashes = self.vqa.load(device)
        rows, raw, judged = [], [], []
        for [index] in images.batches(1, self.name):
            item = items[index]
            if item in dropped:
                continue
            own = questions[item]
            answers = answer(images.image(index), [question.text for question in own])
            yes = {question.number: text == "yes" for question, text in zip(own, answers, strict=True)}
            counts = void_answers(own, yes)
            raw.append((item, own, yes))
            judged.append((item, own, counts))
            rows.append((index, item, 100 * sum(counts.values()) / len(counts), answers))
        if not judged:
            raise SkipEvaluation("the official program drops every item of this run")
        names = ("index", "item_id", self.metric, "answers")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        means = _means(judged)
        scores = {self.metric: share_score(means, whole=100)}
        last = list({one[0]: one for one in raw}.values())
        for category, (values, groups) in group_by_category(last if self.official else judged).items():
            scores[f"{self.metric}/{category}"] = share_score(values, groups, whole=100)
        caveat = f"left out, as the official program does: {', '.join(sorted(dropped))}" if dropped else None
        return make_result(self, scores, columns, {path.name: sha256, **hashes}, caveat)


def read_items(images: ImageSet) -> list[str]:
    """Return the item of each image."""
    return [str(item) for item in read_meta(images, "item_id", "DPG item", "(item_id): use prompts=dpg")]


def _means(judged: Sequence[tuple[str, Sequence[Question], Mapping[int, bool]]]) -> list[float]:
    """Return 100 x the mean share of valid answers over the images of each item."""
    images: dict[str, list[float]] = {}
    for item, _, counts in judged:
        images.setdefault(item, []).append(100 * sum(counts.values()) / len(counts))
    return [sum(values) / len(values) for values in images.values()]


def _read_question(path: Path, line_number: int, line: Mapping[str, str]) -> Question:
    try:
        parents = tuple(int(part) for part in line["dependency"].split(","))
        number, text, kind = int(line["proposition_id"]), line["question_natural_language"], line["tuple"]
        if not text.strip():
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path}, line {line_number}: not a DPG question ({dict(line)})") from None
    return Question(number, text, kind, tuple(parent for parent in parents if parent != 0))


def _find_incomplete(items: Mapping[str, Sequence[Question]]) -> set[str]:
    """Return the items with a question that depends on a missing one."""
    known = {item: {question.number for question in questions} for item, questions in items.items()}
    return {i for i, questions in items.items() for q in questions if not known[i].issuperset(q.parents)}
