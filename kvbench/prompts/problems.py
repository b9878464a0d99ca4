"""Problems with answers: AIME, HMMT, MATH-500, GSM8K, U-MATH, GPQA. Their texts are not included."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.eval.files.prompt_lines import parse_lines
from kvbench.eval.files.weights import Weight
from kvbench.prompts.sets import PromptEntry, PromptSet, read_file

QUESTION_KEYS = ("problem", "question", "problem_statement", "Problem")
ANSWER_KEYS = ("answer", "golden_answer", "Answer")
CHOICE_KEYS = ("Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
OPTIONAL_KEYS = {key: key for key in ("id", "unique_id", "uuid", "subject", "level", "year")}
"""Optional fields of a problem that become metadata, and their names there."""


@dataclass(frozen=True)
class Problems(PromptSet):
    """Base class of problem sets, JSON lines with question and answer; `per_prompt` texts are generated per problem.

    Attributes:
        instruction: text after every problem, on a separate line; None adds nothing.
        frame: template of the whole prompt with {question} in place of the problem; None for problem and `instruction`.
    """

    instruction: str | None = None
    frame: str | None = None

    fields: ClassVar[str] = f"{QUESTION_KEYS[0]} and {ANSWER_KEYS[0]}"
    optional: ClassVar[Mapping[str, str]] = OPTIONAL_KEYS
    without: ClassVar[str] = ""
    """Field of the lines that are left out if it is true; empty leaves out none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frame is not None and "{question}" not in self.frame:
            raise ConfigError(f"prompts.frame={self.frame[:40]!r}: must contain {{question}}")

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the problems, each with its `answer`."""
        lines = read_file(path, parse_lines)
        entries = [self._read_line(path, number, line) for number, line, _ in lines]
        return [entry for entry in entries if entry is not None]

    def _read_line(self, path: Path, number: int, text: str) -> PromptEntry | None:
        try:
            line = parse_json(text)
            question, answer = self.read_problem(line)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"prompts.path={path}: line {number} is not a problem ({error}); needed: JSON with {self.fields}. "
                f"{self.remedy()}"
            ) from None
        if line.get(self.without):
            return None
        meta = {name: line[key] for key, name in self.optional.items() if key in line}
        text = question if self.instruction is None else f"{question}\n{self.instruction}"
        if self.frame is not None:
            text = self.frame.replace("{question}", question)
        return text, {**meta, "answer": answer}

    def read_problem(self, line: Mapping[str, object]) -> tuple[str, str]:
        """Return a line's problem and its answer; raise ValueError if one is missing."""
        question, answer = (_find(line, names) for names in (QUESTION_KEYS, ANSWER_KEYS))
        return question.strip(), self.read_answer(answer).strip()

    def read_answer(self, text: str) -> str:
        """Return the answer in a line's answer field."""
        return text


def _find(line: Mapping[str, object], names: tuple[str, ...]) -> str:
    """Return the string or number of the first of some fields that a line has; raise ValueError if there is none."""
    if not isinstance(line, Mapping):
        raise ValueError("not an object")
    value = next((line[name] for name in names if name in line), None)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"no {names[0]}")
    return str(value)


def _name_dataset(repo: str, split: str, file: str) -> str:
    """Return instructions for exporting a dataset of the Hub as JSON lines."""
    return (
        f"{file}, which `datasets` writes: load_dataset({repo!r}, split={split!r}).to_json({file!r}), "
        f"https://huggingface.co/datasets/{repo}"
    )


@dataclass(frozen=True)
class Aime24(Problems):
    """The 30 problems of the American Invitational Mathematics Examination 2024, I and II; answers are 0 to 999."""

    source: ClassVar[str] = _name_dataset("HuggingFaceH4/aime_2024", "train", "aime24.jsonl")


@dataclass(frozen=True)
class Aime25(Problems):
    """The 30 problems of the American Invitational Mathematics Examination 2025, I and II; answers are 0 to 999."""

    source: ClassVar[str] = _name_dataset("math-ai/aime25", "test", "aime25.jsonl")


@dataclass(frozen=True)
class Aime26(Problems):
    """The 30 problems of the American Invitational Mathematics Examination 2026, I and II; answers are 0 to 999."""

    source: ClassVar[str] = _name_dataset("MathArena/aime_2026", "train", "aime26.jsonl")


@dataclass(frozen=True)
class Hmmt25(Problems):
    """The 30 problems of the Harvard-MIT Mathematics Tournament of February 2025 in MathArena (arXiv:2505.23281)."""

    source: ClassVar[str] = _name_dataset("MathArena/hmmt_feb_2025", "train", "hmmt25.jsonl")


@dataclass(frozen=True)
class Math500(Problems):
    """500 problems of MATH (Hendrycks et al., arXiv:2103.03874) that Lightman et al. chose (arXiv:2305.20050)."""

    source: ClassVar[str] = _name_dataset("HuggingFaceH4/MATH-500", "test", "math500.jsonl")


@dataclass(frozen=True)
class Gsm8k(Problems):
    """The 1319 test problems of GSM8K (Cobbe et al., arXiv:2110.14168); answers are whole numbers."""

    files: ClassVar[tuple[Weight, ...]] = (
        Weight(
            "gsm8k.jsonl",
            url="https://raw.githubusercontent.com/openai/grade-school-math/"
            "b52325ad96ea38979fdc222e881ff5d105f95295/grade_school_math/data/test.jsonl",
        ),
    )

    def read_answer(self, text: str) -> str:
        """Return the number after the worked solution, without commas."""
        return text.rpartition("####")[2].strip().replace(",", "")


@dataclass(frozen=True)
class UMath(Problems):
    """U-MATH (Chernyshev et al., arXiv:2412.03205) without problems that have an image.

    Answers are sentences. The authors judge them by a language model; rules find fewer correct answers.
    """

    source: ClassVar[str] = _name_dataset("toloka/u-math", "test", "umath.jsonl")
    without: ClassVar[str] = "has_image"


@dataclass(frozen=True)
class GpqaDiamond(Problems):
    """The 198 questions of GPQA's Diamond set (Rein et al., arXiv:2311.12022), each with four choices.

    The choices follow the question as lines `A) ...` to `D) ...`, and the answer is the letter of the correct choice.
    Their random order depends on seed and text of the question alone, so that it is the same in any subset.

    Attributes:
        choice_seed: seed of the order of the choices.
    """

    choice_seed: int = 0

    source: ClassVar[str] = (
        "gpqa_diamond.jsonl, which `datasets` writes after its terms are accepted: load_dataset('Idavidrein/gpqa', "
        "'gpqa_diamond', split='train').to_json('gpqa_diamond.jsonl'), https://huggingface.co/datasets/Idavidrein/gpqa"
    )
    fields: ClassVar[str] = "Question, Correct Answer and Incorrect Answer 1 to 3"
    optional: ClassVar[Mapping[str, str]] = {
        "Record ID": "id",
        "High-level domain": "subject",
        "Subdomain": "subdomain",
    }

    def read_problem(self, line: Mapping[str, object]) -> tuple[str, str]:
        """Return the question with its choices, and the letter of the correct choice.

        Raises:
            ValueError: a field is missing, or two choices are equal.
        """
        question, *choices = (_find(line, (key,)).strip() for key in CHOICE_KEYS)
        if len({*choices}) < len(choices):
            raise ValueError("two choices are equal")
        order = random.Random(f"{self.choice_seed}:{question}").sample(choices, len(choices))
        lettered = list(zip("ABCD", order, strict=True))
        answer = next(letter for letter, choice in lettered if choice == choices[0])
        return "\n".join((question, "", *(f"{letter}) {choice}" for letter, choice in lettered))), answer
