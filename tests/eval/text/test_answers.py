"""Answers and outputs are found behind thoughts, judged, and compared with the reference's problem by problem."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbench.eval.__main__ import main
from kvbench.eval.files.kinds import TEXTS
from kvbench.eval.files.texts import TextSet
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.intervals import change_interval, share_interval
from kvbench.eval.text.agreement import Agreement
from kvbench.eval.text.answers import Accuracy, AccuracyChange, Answers, ExactAnswer, ExactAnswerChange
from kvbench.eval.text.length import TextLength
from kvbench.eval.text.string_match import (
    StringMatchAll,
    StringMatchAllChange,
    StringMatchPart,
    StringMatchPartChange,
)
from kvbench.models.outputs import Text
from tests.support.image_sets import only, reason, write_samples

ANSWERS = ("7", "-12", "red")
"""Of three problems, two texts each."""
OURS = ("answer: 7", "answer: 8", "Answer: -12.", "no", "<think>answer: red", "answer: blue\nanswer: Red")
THEIRS = ("answer: 7", "answer: 07", "answer: 12", "answer: -12", "answer: red", "answer: green")
RIGHT = [1, 0, 1, 0, 0, 1], [1, 1, 0, 1, 1, 0]


def make(folder: Path, texts: Sequence[str], meta: Sequence[dict[str, object]] | None = None) -> TextSet:
    made = [Text(text, tokens=10 * index + 1, ended=index != 4) for index, text in enumerate(texts)]
    metas = [{"answer": ANSWERS[index // 2]} for index in range(len(texts))] if meta is None else meta
    records = [{**TEXTS.describe(text), "meta": one} for text, one in zip(made, metas, strict=True)]
    write_samples(folder, TEXTS, made, [f"problem {index // 2}" for index in range(len(texts))], records)
    return TextSet(folder)


FORMS = (
    *(r"\$18.90", r"\$32,\!348", r"-\$5", r"10\%", r"33\frac{1}{3}\%", r"12\text{ cm}^2", r"90^\circ", r"\frac34"),
    *(r"x^2 + 7x + 10", r"\pi", r"(-\infty, 3]", r"(2,12) \cup (12,102)", r"x \in [-2,7]", r"\{1, 2\}", r"\text{(E)}"),
    *(r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", "4343_6", r"\text{Evelyn}", "3, 5, 7", r"f^{-1}", "y = 2x + 3"),
)  # fmt: skip
"""Forms of answers in published sets of problems."""


@pytest.mark.parametrize("answer", FORMS)
def test_an_answer_in_a_box_is_right_against_itself(answer: str) -> None:
    assert Accuracy().grade(f"So it is \\boxed{{{answer}}}.", answer)
    assert not Accuracy().grade("So it is \\boxed{8191}.", answer)


def test_only_processor_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock of real time runs while it judges; at the end of the processor time a computation is given up."""
    from math_verify import grader, parser

    parse, verify, left = parser.parse, grader.verify, list[tuple[float, float]]()

    def note(judge: Callable[..., Any], *args: Any, **more: Any) -> Any:
        left.append((signal.getitimer(signal.ITIMER_PROF)[0], signal.getitimer(signal.ITIMER_REAL)[0]))
        return judge(*args, **more)

    monkeypatch.setattr(parser, "parse", partial(note, parse))
    monkeypatch.setattr(grader, "verify", partial(note, verify))
    assert Accuracy().grade(r"\boxed{\frac{2}{7}}", r"\frac{2}{7}")
    assert len(left) >= 3
    assert all(processor > 0 and real == 0 for processor, real in left)

    def end(*_: object, **__: object) -> bool:
        signal.raise_signal(signal.SIGPROF)
        return True

    monkeypatch.setattr(grader, "verify", end)
    assert not Accuracy().grade(r"\boxed{7}", "7")
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


@pytest.mark.parametrize(
    ("evaluator", "text", "answer", "right"),
    [
        (ExactAnswer(), "answer: 42", "42", True),
        (ExactAnswer(), "answer: 042", "42", True),
        (ExactAnswer(), "ANSWER:  3  5 7 .", "3 5 7", True),
        (ExactAnswer(), "answer: 1\nanswer: 2", "1", False),
        (ExactAnswer(), "answer: 1, no, answer: 2 \nand", "2", True),
        (ExactAnswer(), "answer: .", "", False),
        (ExactAnswer(), "answer: Blue!", "blue", True),
        (ExactAnswer(), "<think>\nanswer: 1\n</think>\n\nanswer: 2", "2", True),
        (ExactAnswer(), "answer: 1</think>it", "1", False),  # a template may open the thought
        (ExactAnswer(), "<think>a</think>answer: 1\n<think>c</think>d", "1", False),
        (ExactAnswer(), "<think>answer: 1", "1", False),
        (Accuracy(), "It is \\boxed{0.75}.", "\\frac{3}{4}", True),
        (Accuracy(), "<think>\\boxed{204}</think> So \\boxed{205}.", "204", False),
        (Accuracy(), "\\boxed{7} \\boxed{8}", "7", False),
        (Accuracy(), "\\boxed{8}, so \\boxed{7", "8", True),  # the last was cut
        (Accuracy(), "", "204", False),
        (Accuracy(), "\\boxed{(1,2)}", "1 < x < 2", True),  # the right answer goes first
        (Accuracy(), "\\boxed{1 < x < 2}", "(1,2)", False),
        (Accuracy(), r"\boxed{32348}", r"\$32,\!348", True),  # an escaped dollar is no delimiter
        (Accuracy(), r"It costs \$18.90.", "18.90", True),
        (Accuracy(), r"\boxed{\$18.91}", r"\$18.90", False),
    ],
)
def test_the_text_after_thoughts_is_judged(evaluator: Answers, text: str, answer: str, right: bool) -> None:
    if isinstance(evaluator, Accuracy):
        pytest.importorskip("math_verify")
    assert evaluator.grade(text, answer) == right


def test_a_share_of_right_answers_knows_its_problems(tmp_path: Path) -> None:
    result = only(ExactAnswer(), make(tmp_path / "ours", OURS))
    score, right = result.scores["exact_answer"], [float(one) for one in RIGHT[0]]
    assert result.samples["exact_answer"] == right
    expected = share_interval(right, [f"problem {index // 2}" for index in range(6)])
    assert (score.value, score.n, score.ci95) == (0.5, 6, (expected.low, expected.high))
    lengths = only(TextLength(), make(tmp_path / "again", OURS)).scores
    assert [lengths[name].value for name in ("generated_tokens", "truncated")] == [26, pytest.approx(1 / 6)]


def test_the_change_is_paired(tmp_path: Path) -> None:
    ours, theirs = make(tmp_path / "ours", OURS), make(tmp_path / "theirs", THEIRS)
    result = only(ExactAnswerChange(), ours, theirs)
    change = [a - b for a, b in zip(*RIGHT, strict=True)]
    score = result.scores["exact_answer_change"]
    expected = change_interval([float(one) for one in change], [f"problem {i // 2}" for i in range(6)])
    assert (score.value, score.ci95) == (pytest.approx(-1 / 6), (expected.low, expected.high))
    assert "it compares with a reference run" in reason(ExactAnswerChange(), "skipped", ours)
    for side in (ours, theirs):
        only(ExactAnswer(), side).save(side.folder / "metrics")
    [found] = compare_runs(ours.folder, theirs.folder).values()
    assert (found.value, found.ci95) == (score.value, score.ci95)


def test_prompts_without_answers_are_skipped_and_some_without_are_wrong(tmp_path: Path) -> None:
    none, some = (make(tmp_path / str(n), OURS, [{"answer": 1}] * n + [{}] * (6 - n)) for n in (0, 1))
    assert "the prompts have no answers (" in reason(ExactAnswer(), "skipped", none)
    assert "sample 1 has no answer" in reason(ExactAnswer(), "failed", some)


def test_accuracy_is_that_of_a_run_and_of_its_reference(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    ours, theirs = make(tmp_path / "ours", OURS), make(tmp_path / "theirs", THEIRS)
    assert only(Accuracy(), ours).samples["accuracy"] == [1, 0, 1, 0, 0, 0]
    assert only(AccuracyChange(), ours, theirs).samples["accuracy_change"] == [0, -1, 1, -1, 0, 0]


def test_a_run_of_texts_is_scored_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = make(tmp_path / "ours", OURS), make(tmp_path / "theirs", THEIRS)
    assert main(["exact_answer", str(ours.folder), str(theirs.folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "exact_answer ↑ 0.500" in out
    assert "exact_answer_change ↑ -0.167" in out
    assert "generated_tokens ↓ 26.0 tokens" in out
    assert main(["psnr", str(ours.folder), str(theirs.folder)]) == 1
    assert "it scores images, and these are texts" in capsys.readouterr().out


def test_agreement_is_the_share_before_the_first_difference(tmp_path: Path) -> None:
    ours, theirs = (
        make(tmp_path / "a", OURS),
        make(tmp_path / "b", (*THEIRS[:3], *OURS[3:5], OURS[5] + " or")),
    )
    result = only(Agreement(), ours, theirs)
    for index, found in enumerate(result.samples["agreement"]):
        texts = [one.text(index) for one in (ours, theirs)]
        equal = [count for count in range(100) if texts[0][:count] == texts[1][:count]]
        assert found == min(max(equal), *map(len, texts)) / max(map(len, texts))
    scores = {name: score.value for name, score in result.scores.items()}
    assert scores == {"agreement": pytest.approx(sum(result.samples["agreement"]) / 6), "same_text": 0.5}


CASES = [
    # text, correct outputs, share of them, any of them, share under the full cache's text
    ("It was in Oslo, then in BERGEN.", ["oslo", "Bergen", "Bodø", "Moss"], 0.5, 1, 1.0),
    ("41730 or 4173", ["4173", "0 or", "5"], 2 / 3, 1, 1.0),  # a part of a longer number counts
    ("Osl o", ["Oslo"], 0, 0, 1.0),
    ("\x07 red\tblue \n", ["red\nblue"], 1, 1, 1.0),  # control characters are line breaks
    ("", ["a", "b"], 0, 0, 1.0),
    ("<think>Rome</think> Paris", ["Rome"], 1, 1, 1.0),  # thoughts count too
]


def test_shares_are_those_counted_by_hand(tmp_path: Path) -> None:
    meta = [{"outputs": outputs} for _, outputs, *_ in CASES]
    ours = make(tmp_path / "ours", [text for text, *_ in CASES], meta)
    full = make(tmp_path / "full", [" ".join(outputs) for _, outputs, *_ in CASES], meta)
    both = ((StringMatchAll(), StringMatchAllChange(), 2), (StringMatchPart(), StringMatchPartChange(), 3))
    for evaluator, change, column in both:
        expected = [case[column] for case in CASES]
        result = only(evaluator, ours)
        assert result.samples[evaluator.name] == pytest.approx(expected)
        assert result.scores[evaluator.name].value == pytest.approx(sum(expected) / len(CASES))
        changed = only(change, ours, full).samples
        assert changed[change.name] == pytest.approx(
            [value - case[4] for value, case in zip(expected, CASES, strict=True)]
        )


@pytest.mark.parametrize("outputs", [[], "Oslo", ["Oslo", ""], [7]])
def test_outputs_that_are_no_texts_are_refused(outputs: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`outputs` must be a list of non-empty strings"):
        StringMatchAll().check_meta({"outputs": outputs})
    assert "prompts=needles" in reason(StringMatchPart(), "skipped", make(tmp_path, ["a"], [{}]))
