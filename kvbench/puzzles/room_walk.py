"""Walks of three walkers through a house, and the text of problems and solutions.

Each room has two doors, `a<` and `a>`, which lead to rooms. Three walkers take turns. A walker uses the door `<` if the
walker who moved last is in a room with an even position in `ROOMS` (a, c, ...), else `>`. The answer consists of the
rooms of all walkers after a number of moves.

The doors of a side lead to different rooms, so different states have different successors, and a walk follows a cycle
of rooms^3 / 2 states on average. A solver looks up a few doors repeatedly, in an order that does not repeat.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

ROOMS = "abcdefghijkl"  # names of all rooms
SIDES = "<>"  # names of a room's doors
WALKERS = 3
MAX_MOVES = 399  # maximum number of moves, each number of which is a word

DOORS_WORD, ROOM_WORD, ANSWER_WORD = "doors", " in", "\nanswer:"
"""Words before all doors, before a walker's first room, and before the answer."""


class Move(NamedTuple):
    """A walker's move: the number of moves left, the door, and the room that it leads to."""

    left: int
    door: str
    room: str

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the move."""
        return f"\n{self.left}", f" {self.door}", f" {self.room}"


@dataclass(frozen=True)
class RoomWalk:
    """A house and a task.

    Attributes:
        doors: room behind each door, in the order of the problem.
        start: rooms of the three walkers; the first moves first.
        moves: number of moves of all walkers together.
    """

    WORDS_OF_A_MOVE: ClassVar[int] = 3
    WORDS_BESIDE_DOORS: ClassVar[int] = 1 + 3 * WALKERS
    """Number of words of a problem except doors and the rooms behind them."""
    WORDS_OF_ANSWER: ClassVar[int] = 1 + WALKERS
    """Maximum number of words after the moves."""

    doors: dict[str, str]
    start: tuple[str, ...]
    moves: int

    @classmethod
    def draw(cls, rng: random.Random, rooms: int, moves: int) -> Self:
        """Sample a house of 2 to 12 rooms, and the walkers' first rooms."""
        names = sorted(rng.sample(ROOMS, rooms))
        leads = {side: rng.sample(names, rooms) for side in SIDES}
        doors = [(name + side, leads[side][i]) for side in SIDES for i, name in enumerate(names)]
        rng.shuffle(doors)
        return cls(dict(doors), tuple(rng.choices(names, k=WALKERS)), moves)

    def walk(self) -> Iterator[Move]:
        """Yield the moves of all walkers in order."""
        rooms = list(self.start)
        for left in range(self.moves - 1, -1, -1):
            door = rooms.pop(0) + SIDES[ROOMS.index(rooms[-1]) % 2]
            rooms.append(self.doors[door])
            yield Move(left, door, rooms[-1])

    def goes_in_circles(self) -> bool:
        """Return whether the first state occurs again before the end, so that later moves could be copied."""
        rooms = self.start
        for move in self.walk():
            rooms = (*rooms[1:], move.room)
            if rooms == self.start and move.left:
                return True
        return False

    def write_problem(self) -> list[str]:
        """Return the words of the problem, whose concatenation is its text."""
        words = [DOORS_WORD]
        for door, room in self.doors.items():
            words += [f" {door}", f" {room}"]
        for room in self.start:
            words += [f"\n{self.moves}", ROOM_WORD, f" {room}"]
        return words

    def solve(self) -> Iterator[str]:
        """Yield the words of the solution: all moves, then the answer."""
        for words in self.write_moves():
            yield from words
        yield ANSWER_WORD
        yield from self.answer()

    def write_moves(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each move in the solution."""
        return (move.words for move in self.walk())

    def answer(self) -> list[str]:
        """Return the words of the answer: the walkers' last rooms, the next to move first."""
        rooms = [*self.start, *(move.room for move in self.walk())]
        return [f" {room}" for room in rooms[-WALKERS:]]

    @classmethod
    def list_words(cls) -> list[str]:
        """Return every word that problems and solutions may have."""
        doors = [f" {room}{side}" for room in ROOMS for side in SIDES]
        numbers = [f"\n{number}" for number in range(MAX_MOVES + 1)]
        return [DOORS_WORD, ROOM_WORD, ANSWER_WORD, *(f" {room}" for room in ROOMS), *doors, *numbers]
