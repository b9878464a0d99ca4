"""Random word problems for the embedded language models."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from kvbench.core.config import ConfigError, Range
from kvbench.prompts.base import Count, Prompt, Seed, check_total, leave_out, repeat
from kvbench.puzzles.noted_walk import MAX_QUERIES, NotedWalk
from kvbench.puzzles.room_walk import MAX_MOVES, ROOMS, WALKERS, RoomWalk


@dataclass(frozen=True)
class MathTiny:
    """Problems of three walkers (`kvbench.puzzles.room_walk`) with their `answer`; all prompts have equal lengths.

    No walk returns to its start before its end.

    Attributes:
        count: number of problems.
        seed: seed of the set; training uses other random streams.
        rooms: number of rooms of every house.
        min_moves: minimum number of moves of a problem.
        max_moves: maximum number of moves, 3 tokens each.
        per_prompt: texts generated per problem, with different noise.
    """

    puzzle: ClassVar[type[RoomWalk]] = RoomWalk
    in_random_order: ClassVar[bool] = True

    count: Count = 96
    seed: Seed = 0
    rooms: Annotated[int, Range(2, len(ROOMS))] = 8
    min_moves: int = 170
    max_moves: Annotated[int, Range(1, MAX_MOVES)] = 330
    per_prompt: Count = 1

    def __post_init__(self) -> None:
        check_total(self.per_prompt * self.count, "per_prompt", self.per_prompt)
        if self.max_moves > self.rooms**WALKERS * 3 // 4:
            raise ConfigError(
                f"prompts.max_moves={self.max_moves}: {self.rooms} rooms have {self.rooms**WALKERS} states, and a walk "
                "may have at most three quarters of that many moves; raise prompts.rooms"
            )
        if not 1 <= self.min_moves <= self.max_moves:
            raise ConfigError(
                f"prompts.min_moves={self.min_moves}: must be from 1 to prompts.max_moves={self.max_moves}"
            )

    def load(self) -> list[Prompt]:
        """Return the problems, numbered by `prompt_index` in their metadata."""
        return repeat(self._draw(), self.per_prompt)

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` problems of another seed that are not evaluated."""
        more = replace(self, count=2 * count + self.count, seed=self.seed + seed, per_prompt=1)
        return leave_out(more.load(), self.load(), count)

    def _draw(self) -> Iterator[tuple[str, dict[str, object]]]:
        rng = random.Random(f"math_tiny {self.seed}")
        for number in range(self.count):
            moves = rng.randint(self.min_moves, self.max_moves)
            while not self._suits(problem := self.puzzle.draw(rng, self.rooms, moves)):
                pass
            meta = {
                "answer": "".join(problem.answer()).strip(),
                "moves": problem.moves,
                "prompt_index": number,
            }
            yield "".join(problem.write_problem()), meta

    def _suits(self, problem: RoomWalk) -> bool:
        return not problem.goes_in_circles()


@dataclass(frozen=True)
class NotesTiny(MathTiny):
    """Problems whose answers are four notes of the solution (`kvbench.puzzles.noted_walk`), with equal lengths.

    See `MathTiny` for the attributes; a move takes 4 tokens.
    """

    puzzle: ClassVar[type[RoomWalk]] = NotedWalk
    min_moves: int = 130
    max_moves: int = 240

    def _suits(self, problem: RoomWalk) -> bool:
        return super()._suits(problem) and len(problem.answer()) == 2 * MAX_QUERIES
