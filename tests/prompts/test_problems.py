"""Problems with answers: what is read of the published files' lines, and one clear error for each bad file."""

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate

from kvbench.core.config import ConfigError
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


@pytest.mark.parametrize("name", ["gpqa_diamond", "gsm8k"])
def test_a_missing_file_says_its_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = instantiate(composed(f"prompts={name}").prompts)
    asked = "the letter of the correct choice" if name == "gpqa_diamond" else "your final answer"
    assert source.instruction == f"Please reason step by step, and put {asked} within \\boxed{{}}."
    with pytest.raises(ConfigError) as error:
        source.load()
    message = str(error.value)
    assert message.startswith("prompts.path=null: ")
    assert "set prompts.path to it" in message
    assert ("set prompts.download=true" in message) == (name == "gsm8k")
    assert ("https://huggingface.co/datasets/" in message) == (name != "gsm8k")
