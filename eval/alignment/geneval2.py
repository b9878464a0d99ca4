"""GenEval2 (Kamath et al., arXiv:2512.16853) and VQAScore (Lin et al., arXiv:2404.01291) by a vision-language model."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.eval.alignment.judge import JudgeModel, VlmJudge
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.networks import Pixels
from kvbench.eval.protocol.base import read_meta
from kvbench.eval.protocol.scores import MetricSpec

KEYS = ("vqa_list", "skills", "atom_count")
SKILLS = ("object", "count", "attribute", "position", "verb")
COUNT_OPENING = "How many"
"""Opening of the questions with a number as answer; all other questions have the answer yes."""
NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORD_QUESTION = "{question} Answer in one word."
YES_SPELLINGS = ("Yes", "yes", " Yes", " yes")


@dataclass(frozen=True)
class JudgedTifa(SoftTifa):
    """Base class of evaluators on GenEval2's questions; a subclass implements `rate`.

    Attributes:
        judge: the model.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    required_meta: ClassVar[str] = "vqa_list"
    meta_keys: ClassVar[tuple[str, ...]] = KEYS
    part_names: ClassVar[tuple[str, ...]] = (*(f"atoms-{number}" for number in range(3, 11)), *SKILLS)

    @property
    def protocol(self) -> str:
        """Name of the judge, the model that answers questions."""
        return self.judge.name

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check that a prompt's metadata is a line of GenEval2."""
        super().check_meta(meta)
        parse_line(meta)

    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions about each image's prompt."""
        read_meta(images, "vqa_list", "GenEval2 line", "(vqa_list, skills, atom_count): use prompts=geneval2")
        return [parse_line(images.meta(index)) for index in images.indices]

    @abstractmethod
    def rate(self, judge: JudgeModel, probabilities: Tensor, spellings: Sequence[str]) -> float:
        """Return the correctness of the judge's answer to a question, from 0 to 1.

        Args:
            judge: the model that answered.
            probabilities: probabilities of the first token of its answer, float32 [vocabulary].
            spellings: spellings of the correct answer.
        """

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Return the loaded judge's grading function and the hashes of its files."""
        judge = self.judge.load(device)

        def grade(pixels: Pixels, atoms: Sequence[Atom]) -> list[float]:
            rows = judge.predict(pixels, [WORD_QUESTION.format(question=atom.question) for atom in atoms])
            return [
                self.rate(judge, row, list_spellings(atom)) for row, atom in zip(rows, atoms, strict=True)
            ]

        return grade, judge.weights


@dataclass(frozen=True)
class GenEval2(JudgedTifa):
    """`geneval2[<judge>]`: Soft-TIFA on GenEval2's questions by a vision-language model.

    The probability of an answer is the sum over the first tokens of its spellings.

    Attributes:
        unique: count a token once if several spellings begin with it; the official code counts it for each spelling.
    """

    unique: bool = False

    @property
    def protocol(self) -> str:
        """Name of the judge, with a suffix if tokens count once."""
        return self.judge.name + ("-unique" if self.unique else "")

    def rate(self, judge: JudgeModel, probabilities: Tensor, spellings: Sequence[str]) -> float:
        """Return the probability of the correct answer."""
        tokens = [judge.first_token(text) for text in spellings]
        return add_probabilities(probabilities, list(dict.fromkeys(tokens)) if self.unique else tokens)


@dataclass(frozen=True)
class HardTifa(JudgedTifa):
    """`geneval2_hard[<judge>]`: Hard TIFA on GenEval2's questions, where an answer is right or wrong.

    `geneval2_hard[<judge>]` is the percentage of images with right answers only, `geneval2_hard_am[<judge>]` the mean
    over images of the percentage of right answers.
    """

    name: ClassVar[str] = "geneval2_hard"

    def rate(self, judge: JudgeModel, probabilities: Tensor, spellings: Sequence[str]) -> float:
        """Return 1 if the most probable first token is a spelling of the correct answer, else 0."""
        return float(is_right(judge.decode(int(probabilities.argmax())), spellings))


@dataclass(frozen=True)
class VqaScore(PromptScore):
    """`vqascore[<judge>]`: probability that the judge answers Yes to the question whether the image shows the prompt.

    Question and answer token (the first token of `Yes`) are as in the official code for Qwen models.

    Attributes:
        judge: the model.
    """

    judge: VlmJudge = field(default_factory=VlmJudge)
    name: ClassVar[str] = "vqascore"
    revision: ClassVar[int] = 1
    spec: ClassVar[MetricSpec] = MetricSpec("higher")
    question: ClassVar[str] = 'Does this figure show "{prompt}"? Please answer Yes or No.'
    spellings: ClassVar[tuple[str, ...]] = ("Yes",)

    @property
    def protocol(self) -> str:
        """Name of the judge, the model that answers questions."""
        return self.judge.name

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Return the loaded judge's scorer and the hashes of its files."""
        judge = self.judge.load(device)

        def score(pixels: Pixels, prompts: Sequence[str]) -> Tensor:
            tokens = [judge.first_token(text) for text in self.spellings]
            texts = [self.question.format(prompt=prompt) for prompt in prompts]
            rows = [judge.predict(image, [text])[0] for image, text in zip(pixels, texts, strict=True)]
            return torch.tensor([add_probabilities(row, tokens) for row in rows], dtype=torch.float64)

        return score, judge.weights


@dataclass(frozen=True)
class GenEval2VqaScore(VqaScore):
    """`vqascore[<judge>,geneval2]`: VQAScore as in GenEval2's code, which has another question and four spellings.

    The score is the sum of the probabilities of the first tokens of `Yes` and `yes`, with and without a space before.
    """

    question: ClassVar[str] = 'Does this image show "{prompt}"? Answer the question with Yes or No.'
    spellings: ClassVar[tuple[str, ...]] = YES_SPELLINGS

    @property
    def protocol(self) -> str:
        """Name of the judge, and whose question it is."""
        return f"{self.judge.name},geneval2"


def parse_line(meta: Mapping[str, Any]) -> Questions:
    """Read the questions of a line of geneval2_data.jsonl; raise ValueError if a key is missing or malformed."""
    try:
        pairs = zip(meta["vqa_list"], meta["skills"], strict=True)
        atoms = tuple(Atom(str(question), str(answer), str(skill)) for (question, answer), skill in pairs)
        questions = Questions(atoms, int(meta["atom_count"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"not a GenEval2 line ({type(error).__name__} {error}); needed: {', '.join(KEYS)}"
        ) from None
    if not atoms or not {atom.skill for atom in atoms} <= set(SKILLS):
        raise ValueError(f"not a GenEval2 line: its questions must have skills of {', '.join(SKILLS)}")
    return questions


def list_spellings(atom: Atom) -> list[str]:
    """Return the spellings of a correct answer: a number as word and digit, or yes; also after a space."""
    if not atom.question.startswith(COUNT_OPENING):
        return list(YES_SPELLINGS)
    word = atom.answer
    digit = str(NUMBER_WORDS.index(word) + 1) if word in NUMBER_WORDS else "other"
    spellings = [word, word.capitalize(), digit]
    return [*spellings, *(f" {text}" for text in spellings)]


def add_probabilities(probabilities: Tensor, tokens: Sequence[int]) -> float:
    """Return the sum of probabilities float32 [vocabulary] over token ids; repeated ids count repeatedly."""
    return float(probabilities.double()[list(tokens)].sum())


def is_right(answer: str, spellings: Sequence[str]) -> bool:
    """Return whether an answer, in lower case, is one of the spellings of the correct answer."""
    return answer.lower() in spellings
