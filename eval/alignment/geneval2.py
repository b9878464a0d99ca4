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
HOW_MANY = "How many"
"""Opening of the questions whose answer is a number; the answer to all others is yes."""
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ASK = "{question} Answer in one word."
SHOWS = 'Does this figure show "{prompt}"? Please answer Yes or No.'


@dataclass(frozen=True)
class GenEval2(SoftTifa):
    """`geneval2[<judge>]`: Soft-TIFA on GenEval2's questions, by a vision-language model.

    The probability of a right answer is the sum of those of the first tokens of its spellings.

    Attributes:
        judge: the model.
        unique: add a token once if two spellings begin with it. The authors' program adds it twice.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    unique: bool = False
    asks: ClassVar[str] = "vqa_list"
    part_names: ClassVar[tuple[str, ...]] = (*(f"atoms-{number}" for number in range(3, 11)), *SKILLS)

    @property
    def protocol(self) -> str:
        """The judge's name, and whether tokens are added once."""
        return self.judge.name + ("-unique" if self.unique else "")

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check that a prompt's metadata is a line of GenEval2."""
        super().check_meta(meta)
        parse_line(meta)

    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions of each image's prompt."""
        read_meta(images, "vqa_list", "GenEval2 line", "(vqa_list, skills, atom_count): use prompts=geneval2")
        return [parse_line(images.meta(index)) for index in images.indices]

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Read the judge."""
        judge = self.judge.load(device)

        def grade(pixels: NDArray[np.uint8], atoms: Sequence[Atom]) -> list[float]:
            found = judge.predict(pixels, [ASK.format(question=atom.question) for atom in atoms])
            spelled = [[judge.first_token(text) for text in list_spellings(atom)] for atom in atoms]
            tokens = [list(dict.fromkeys(one)) if self.unique else one for one in spelled]
            return [add_probabilities(*pair) for pair in zip(found, tokens, strict=True)]

        return grade, judge.weights


@dataclass(frozen=True)
class VqaScore(PromptScore):
    """`vqascore[<judge>]`: probability that the judge answers Yes when asked if the image shows the prompt.

    The question is that of the authors' program for Qwen models; it reads the first token of `Yes`.

    Attributes:
        judge: the model.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    name: ClassVar[str] = "vqascore"

    @property
    def protocol(self) -> str:
        """The judge's name."""
        return self.judge.name

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The mean probability."""
        return {f"vqascore[{self.judge.name}]": MetricSpec("higher")}

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Read the judge."""
        judge = self.judge.load(device)

        def score(pixels: NDArray[np.uint8], prompts: Sequence[str]) -> Tensor:
            texts = [SHOWS.format(prompt=prompt) for prompt in prompts]
            found = [judge.predict(image, [text])[0] for image, text in zip(pixels, texts, strict=True)]
            return torch.stack(found)[:, judge.first_token("Yes")]

        return score, judge.weights


def parse_line(meta: Mapping[str, Any]) -> Questions:
    """Read the questions of a line of geneval2_data.jsonl.

    Raises:
        ValueError: a key is missing or malformed.
    """
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
    """Return the spellings of a right answer: a number as word and digit, or yes; also after a space."""
    if not atom.question.startswith(HOW_MANY):
        spelled = ["Yes", "yes"]
    else:
        word = atom.answer
        digit = str(WORDS.index(word) + 1) if word in WORDS else "other"
        spelled = [word, word.capitalize(), digit]
    return [*spelled, *(f" {text}" for text in spelled)]


def add_probabilities(probabilities: Tensor, tokens: Sequence[int]) -> float:
    """Return the sum over tokens of probabilities float32 [vocabulary]; a token that comes twice counts twice."""
    return float(probabilities.double()[list(tokens)].sum())
