"""Training of the small language models on problems of three walkers and their solutions."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.extras.training.transformer import BaseTransformerRecipe, attend_causally, find_stage
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.puzzles.noted_walk import NotedWalk
from kvbench.puzzles.room_walk import MAX_MOVES, RoomWalk

PAD, END = "<pad>", "<end>"
MARKS = (PAD, END)
"""The first words of every vocabulary."""
PUZZLES: Mapping[str, type[RoomWalk]] = {"room_walk": RoomWalk, "noted_walk": NotedWalk}
IGNORED_TARGET = -100
"""Target of tokens that the loss ignores."""


@dataclass(frozen=True)
class WalkStage:
    """Stage of a training on the first `moves` moves of problems.

    Attributes:
        min_rooms: minimum number of rooms of a house.
        max_rooms: maximum number of rooms of a house.
        moves: maximum number of moves of a solution that are used.
        batch: problems per step.
        steps: optimiser steps.
    """

    min_rooms: int
    max_rooms: int
    moves: int
    batch: int
    steps: int

    def count_solution(self, puzzle: type[RoomWalk]) -> int:
        """Return the tokens of the longest used solution, its end included."""
        return puzzle.WORDS_OF_A_MOVE * self.moves + puzzle.WORDS_OF_ANSWER + 1

    def count_tokens(self, puzzle: type[RoomWalk]) -> int:
        """Return the tokens of the longest problem and the used part of its solution."""
        return 4 * self.max_rooms + puzzle.WORDS_BESIDE_DOORS + self.count_solution(puzzle)


@dataclass(frozen=True)
class WalkRecipe(BaseTransformerRecipe):
    """Settings of the training; see `BaseTransformerRecipe` for the others.

    Attributes:
        puzzle: kind of the problems: "room_walk" or "noted_walk", modules of `kvbench.puzzles`.
        stages: stages in order; the model learns to look up facts in small houses and keeps it in larger ones.
        ends: share of the problems whose solution ends within the used moves.
    """

    inner: ClassVar[tuple[str, ...]] = ("layers.",)
    average: float = 0.99
    puzzle: str = "room_walk"
    stages: tuple[WalkStage, ...] = ()
    ends: float = 0.25
    decay: float = 0.01
    hold: float = 0.5

    @property
    def steps(self) -> int:
        """Optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def vocabulary(self) -> list[str]:
        """Every word of the puzzle, after `MARKS`."""
        return list(number_words(self.puzzle))


class NextWord(nn.Module):
    """The language model for training in one pass."""

    def __init__(self, transformer: TextDecoder) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: Tensor, targets: Tensor, rotation: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the targets in nats, a scalar.

        Args:
            tokens: int64 [B, tokens], inputs.
            targets: int64 [B, tokens], the next tokens, or `IGNORED_TARGET`.
            rotation: complex64 [tokens, head_dim/2].
        """
        hidden = self.transformer(self.transformer.embed(tokens), rotation, attend_causally)
        logits = self.transformer.logits(hidden).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET)


@cache
def number_words(puzzle: str) -> Mapping[str, int]:
    """Return the number of `MARKS` and of every word of a puzzle of `PUZZLES`, in their order."""
    return {word: number for number, word in enumerate((*MARKS, *PUZZLES[puzzle].list_words()))}


def draw_batch(rotation: Tensor, recipe: WalkRecipe, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the arguments of `NextWord.forward`, which depend on the step number alone.

    `rotation` is complex64 [longest sequence, head_dim/2].
    """
    stage, puzzle = find_stage(recipe.stages, step), PUZZLES[recipe.puzzle]
    numbers = number_words(recipe.puzzle)
    rng = random.Random(f"training {recipe.seed} {step}")
    tokens = torch.full((stage.batch, stage.count_tokens(puzzle) + 1), numbers[PAD])
    is_target = torch.zeros(tokens.shape, dtype=torch.bool)
    for row in range(stage.batch):
        ends = rng.random() < recipe.ends
        moves = rng.randint(1, stage.moves) if ends else rng.randint(stage.moves, MAX_MOVES)
        problem = puzzle.draw(rng, rng.randint(stage.min_rooms, stage.max_rooms), moves)
        question = problem.write_problem()
        solution = (*problem.solve(), END) if ends else problem.solve()
        words = [*question, *islice(solution, stage.count_solution(puzzle))]
        tokens[row, : len(words)] = torch.tensor([numbers[word] for word in words])
        is_target[row, len(question) : len(words)] = True
    return (
        tokens[:, :-1],
        torch.where(is_target, tokens, IGNORED_TARGET)[:, 1:],
        rotation[: stage.count_tokens(puzzle)],
    )
