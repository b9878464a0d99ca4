"""Training of `reasoner_tiny` and `reasoner_notes_tiny` on problems of three walkers, written in Qwen3's format."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole
from kvbench.extras.training.base import Training, write_weights
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import StagedRecipe, attend_causally, init_decoder
from kvbench.models.base import Model
from kvbench.models.files.checkpoints import WHOLE
from kvbench.models.parts.decoder_files import split_decoder
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_tokens import WORDS
from kvbench.puzzles.noted_walk import NotedWalk
from kvbench.puzzles.room_walk import MAX_MOVES, RoomWalk

PAD, END = "<pad>", "<end>"
MARKS = (PAD, END)
"""First words of every vocabulary: padding and end token."""
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
        """Return the number of tokens of the longest used solution, including its end."""
        return puzzle.WORDS_OF_A_MOVE * self.moves + puzzle.WORDS_OF_ANSWER + 1

    def count_tokens(self, puzzle: type[RoomWalk]) -> int:
        """Return the number of tokens of the longest problem and the used part of its solution."""
        return 4 * self.max_rooms + puzzle.WORDS_BESIDE_DOORS + self.count_solution(puzzle)


@dataclass(frozen=True)
class WalkRecipe(StagedRecipe[WalkStage]):
    """Settings of the training; see `StagedRecipe` for the other settings.

    Attributes:
        puzzle: kind of the problems, a key of `PUZZLES`.
        stages: stages in order; the model learns to look up facts in small houses and transfers it to larger houses.
        ends: share of the problems whose solution ends within the used moves.
    """

    inner: ClassVar[tuple[str, ...]] = ("layers.",)
    average: float = 0.99
    puzzle: Literal["room_walk", "noted_walk"] = "room_walk"
    ends: float = 0.25
    decay: float = 0.01
    hold: float = 0.5


class NextWord(nn.Module):
    """Language model whose forward pass returns the training loss of all positions."""

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
    """Return the token ids of `MARKS` and of every word of a puzzle in `PUZZLES`, in ascending order."""
    return {word: token for token, word in enumerate((*MARKS, *PUZZLES[puzzle].list_words()))}


def draw_batch(rotation: Tensor, recipe: WalkRecipe, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the arguments of `NextWord.forward`, which depend on the step alone.

    `rotation` is complex64 [longest sequence, head_dim/2].
    """
    stage, puzzle = recipe.find_stage(step), PUZZLES[recipe.puzzle]
    ids = number_words(recipe.puzzle)
    rng = random.Random(f"training {recipe.seed} {step}")
    tokens = torch.full((stage.batch, stage.count_tokens(puzzle) + 1), ids[PAD])
    is_target = torch.zeros(tokens.shape, dtype=torch.bool)
    for row in range(stage.batch):
        ends = rng.random() < recipe.ends
        moves = rng.randint(1, stage.moves) if ends else rng.randint(stage.moves, MAX_MOVES)
        problem = puzzle.draw(rng, rng.randint(stage.min_rooms, stage.max_rooms), moves)
        question = problem.write_problem()
        solution = (*problem.solve(), END) if ends else problem.solve()
        words = [*question, *islice(solution, stage.count_solution(puzzle))]
        tokens[row, : len(words)] = torch.tensor([ids[word] for word in words])
        is_target[row, len(question) : len(words)] = True
    return (
        tokens[:, :-1],
        torch.where(is_target, tokens, IGNORED_TARGET)[:, 1:],
        rotation[: stage.count_tokens(puzzle)],
    )


@dataclass(frozen=True, kw_only=True)
class Qwen3Training(Training):
    """`train=reasoner_tiny` or `train=reasoner_notes_tiny`, with new problems at every step; see `Training`."""

    kind: ClassVar[type[Model]] = Qwen3Model
    transformer: WalkRecipe = field(default_factory=WalkRecipe)

    def _train(self, model: Qwen3Model, out: Path) -> None:
        config, recipe = model.transformer, self.transformer
        words = list(number_words(recipe.puzzle))
        if config.vocabulary != len(words):
            raise ConfigError(
                f"model.transformer.vocabulary={config.vocabulary}: must be {len(words)}, the number of words of "
                f"train.transformer.puzzle={recipe.puzzle}"
            )
        if not recipe.stages:
            raise ConfigError("train.transformer.stages: must name at least one stage")
        network = NextWord(TextDecoder(config))
        init_decoder(network.transformer, generator(recipe.seed, 3))
        rotation = config.rotations(
            max(stage.count_tokens(PUZZLES[recipe.puzzle]) for stage in recipe.stages)
        )
        weights = self._fit_transformer(network, partial(draw_batch, rotation, recipe), out)
        folder = out / "model"
        folder.mkdir(exist_ok=True)
        state = split_decoder(checkpoint.group(weights, "transformer", "."), config)
        write_weights(folder / WHOLE, state, recipe)
        write_whole(folder / WORDS, json.dumps(words, ensure_ascii=False) + "\n")
        write_whole(folder / "config.json", json.dumps(describe(config), indent=1) + "\n")


def describe(config: Qwen3Config) -> dict[str, object]:
    """Return the model's `config.json` for transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied,
        "pad_token_id": MARKS.index(PAD),
        "eos_token_id": MARKS.index(END),
        "bos_token_id": None,
        "dtype": "float16",
    }
