"""GenEval2 (Kamath et al., arXiv:2512.16853) and VQAScore (Lin et al., arXiv:2404.01291) by a vision-language model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.eval.alignment.judge import VlmJudge
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import read_meta
from kvbench.eval.protocol.scores import MetricSpec

KEYS = ("vqa_list", "skills", "atom_count")
SKILLS = ("object", "count", "attribute", "position", "verb")
COUNT_OPENING = "How many"
"""Opening of the questions with a number as answer; all others have the answer yes."""
NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORD_QUESTION = "{question} Answer in one word."
SHOWS_QUESTION = 'Does this figure show "{prompt}"? Please answer Yes or No.'


@dataclass(frozen=True)
class GenEval2(SoftTifa):
    """`geneval2[<judge>]`: Soft-TIFA on GenEval2's questions by a vision-language model.

    The probability of an answer is the sum over the first tokens of its spellings.

    Attributes:
        judge: the model.
        unique: count a token once if several spellings begin with it; the authors' program counts it for each.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    unique: bool = False
    required_meta: ClassVar[str] = "vqa_list"
    meta_keys: ClassVar[tuple[str, ...]] = KEYS
    part_names: ClassVar[tuple[str, ...]] = (*(f"atoms-{number}" for number in range(3, 11)), *SKILLS)

    @property
    def protocol(self) -> str:
        """Name of the judge, with a suffix if tokens count once."""
        return self.judge.name + ("-unique" if self.unique else "")

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check that a prompt's metadata is a line of GenEval2."""
        super().check_meta(meta)
        parse_line(meta)

    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions for each image's prompt."""
        read_meta(images, "vqa_list", "GenEval2 line", "(vqa_list, skills, atom_count): use prompts=geneval2")
        return [parse_line(images.meta(index)) for index in images.indices]

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Load the judge."""
        judge = self.judge.load(device)

        def grade(pixels: NDArray[np.uint8], atoms: Sequence[Atom]) -> list[float]:
            rows = judge.predict(pixels, [WORD_QUESTION.format(question=atom.question) for atom in atoms])
            tokens = [[judge.first_token(text) for text in list_spellings(atom)] for atom in atoms]
            used = [list(dict.fromkeys(one)) if self.unique else one for one in tokens]
            return [add_probabilities(*pair) for pair in zip(rows, used, strict=True)]

        return grade, judge.weights


@dataclass(frozen=True)
class VqaScore(PromptScore):
    """`vqascore[<judge>]`: probability that the judge answers Yes to the question whether the image shows the prompt.

    Question and answer token (the first token of `Yes`) are as in the authors' program for Qwen models.

    Attributes:
        judge: the model.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    name: ClassVar[str] = "vqascore"
    revision: ClassVar[int] = 1

    @property
    def protocol(self) -> str:
        """Name of the judge."""
        return self.judge.name

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specification of the mean probability."""
        return {f"vqascore[{self.judge.name}]": MetricSpec("higher")}

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load the judge."""
        judge = self.judge.load(device)

        def score(pixels: NDArray[np.uint8], prompts: Sequence[str]) -> Tensor:
            texts = [SHOWS_QUESTION.format(prompt=prompt) for prompt in prompts]
            rows = [judge.predict(image, [text])[0] for image, text in zip(pixels, texts, strict=True)]
            return torch.stack(rows)[:, judge.first_token("Yes")]

        return score, judge.weights


def parse_line(meta: Mapping[str, Any]) -> Questions:
    """Read the questions of a line of geneval2_data.jsonl; a ValueError if a key is missing or malformed."""
    try:
        pairs = zip(meta["vqa_list"], meta["skills"], strict=True)
        atoms = tuple(Atom(str(question), str(answer), str(skill)) for (question, answer), skill in pairs)
        questions = Questions(atoms, int(meta["atom_count"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"not a GenEval2 line ({type(error).__name__} {error}); needed: {', '.join(KEYS)}"
        ) from None
    if not atoms or not {atom.skill for atom in atoms} <= set(SKILLS):
        raise ValueError(f"not a GenEval2 line: questions with skills of {', '.join(SKILLS)} are needed")
    return questions


def list_spellings(atom: Atom) -> list[str]:
    """Return the spellings of a correct answer: a number as word and digit, or yes; also after a space."""
    if not atom.question.startswith(COUNT_OPENING):
        spellings = ["Yes", "yes"]
    else:
        word = atom.answer
        digit = str(NUMBER_WORDS.index(word) + 1) if word in NUMBER_WORDS else "other"
        spellings = [word, word.capitalize(), digit]
    return [*spellings, *(f" {text}" for text in spellings)]


def add_probabilities(probabilities: Tensor, tokens: Sequence[int]) -> float:
    """Return the sum of probabilities float32 [vocabulary] over tokens; repeated tokens count repeatedly."""
    return float(probabilities.double()[list(tokens)].sum())
