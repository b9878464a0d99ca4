"""Accuracy of answers, by math-verify or word for word, of one run and against the reference run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.texts import TextSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result, read_meta
from kvbench.eval.protocol.scores import MetricSpec, mean_score, share_score
from kvbench.eval.protocol.shares import change_interval

ANSWER = "answer"
"""Key of the right answer in a prompt's metadata."""
THOUGHT, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Answers(Evaluator):
    """Share of texts whose answer is right; texts of one problem are one cluster.

    Only the text after the thoughts counts (`find_conclusion`): a text that was cut inside them has no answer.
    """

    name: ClassVar[str]
    protocol: ClassVar[str]
    better: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)
    reads: ClassVar[str] = TextSet.kind
    asks: ClassVar[str] = ANSWER

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The share, or its change, under the evaluator's name."""
        return {self.name: self.better}

    def judge(self, conclusion: str, answer: str) -> bool:
        """Return whether a text's conclusion gives the answer."""
        raise NotImplementedError

    def run(self, texts: TextSet, reference: TextSet | None, device: str) -> Result:
        """Judge every text."""
        right = self._judge_all(texts)
        scores = {self.name: share_score(right, texts.clusters)}
        return make_result(self, scores, {"index": texts.indices, self.name: right})

    def _judge_all(self, texts: TextSet) -> list[float]:
        """Return 1 for each right text and 0 for each other one."""
        answers = read_meta(texts, ANSWER, "answer", "(prompts=aime24, math500, gsm8k and others do)")
        pairs = zip(texts.read(self.name), answers, strict=True)
        return [float(self.judge(find_conclusion(text), str(answer))) for (_, text), answer in pairs]


class Change(Answers):
    """Mean difference to the reference run: right answers gained less those lost, problem by problem."""

    needs_reference: ClassVar[bool] = True

    def run(self, texts: TextSet, reference: TextSet | None, device: str) -> Result:
        """Judge every text and its reference's."""
        assert reference is not None
        ours, theirs = self._judge_all(texts), self._judge_all(reference)
        change = [a - b for a, b in zip(ours, theirs, strict=True)]
        scores = {self.name: mean_score(change, texts.clusters, change_interval)}
        return make_result(self, scores, {"index": texts.indices, self.name: change})


@dataclass(frozen=True)
class Accuracy(Answers):
    r"""`accuracy`: answers that mean the same as the right one, by math-verify; the last `\boxed{}` if there is one."""

    name: ClassVar[str] = "accuracy"
    protocol: ClassVar[str] = "math-verify-last-box"
    packages: ClassVar[tuple[str, ...]] = ("math_verify",)

    def judge(self, conclusion: str, answer: str) -> bool:
        """Return whether math-verify finds the answer in the conclusion."""
        from math_verify import parse, verify

        # LaTeX is read between signs alone.
        right = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
        # math-verify joins neighbouring boxes, so that a corrected answer would be judged with the one it replaces.
        return bool(verify(parse(right), parse(find_box(conclusion) or conclusion)))


@dataclass(frozen=True)
class AccuracyChange(Change, Accuracy):
    """`accuracy_change`: `accuracy` less that of the reference run, problem by problem."""

    name: ClassVar[str] = "accuracy_change"


@dataclass(frozen=True)
class ExactAnswer(Answers):
    """`exact_answer`: what follows the last "answer:" on its line, word for word; whole numbers by value."""

    name: ClassVar[str] = "exact_answer"
    protocol: ClassVar[str] = "last-line"

    def judge(self, conclusion: str, answer: str) -> bool:
        """Return whether the conclusion's answer is the right one."""
        given, right = _normalise(find_answer(conclusion) or ""), _normalise(answer)
        return given == right != ""


@dataclass(frozen=True)
class ExactAnswerChange(Change, ExactAnswer):
    """`exact_answer_change`: `exact_answer` less that of the reference run, problem by problem."""

    name: ClassVar[str] = "exact_answer_change"


def find_conclusion(text: str) -> str:
    """Return what follows a text's thoughts: all of a text without any, nothing of one that ends in thought.

    >>> find_conclusion("<think>1 + 1</think> It is 2.")
    ' It is 2.'
    >>> find_conclusion("<think>1 + 1 may be 2")
    ''
    """
    _, ended, after = text.rpartition(THOUGHT_END)
    if ended:
        return after
    return "" if THOUGHT in text else text


def find_answer(text: str) -> str | None:
    """Return what follows the last "answer:" of a text on its line, None where there is none.

    >>> find_answer("so 3 + 4 = 7. Answer: 7.")
    '7.'
    """
    _, *after = re.split("answer:", text, flags=re.IGNORECASE)
    return after[-1].split("\n")[0].strip() if after else None


def find_box(text: str) -> str | None:
    r"""Return the last whole `\boxed{...}` of a text between dollar signs, None where there is none.

    >>> find_box(r"So \boxed{7}, no: \boxed{\frac{3}{4}}.")
    '$\\boxed{\\frac{3}{4}}$'
    """
    for start in reversed([found.start() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 0
        for place in re.finditer(r"\\.|[{}]", text[start + 1 :]):
            depth += {"{": 1, "}": -1}.get(place[0], 0)
            if depth == 0 and place[0] == "}":
                return f"${text[start : start + 1 + place.end()]}$"
    return None


def _normalise(answer: str) -> str:
    words = " ".join(answer.casefold().split()).rstrip(".,;! ")
    return str(int(words)) if re.fullmatch(r"[+-]?\d{1,1000}", words) else words
