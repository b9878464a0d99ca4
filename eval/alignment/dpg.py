"""DPG-Bench (Hu et al., arXiv:2403.05135): questions about an image that may depend on other questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

from kvbench.eval.alignment.vqa import BlipVqa, Vqa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight, loading
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result, read_meta
from kvbench.eval.protocol.intervals import split_groups
from kvbench.eval.protocol.official import read_table
from kvbench.eval.protocol.scores import MetricSpec, score_parts, share_score

CATEGORIES = ("entity", "attribute", "relation", "global", "other")
COLUMNS = ("item_id", "proposition_id", "dependency", "tuple", "question_natural_language")
DPG_CSV = Weight.at("https://raw.githubusercontent.com/TencentQQGYLab/ELLA/main/dpg_bench/dpg_bench.csv")


@dataclass(frozen=True)
class Question:
    """One question about an item.

    Attributes:
        number: `proposition_id` of the question, unique within the item.
        text: the question.
        kind: its proposition, such as `attribute - color (dog, red)`.
        parents: numbers of the questions that need a yes before this question counts.
    """

    number: int
    text: str
    kind: str
    parents: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """Category of the question, one of `CATEGORIES`."""
        return self.kind.split("(")[0].split("-")[0].strip()


def void_answers(questions: Sequence[Question], yes: Mapping[int, bool]) -> dict[int, bool]:
    """Return whether each answer about an image counts, by number.

    A yes is void unless all parents count; a parent that comes later counts by its raw answer.

    Raises:
        KeyError: a parent is not one of the questions.
    """
    counts = dict(yes)
    for question in questions:
        if not all(counts[parent] for parent in question.parents):
            counts[question.number] = False
    return counts


def read_questions(path: Path, *, official: bool = False) -> dict[str, list[Question]]:
    """Return the questions of dpg_bench.csv by item; `official` drops the first question, as the official code does.

    Raises:
        ValueError: a column is missing, a line is malformed, there is no question, or (unless `official`) one depends
            on a missing question.
    """
    items: dict[str, list[Question]] = {}
    for number, row in enumerate(read_table(path, COLUMNS)):
        if not (official and number == 0):
            items.setdefault(row["item_id"], []).append(_read_question(path, number + 2, row))
    if not items:
        raise ValueError(f"{path} holds no questions; copy it again")
    if not official and (incomplete := _find_incomplete(items)):
        raise ValueError(f"{path}: item {min(incomplete)} depends on a missing question; copy it again")
    return items


@dataclass(frozen=True)
class Dpg(Evaluator):
    """`dpg[<vqa>]`: 100 x mean over prompts of the mean over their images of the share of questions answered yes.

    Attributes:
        vqa: model that answers the questions; only `yes` counts.
        vqa_name: name of the model, part of the metric's name.
        questions: path of dpg_bench.csv, if it is not in $KVBENCH_WEIGHTS.
        official: follow the quirks of the official code: the file's first question is left out, and so is every
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
    paths: ClassVar[Mapping[str, str]] = {"table": "questions"}
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)
    part_names: ClassVar[tuple[str, ...]] = CATEGORIES

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the file of questions."""
        return {"questions": self.files[0].find()}

    @property
    def protocol(self) -> str:
        """Name of the model, with a suffix for the official quirks."""
        return self.vqa_name + ("-official" if self.official else "")

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Answer every question about every image; the reference is not used."""
        items = dict(zip(images.indices, read_items(images), strict=True))
        path, sha256 = self.files[0].require()
        questions = read_questions(path, official=self.official)
        if unknown := [item for item in items.values() if item not in questions]:
            raise ValueError(f"{path} has no questions about item {unknown[0]}; copy it again")
        dropped = _find_incomplete(questions)
        with loading(self.vqa.weights):
            answer, hashes = self.vqa.load(device)
        rows = []
        graded: dict[object, list[tuple[str, float, str]]] = {}  # category, points and item of questions
        for [index] in images.batches(1, self.name):
            item = items[index]
            if item in dropped:
                continue
            asked = questions[item]
            answers = answer(images.image(index), [question.text for question in asked])
            yes = {question.number: text == "yes" for question, text in zip(asked, answers, strict=True)}
            counts = void_answers(asked, yes)
            picture, marks = (item, yes) if self.official else (index, counts)
            graded[picture] = [
                (question.category, 100.0 * marks[question.number], item) for question in asked
            ]
            rows.append((index, item, 100 * sum(counts.values()) / len(counts), answers))
        if not rows:
            raise SkipEvaluation("every item of this run has a question that depends on a missing one")
        names = ("index", "item_id", self.metric, "answers")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        points = split_groups((item, value, index) for index, item, value, _ in rows)
        means = [sum(values) / len(values) for values, _ in points.values()]
        average = partial(share_score, whole=100)
        scores = {self.metric: average(means)}
        scores |= score_parts(self.metric, CATEGORIES, chain.from_iterable(graded.values()), average)
        caveat = f"left out, as the official code does: {', '.join(sorted(dropped))}" if dropped else None
        return make_result(self, scores, columns, {path.name: sha256, **hashes}, caveat)


def read_items(images: ImageSet) -> list[str]:
    """Return the DPG item of each image."""
    return [str(item) for item in read_meta(images, "item_id", "DPG item", "(item_id): use prompts=dpg")]


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
