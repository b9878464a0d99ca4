"""Problems with an answer: AIME, MATH-500, GSM8K, U-MATH. Their texts are not shipped here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.eval.files.weights import Weight
from kvbench.prompts.sets import Entry, PromptSet, read_file

QUESTIONS = ("problem", "question", "problem_statement", "Problem")
ANSWERS = ("answer", "golden_answer", "Answer")
KEPT = ("id", "unique_id", "uuid", "subject", "level", "year")
"""Optional fields of a problem."""


@dataclass(frozen=True)
class Problems(PromptSet):
    """A set of problems, JSON lines with a text and an answer each; `per_prompt` texts are written of each problem.

    Attributes:
        instruction: what is said after every problem, on a line of its own; null says nothing.
        frame: the whole prompt, with {question} where the problem stands, in place of problem and instruction.
    """

    instruction: str | None = None
    frame: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frame is not None and "{question}" not in self.frame:
            raise ConfigError(f"prompts.frame={self.frame[:40]!r}: must contain {{question}}")

    def entries(self, place: Path) -> list[Entry]:
        """Read the problems, each with its `answer`."""
        lines = read_file(place, lambda text: [line for line in text.split("\n") if line.strip()])
        read = [self._read_line(place, number, line) for number, line in enumerate(lines, 1)]
        return [entry for entry in read if entry is not None]

    def _read_line(self, place: Path, number: int, text: str) -> Entry | None:
        try:
            line = parse_json(text)
            question, answer = (_find(line, names) for names in (QUESTIONS, ANSWERS))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"prompts.path={place}: line {number} is no problem ({error}); needed: JSON with {QUESTIONS[0]} and "
                f"{ANSWERS[0]}. {self.remedy()}"
            ) from None
        if not self.takes(line):
            return None
        kept = {name: line[name] for name in KEPT if name in line}
        asked = question.strip() if self.instruction is None else f"{question.strip()}\n{self.instruction}"
        if self.frame is not None:
            asked = self.frame.replace("{question}", question.strip())
        return asked, {**kept, "answer": self.read_answer(answer).strip()}

    def takes(self, line: Mapping[str, object]) -> bool:
        """Return whether a line's problem is one of the set."""
        return True

    def read_answer(self, text: str) -> str:
        """Return the answer out of what a line calls so."""
        return text


def _find(line: Mapping[str, object], names: tuple[str, ...]) -> str:
    """Return the text or number under the first of some names that a line has.

    Raises:
        ValueError: it has none of them, or something else there.
    """
    if not isinstance(line, Mapping):
        raise ValueError("not an object")
    found = next((line[name] for name in names if name in line), None)
    if not isinstance(found, str | int | float) or isinstance(found, bool):
        raise ValueError(f"no {names[0]}")
    return str(found)


def _name_dataset(repo: str, split: str, file: str) -> str:
    """Return how to get a set of the Hub as JSON lines."""
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
        """Return the number behind the solution, without commas."""
        return text.rpartition("####")[2].strip().replace(",", "")


@dataclass(frozen=True)
class UMath(Problems):
    """U-MATH (Chernyshev et al., arXiv:2412.03205) without the problems that show an image.

    Its answers are sentences that its authors let a language model compare; by rules fewer right ones are found.
    """

    source: ClassVar[str] = _name_dataset("toloka/u-math", "test", "umath.jsonl")

    def takes(self, line: Mapping[str, object]) -> bool:
        """Return whether a problem is text alone."""
        return not line.get("has_image")
