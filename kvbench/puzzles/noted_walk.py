"""Walks with meetings, whose notes must be recalled much later.

Three walkers move as in `kvbench.puzzles.room_walk`. A walker who enters the room of the walker who moved last meets
them. At the first meeting in a room the room of the third walker is noted; later meetings in that room repeat the note.
The answer consists of the notes of some rooms.

The problem does not state the notes, the newest moves do not imply them, and their positions are not predictable
without following all moves.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.puzzles.room_walk import ROOMS, Move, RoomWalk

NO_MEETING_WORD, NOTES_WORD = " .", "\nnotes"
"""Words of a move without a meeting, and before the queried rooms."""
MAX_QUERIES = 4  # maximum number of queried rooms


@dataclass(frozen=True)
class NotedWalk(RoomWalk):
    """A house and a task; see `RoomWalk` for the other attributes.

    Attributes:
        queries: 1 to `MAX_QUERIES` rooms with meetings, in the order of the answer.
    """

    WORDS_OF_A_MOVE: ClassVar[int] = 4
    WORDS_BESIDE_DOORS: ClassVar[int] = RoomWalk.WORDS_BESIDE_DOORS + 1 + MAX_QUERIES
    WORDS_OF_ANSWER: ClassVar[int] = 1 + 2 * MAX_QUERIES

    queries: tuple[str, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random, rooms: int, moves: int) -> Self:
        """Sample houses and the walkers' first rooms until the walkers meet, then up to `MAX_QUERIES` queries."""
        while True:
            problem = super().draw(rng, rooms, moves)
            rooms_met = [move.room for move, note in problem.take_notes() if note]
            if rooms_met:
                known = list(dict.fromkeys(rooms_met))
                return replace(problem, queries=tuple(rng.sample(known, min(len(known), MAX_QUERIES))))

    def take_notes(self) -> Iterator[tuple[Move, str]]:
        """Yield each move and its note: the name of a room, or "" without a meeting."""
        rooms, notes = self.start, dict[str, str]()
        for move in self.walk():
            rooms = (*rooms[1:], move.room)
            third, last, _ = rooms
            yield move, notes.setdefault(move.room, third) if move.room == last else ""

    def write_problem(self) -> list[str]:
        """Return the words of the problem, whose concatenation is its text."""
        return [*super().write_problem(), NOTES_WORD, *(f" {room}" for room in self.queries)]

    def write_moves(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each move in the solution: the move and its note."""
        for move, note in self.take_notes():
            yield *move.words, f" {note.upper()}" if note else NO_MEETING_WORD

    def answer(self) -> list[str]:
        """Return the words of the answer: each queried room and its note."""
        notes = {move.room: note for move, note in self.take_notes() if note}
        return [word for room in self.queries for word in (f" {room}", f" {notes[room].upper()}")]

    @classmethod
    def list_words(cls) -> list[str]:
        """Return every word that problems and solutions may have."""
        return [*super().list_words(), NO_MEETING_WORD, NOTES_WORD, *(f" {room.upper()}" for room in ROOMS)]
