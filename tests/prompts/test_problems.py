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

LINES: dict[type[Problems], list[dict[str, object]]] = {
    Aime24: [{"id": 60, "problem": "Find $x$.\n", "solution": "...", "answer": "204", "year": "2024"}],
    Aime25: [{"problem": "Find $b$.", "answer": 70, "id": "0"}],
    Aime26: [{"problem_idx": 1, "answer": 277, "problem": "Find $m + n$."}],
    Hmmt25: [
        {"problem_idx": 2, "problem": "Compute.", "answer": "\\sqrt{5}", "problem_type": ["Number Theory"]}
    ],
    Math500: [{"problem": "Convert.", "answer": "\\frac{3}{4}", "subject": "Algebra", "level": 2}],
    Gsm8k: [{"question": "How many?", "answer": "She has 2 + 1 = <<2+1=3>>3.\n#### 1,003"}],
    UMath: [
        {
            "uuid": "a", "has_image": False, "image": None, "problem_statement": "Solve.",
            "golden_answer": "$2$",
        },
        {"uuid": "b", "has_image": True, "image": "data", "problem_statement": "See.", "golden_answer": "1"},
    ],
}  # fmt: skip
ANSWERS = {
    Aime24: "204", Aime25: "70", Aime26: "277", Hmmt25: "\\sqrt{5}", Math500: "\\frac{3}{4}", Gsm8k: "1003",
    UMath: "$2$",
}  # fmt: skip


def write(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
def test_problems_come_with_their_answers(kind: type[Problems], tmp_path: Path) -> None:
    path = write(tmp_path / "problems.jsonl", LINES[kind])
    [prompt] = kind(path=path).load()
    names = ("problem", "question", "problem_statement")
    question = next(str(value) for name, value in LINES[kind][0].items() if name in names)
    assert prompt.text == question.strip()
    assert prompt.meta["answer"] == ANSWERS[kind]
    assert not {"solution", "image"} & set(prompt.meta)
    [asked] = kind(path=path, instruction="Box it.").load()
    assert asked.text == f"{question.strip()}\nBox it."
    [framed] = kind(path=path, instruction="Box it.", frame="Problem: {question} In \\boxed{}:").load()
    assert framed.text == f"Problem: {question.strip()} In \\boxed{{}}:"


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


def test_a_problem_is_asked_several_times(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"problem": f"p{n}", "answer": n} for n in range(4)])
    prompts = Math500(path=path, per_prompt=3, count=2).load()
    assert [prompt.text for prompt in prompts] == ["p0"] * 3 + ["p2"] * 3
    assert [prompt.index for prompt in prompts] == list(range(6))
    assert [prompt.meta["answer"] for prompt in prompts] == ["0"] * 3 + ["2"] * 3


@pytest.mark.parametrize(
    "name", ["aime24", "aime25", "aime26", "hmmt25", "gpqa_diamond", "math500", "umath", "gsm8k"]
)
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
