"""Problems of three walkers: rules by hand, a slow reference, words that can be read back."""

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from kvbench.puzzles.room_walk import ROOMS, RoomWalk

seeds = st.integers(0, 2**32)


def follow(text: str) -> str:
    """Solve the text of a problem with one dictionary and three variables."""
    doors, *starts = text.split("\n")
    told = doors.split()[1:]
    leads = dict(zip(told[::2], told[1::2], strict=True))
    left, (first, second, third) = int(starts[0].split()[0]), [line.split()[-1] for line in starts]
    for _ in range(left):
        first, second, third = second, third, leads[first + ("<" if third in "acegik" else ">")]
    return f"{first} {second} {third}"


def test_the_rules_by_hand() -> None:
    doors = {"a<": "b", "a>": "a", "b<": "a", "b>": "b"}
    problem = RoomWalk(doors, ("a", "b", "a"), 3)
    # The third is in a: the first leaves a by < to b; now that one moved last, and is in b: the second leaves
    # b by > to b; the third leaves a by > to a.
    assert [(move.left, move.door, move.room) for move in problem.walk()] == [
        (2, "a<", "b"),
        (1, "b>", "b"),
        (0, "a>", "a"),
    ]
    assert "".join(problem.write_problem()) == "doors a< b a> a b< a b> b\n3 in a\n3 in b\n3 in a"
    assert "".join(problem.solve()) == "\n2 a< b\n1 b> b\n0 a> a\nanswer: b b a"


@given(seeds, st.integers(2, 12), st.integers(1, 60))
def test_answers_are_those_of_another_program(seed: int, rooms: int, moves: int) -> None:
    problem = RoomWalk.draw(random.Random(seed), rooms, moves)
    assert "".join(problem.answer()) == f" {follow(''.join(problem.write_problem()))}"
    assert "".join(problem.solve()).endswith(f"\nanswer:{''.join(problem.answer())}")


@given(seeds, st.integers(2, 12))
def test_no_two_states_have_the_same_next_one(seed: int, rooms: int) -> None:
    problem = RoomWalk.draw(random.Random(seed), rooms, 1)
    for side in "<>":
        doors = {door: room for door, room in problem.doors.items() if door.endswith(side)}
        assert len(doors) == len(set(doors.values())) == rooms


@given(seeds, st.integers(2, 5), st.integers(2, 60))
def test_circles_are_found(seed: int, rooms: int, moves: int) -> None:
    problem = RoomWalk.draw(random.Random(seed), rooms, moves)
    states, walkers = [problem.start], list(problem.start)
    for move in problem.walk():
        walkers = [*walkers[1:], move.room]
        states.append(tuple(walkers))
    assert problem.goes_in_circles() == (len(set(states[:-1])) < len(states) - 1)


@given(seeds)
def test_all_is_written_in_words_that_can_be_told_apart(seed: int) -> None:
    problem, words = RoomWalk.draw(random.Random(seed), 12, 30), RoomWalk.list_words()
    assert len(words) == len(set(words))
    text = "".join((*problem.write_problem(), *problem.solve()))
    longest = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(longest, text) == [*problem.write_problem(), *problem.solve()]
    assert set("".join(problem.start)) <= set(ROOMS)
