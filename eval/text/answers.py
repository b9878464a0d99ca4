"""Accuracy of answers by math-verify or exact match, of a run and relative to the reference run."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import FrameType
from typing import Any, ClassVar

from kvbench.eval.files.texts import TextSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result, read_meta
from kvbench.eval.protocol.intervals import Interval, change_interval, share_interval
from kvbench.eval.protocol.scores import MetricSpec, mean_score

ANSWER = "answer"
"""Key of the correct answer in a prompt's metadata."""
LIMIT_S = 5
"""Limit of math-verify's processor time for each text and for each comparison of two expressions, in seconds."""
THOUGHT, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Answers(Evaluator):
    """Mean grade of texts, or its difference to the reference run by problem; texts of one problem are a cluster.

    Attributes:
        correct: noun for the metadata `required_meta`, and prompts that have it, for errors.
    """

    name: ClassVar[str]
    protocol: ClassVar[str]
    correct: ClassVar[tuple[str, str]] = ("answer", "(prompts=aime24, math500, gsm8k and others do)")
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)
    reads: ClassVar[str] = TextSet.kind
    required_meta: ClassVar[str] = ANSWER
    meta_keys: ClassVar[tuple[str, ...]] = (ANSWER,)

    @property
    def metric(self) -> str:
        """Name of the share, or of its change."""
        return self.name

    def grade(self, text: str, correct: Any) -> float:
        """Return the grade of a text, from 0 to 1, by the metadata `required_meta` of its prompt."""
        raise NotImplementedError

    def run(self, texts: TextSet, reference: TextSet | None, device: str) -> Result:
        """Return the grade of each text and their mean, or the changes of both from the reference."""
        values = self._grade_all(texts)
        find_interval: Callable[..., Interval | None] = share_interval
        if reference is not None:
            values = [ours - theirs for ours, theirs in zip(values, self._grade_all(reference), strict=True)]
            find_interval = change_interval
        scores = {self.name: mean_score(values, texts.clusters, find_interval)}
        return make_result(self, scores, {"index": texts.indices, self.name: values})

    def _grade_all(self, texts: TextSet) -> list[float]:
        pairs = zip(texts.read(self.name), read_meta(texts, self.required_meta, *self.correct), strict=True)
        return [self.grade(text, correct) for (_, text), correct in pairs]


class AnswerChange(Answers):
    """Mean difference to the reference run: correct answers gained minus lost, by problem."""

    revision: ClassVar[int] = 2  # since 2, every interval has Agresti and Min's variance
    needs_reference: ClassVar[bool] = True


@dataclass(frozen=True)
class Accuracy(Answers):
    r"""`accuracy`: share of answers that math-verify finds correct; a text's last `\boxed{}` counts if there is one.

    Only the text after the thoughts counts (`find_conclusion`): a text truncated inside them has no answer.
    """

    name: ClassVar[str] = "accuracy"
    protocol: ClassVar[str] = "math-verify-last-box"
    revision: ClassVar[int] = 1
    packages: ClassVar[tuple[str, ...]] = ("math_verify",)

    def grade(self, text: str, correct: object) -> float:
        """Return 1 if math-verify finds the answer `correct` in the conclusion, else 0."""
        # Escaped dollar signs are no delimiters of LaTeX.
        right, conclusion = (part.replace(r"\$", "") for part in (str(correct), find_conclusion(text)))
        # math-verify reads LaTeX only between signs.
        right = right if "$" in right or "\\boxed" in right else f"${right}$"
        # math-verify joins adjacent boxes, so a corrected answer would be judged with the first answer.
        return float(_are_equal(right, find_box(conclusion) or conclusion))


@dataclass(frozen=True)
class AccuracyChange(AnswerChange, Accuracy):
    """`accuracy_change`: difference of `accuracy` to the reference run, by problem."""

    name: ClassVar[str] = "accuracy_change"


@dataclass(frozen=True)
class ExactAnswer(Answers):
    """`exact_answer`: share of texts whose rest of a line after the last "answer:" matches; integers match by value.

    Only the text after the thoughts counts, as for `Accuracy`.
    """

    name: ClassVar[str] = "exact_answer"
    protocol: ClassVar[str] = "last-line"

    def grade(self, text: str, correct: object) -> float:
        """Return 1 if the conclusion's answer is `correct`, else 0."""
        given = _normalise(find_answer(find_conclusion(text)) or "")
        return float(given == _normalise(str(correct)) != "")


@dataclass(frozen=True)
class ExactAnswerChange(AnswerChange, ExactAnswer):
    """`exact_answer_change`: difference of `exact_answer` to the reference run, by problem."""

    name: ClassVar[str] = "exact_answer_change"


def find_conclusion(text: str) -> str:
    """Return the text after the thoughts: the whole text without thoughts, "" if they do not end.

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
    """Return the rest of the line after the last "answer:" of a text, or None.

    >>> find_answer("so 3 + 4 = 7. Answer: 7.")
    '7.'
    """
    _, *after = re.split("answer:", text, flags=re.IGNORECASE)
    return after[-1].split("\n")[0].strip() if after else None


def find_box(text: str) -> str | None:
    r"""Return the last complete `\boxed{...}` of a text between dollar signs, or None.

    >>> find_box(r"So \boxed{7}, no: \boxed{\frac{3}{4}}.")
    '$\\boxed{\\frac{3}{4}}$'
    """
    for start in reversed([match.start() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 0
        for mark in re.finditer(r"\\.|[{}]", text[start + 1 :]):
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if depth == 0 and mark[0] == "}":
                return f"${text[start : start + 1 + mark.end()]}$"
    return None


def _are_equal(right: str, given: str) -> bool:
    """Return whether math-verify finds two texts equal, within limits of processor time.

    Its own limits count real time, so that a process that was stopped for a while would judge a correct answer wrong.
    """
    from math_verify import grader, parser
    from math_verify.errors import TimeoutException

    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True  # no warning about its disabled limits
    late = TimeoutException("too much processor time")
    try:
        parsed = []
        for text in (right, given):
            with limit_processor_time(LIMIT_S, late):
                parsed.append(parser.parse(text, parsing_timeout=None))
        for one, other in product(*parsed):
            with limit_processor_time(LIMIT_S, late):
                if grader.verify([one], [other], timeout_seconds=None):
                    return True
    except TimeoutException:  # reached between two calls; within a call, math-verify catches it
        pass
    return False


@contextmanager
def limit_processor_time(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block once this process has used `seconds` of processor time.

    Python handles signals in the main thread only; in other threads a ValueError is raised.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
        raise error

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _normalise(answer: str) -> str:
    words = " ".join(answer.casefold().split()).rstrip(".,;! ")
    return str(int(words)) if re.fullmatch(r"[+-]?\d{1,1000}", words) else words
