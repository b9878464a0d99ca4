"""Walkers who meet, and notes of their meetings that are read again long after.

Three walkers move as in `kvbench.puzzles.room_walk`. A walker who enters the room of the walker who moved last meets
him. At the first meeting in a room the room of the third walker is noted; at every later meeting in that room the same
note is written again. Asked are the notes of some rooms.

The problem has the doors but no notes. A note stands where the walkers happened to meet, which no rule of positions
knows, and follows neither from the problem nor from the newest moves.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.puzzles.room_walk import ROOMS, Move, RoomWalk

NO_MEETING, NOTES = " .", "\nnotes"
"""Words: the blank of a move without a meeting, and the heading of the rooms whose notes are asked for."""
MAX_ASKED = 4


@dataclass(frozen=True)
class NotedWalk(RoomWalk):
    """A house and a task; see `RoomWalk` for attributes that are not listed.

    Attributes:
        asked: 1 to 4 rooms in which walkers meet, in the order in which their notes are asked for.
    """

    WORDS_OF_A_MOVE: ClassVar[int] = 4
    WORDS_BESIDE_DOORS: ClassVar[int] = RoomWalk.WORDS_BESIDE_DOORS + 1 + MAX_ASKED
    WORDS_OF_ANSWER: ClassVar[int] = 1 + 2 * MAX_ASKED

    asked: tuple[str, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random, rooms: int, moves: int) -> Self:
        """Draw a house, where its walkers begin, and which notes are asked for: four, or all if there are fewer.

        Problems without a meeting are drawn again; see `RoomWalk.draw` for the arguments.
        """
        while True:
            problem = super().draw(rng, rooms, moves)
            met = [move.room for move, note in problem.take_notes() if note]
            if met:
                known = list(dict.fromkeys(met))
                return replace(problem, asked=tuple(rng.sample(known, min(len(known), MAX_ASKED))))

    def take_notes(self) -> Iterator[tuple[Move, str]]:
        """Yield every move and the note that is written with it: the name of a room, or "" where nobody meets."""
        rooms, notes = self.start, dict[str, str]()
        for move in self.walk():
            rooms = (*rooms[1:], move.room)
            third, last, _ = rooms
            yield move, notes.setdefault(move.room, third) if move.room == last else ""

    def ask(self) -> list[str]:
        """Return the words that tell a problem; joined they are its text."""
        return [*super().ask(), NOTES, *(f" {room}" for room in self.asked)]

    def write_moves(self) -> Iterator[tuple[str, ...]]:
        """Yield what the solution says of each move, word by word: the move and its note."""
        for move, note in self.take_notes():
            yield *move.words, f" {note.upper()}" if note else NO_MEETING

    def answer(self) -> list[str]:
        """Return the words of the answer: every room that is asked for, and its note."""
        notes = {move.room: note for move, note in self.take_notes() if note}
        return [word for room in self.asked for word in (f" {room}", f" {notes[room].upper()}")]

    @classmethod
    def list_words(cls) -> list[str]:
        """Return every word of problems and solutions."""
        return [*super().list_words(), NO_MEETING, NOTES, *(f" {room.upper()}" for room in ROOMS)]
