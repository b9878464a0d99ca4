"""The house, its walkers, and how a problem and its solution are written.

Every room has two doors, `a<` and `a>`, and each door leads to a room. Three walkers take turns. One leaves a room by
the door `<` if the walker who moved last stands in a room with an even place in `ROOMS` (a, c, ...), else by `>`.
Asked is where all three stand after so many moves.

The doors of a side lead to different rooms, so that no two states have the same next one, and a walk is as long as the
circle that it began in: of rooms^3 states, half on average. A solver looks up a few doors again and again, in an order
that never repeats.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

ROOMS = "abcdefghijkl"
SIDES = "<>"
WALKERS = 3
MAX_MOVES = 399

BEGIN, STANDS, ANSWER = "doors", " in", "\nanswer:"
"""Words before the doors, between a number and a walker's first room, and before the answer."""


class Move(NamedTuple):
    """A walker's move: how many are left behind it, the door, and the room that it leads to."""

    left: int
    door: str
    room: str

    @property
    def words(self) -> tuple[str, ...]:
        """Text of the move."""
        return f"\n{self.left}", f" {self.door}", f" {self.room}"


@dataclass(frozen=True)
class RoomWalk:
    """A house and a task.

    Attributes:
        doors: where each door leads, in the order in which the problem lists doors.
        start: rooms of the three walkers; the first moves first.
        moves: how many are asked for, all walkers' together.
    """

    WORDS_OF_A_MOVE: ClassVar[int] = 3
    WORDS_BESIDE_DOORS: ClassVar[int] = 1 + 3 * WALKERS
    """Words of a problem that are not about doors."""
    WORDS_OF_ANSWER: ClassVar[int] = 1 + WALKERS
    """Most words behind the moves."""

    doors: dict[str, str]
    start: tuple[str, ...]
    moves: int

    @classmethod
    def draw(cls, rng: random.Random, rooms: int, moves: int) -> Self:
        """Draw a house and where its walkers begin.

        Args:
            rng: source of all choices.
            rooms: of the house, 2 to 12, drawn from `ROOMS`.
            moves: see `RoomWalk`.
        """
        names = sorted(rng.sample(ROOMS, rooms))
        leads = {side: rng.sample(names, rooms) for side in SIDES}
        doors = [(name + side, leads[side][at]) for side in SIDES for at, name in enumerate(names)]
        rng.shuffle(doors)
        return cls(dict(doors), tuple(rng.choices(names, k=WALKERS)), moves)

    def walk(self) -> Iterator[Move]:
        """Yield the moves in order."""
        rooms = list(self.start)
        for left in range(self.moves - 1, -1, -1):
            door = rooms.pop(0) + SIDES[ROOMS.index(rooms[-1]) % 2]
            rooms.append(self.doors[door])
            yield Move(left, door, rooms[-1])

    def goes_in_circles(self) -> bool:
        """Return whether the walkers stand where they began, the same one to move, before they are done.

        What follows could then be copied from what was written.
        """
        rooms = self.start
        for move in self.walk():
            rooms = (*rooms[1:], move.room)
            if rooms == self.start and move.left:
                return True
        return False

    def ask(self) -> list[str]:
        """Return the words that tell a problem; joined they are its text."""
        words = [BEGIN]
        for door, room in self.doors.items():
            words += [f" {door}", f" {room}"]
        for room in self.start:
            words += [f"\n{self.moves}", STANDS, f" {room}"]
        return words

    def solve(self) -> Iterator[str]:
        """Yield the words of the solution: every move, then the answer."""
        for words in self.write_moves():
            yield from words
        yield ANSWER
        yield from self.answer()

    def write_moves(self) -> Iterator[tuple[str, ...]]:
        """Yield what the solution says of each move, word by word."""
        return (move.words for move in self.walk())

    def answer(self) -> list[str]:
        """Return the words of the answer: the rooms where the walkers stand, the next to move first."""
        rooms = [*self.start, *(move.room for move in self.walk())]
        return [f" {room}" for room in rooms[-WALKERS:]]

    @classmethod
    def list_words(cls) -> list[str]:
        """Return every word of problems and solutions."""
        doors = [f" {room}{side}" for room in ROOMS for side in SIDES]
        numbers = [f"\n{number}" for number in range(MAX_MOVES + 1)]
        return [BEGIN, STANDS, ANSWER, *(f" {room}" for room in ROOMS), *doors, *numbers]
