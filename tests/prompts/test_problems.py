"""Problems with answers: what is read of the published files' lines, and sets that are generated."""

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate

from kvbench.prompts.math_tiny import MathTiny, NotesTiny
from kvbench.prompts.problems import (
    Aime24,
    Aime25,
    Aime26,
    GpqaDiamond,
    Gsm8k,
    Hmmt25,
    Math500,
    Problems,
    UMath,
)
from tests.puzzles.test_walks import follow
from tests.support.small_models import composed

pytestmark = pytest.mark.usefixtures("offline")

LINES: dict[type[Problems], tuple[dict[str, object], str]] = {
    Aime24: ({"id": 60, "problem": "Find $x$.\n", "solution": "...", "answer": "204", "year": "2024"}, "204"),
    Aime25: ({"problem": "Find $b$.", "answer": 70, "id": "0"}, "70"),
    Aime26: ({"problem_idx": 1, "answer": 277, "problem": "Find $m + n$."}, "277"),
    Hmmt25: ({"problem_idx": 2, "problem": "Compute.", "answer": "\\sqrt{5}", "problem_type": []}, "\\sqrt{5}"),
    Math500: ({"problem": "Convert.", "answer": "\\frac{3}{4}", "level": 2}, "\\frac{3}{4}"),
    Gsm8k: ({"question": "How many?", "answer": "She has 2 + 1 = <<2+1=3>>3.\n#### 1,003"}, "1003"),
    UMath: ({"uuid": "a", "has_image": False, "problem_statement": "Solve.", "golden_answer": "$2$"}, "$2$"),
}  # fmt: skip
"""A line of each set, and its answer."""
SEEN = {"uuid": "b", "has_image": True, "image": "data", "problem_statement": "See.", "golden_answer": "1"}
"""A line of U-MATH that needs a picture."""


def write(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
def test_problems_come_with_their_answers(kind: type[Problems], tmp_path: Path) -> None:
    line, answer = LINES[kind]
    path = write(tmp_path / "problems.jsonl", [line, *[SEEN] * (kind is UMath)])
    [prompt] = kind(path=path).load()
    names = ("problem", "question", "problem_statement")
    question = next(str(value).strip() for name, value in line.items() if name in names)
    assert (prompt.text, prompt.meta["answer"]) == (question, answer)
    assert not {"solution", "image"} & set(prompt.meta)
    [asked] = kind(path=path, instruction="Box it.").load()
    assert asked.text == f"{question}\nBox it."
    [framed] = kind(path=path, instruction="Box it.", frame="Problem: {question} In \\boxed{}:").load()
    assert framed.text == f"Problem: {question} In \\boxed{{}}:"


def gpqa(number: int, **more: object) -> dict[str, object]:
    wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
    return {"Question": f"Which {number}?\n", "Correct Answer": " right\n", **wrong, "Record ID": "r", **more}


def test_choices_are_lettered_in_an_order_of_the_question(tmp_path: Path) -> None:
    lines = [gpqa(number) for number in range(40)]
    prompts = GpqaDiamond(path=write(tmp_path / "all.jsonl", lines), instruction="Box the letter.").load()
    for number, prompt in enumerate(prompts):
        question, blank, *choices, asked = prompt.text.split("\n")
        assert (question, blank, asked) == (f"Which {number}?", "", "Box the letter.")
        assert [choice[:3] for choice in choices] == ["A) ", "B) ", "C) ", "D) "]
        assert {choice[3:] for choice in choices} == {"right", "wrong 1", "wrong 2", "wrong 3"}
        assert choices["ABCD".index(str(prompt.meta["answer"]))][3:] == "right"
        assert prompt.meta["id"] == "r"
    letters = [str(prompt.meta["answer"]) for prompt in prompts]
    assert all(4 <= letters.count(letter) <= 16 for letter in "ABCD")
    path = write(tmp_path / "few.jsonl", lines[30:])
    few = GpqaDiamond(path=path, instruction="Box the letter.").load()
    assert [prompt.text for prompt in few] == [prompt.text for prompt in prompts[30:]]
    assert [prompt.meta["answer"] for prompt in GpqaDiamond(path=path, choice_seed=1).load()] != letters[30:]


def test_answers_are_asked_for_in_a_box() -> None:
    for name, asked in (("gpqa_diamond", "the letter of the correct choice"), ("gsm8k", "your final answer")):
        source = instantiate(composed(f"prompts={name}").prompts)
        assert source.instruction == f"Please reason step by step, and put {asked} within \\boxed{{}}."


def test_problems_carry_their_answers_and_are_equally_long() -> None:
    problems = MathTiny(count=40, rooms=8).load()
    assert [problem.index for problem in problems] == list(range(40))
    assert len({problem.text for problem in problems}) == 40
    for problem in problems:
        assert problem.meta["answer"] == follow(problem.text)
        assert len(problem.text.split("\n")[0].split()) == 1 + 2 * 16
        assert 170 <= int(str(problem.meta["moves"])) <= 330


def test_problems_of_notes_ask_for_four_of_them() -> None:
    problems = NotesTiny(count=20).load()
    assert len({problem.text for problem in problems}) == 20
    for problem in problems:
        assert problem.meta["answer"] == follow(problem.text)
        assert len(str(problem.meta["answer"]).split()) == 8
        assert len(problem.text.split()) == 47


def test_sets_begin_alike_repeat_problems_and_are_calibrated_on_others() -> None:
    few, more, seeded = MathTiny(count=5), MathTiny(count=9, per_prompt=2).load(), MathTiny(count=5, seed=1)
    assert [problem.text for problem in more[:10:2]] == [problem.text for problem in few.load()]
    assert [problem.text for problem in more[::2]] == [problem.text for problem in more[1::2]]
    assert [problem.meta["prompt_index"] for problem in more] == [number // 2 for number in range(18)]
    others = few.load_others(4, 3)
    assert [problem.index for problem in others] == [0, 1, 2, 3]
    known = {problem.text for problem in more}
    assert not {problem.text for problem in (*seeded.load(), *others)} & known
