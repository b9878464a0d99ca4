"""Problems of walkers: rules by hand, a slow reference, words that can be read back, notes that no window gives."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.prompts.math_tiny import NotesTiny
from kvbench.puzzles.noted_walk import NotedWalk
from kvbench.puzzles.room_walk import ROOMS, RoomWalk

DOORS = {"a<": "b", "a>": "a", "b<": "a", "b>": "b"}
seeds = st.integers(0, 2**32)


def follow(text: str, window: int | None = None) -> str:
    """Solve the text of a problem with dictionaries; a note last written over `window` moves ago is "?"."""
    doors, *starts = text.split("\n")
    *starts, queries = starts if len(starts) > 3 else [*starts, ""]
    told = doors.split()[1:]
    leads = dict(zip(told[::2], told[1::2], strict=True))
    left, (first, second, third) = int(starts[0].split()[0]), [line.split()[-1] for line in starts]
    notes: dict[str, tuple[str, int]] = {}
    forget = window or left
    for number in range(left):
        first, second, third = second, third, leads[first + ("<" if third in "acegik" else ">")]
        if second == third:
            note, at = notes.get(third, (first.upper(), number))
            notes[third] = (note if number - at <= forget else "?", number)
    if not queries:
        return f"{first} {second} {third}"
    return " ".join(
        f"{room} {notes[room][0] if left - notes[room][1] <= forget else '?'}" for room in queries.split()[1:]
    )


def test_the_rules_of_rooms_by_hand() -> None:
    problem = RoomWalk(DOORS, ("a", "b", "a"), 3)
    # The third is in a: the first leaves a by < to b; now that one moved last, and is in b: the second leaves
    # b by > to b; the third leaves a by > to a.
    assert [tuple(move) for move in problem.walk()] == [(2, "a<", "b"), (1, "b>", "b"), (0, "a>", "a")]
    assert "".join(problem.write_problem()) == "doors a< b a> a b< a b> b\n3 in a\n3 in b\n3 in a"
    assert "".join(problem.solve()) == "\n2 a< b\n1 b> b\n0 a> a\nanswer: b b a"


def test_the_rules_of_notes_by_hand() -> None:
    problem = NotedWalk(DOORS, ("a", "b", "a"), 4, ("b",))
    # a goes to b and meets none: the last mover is in a. b stays in b, where the first is: the third is in a, so
    # that A is noted for b. a stays in a, and the last mover is in b. b goes to a, where the last mover is: B for a.
    assert "".join(problem.write_problem()).endswith("\n4 in a\n4 in b\n4 in a\nnotes b")
    assert "".join(problem.solve()) == "\n3 a< b .\n2 b> b A\n1 a> a .\n0 b< a B\nanswer: b A"


@pytest.mark.parametrize("kind", [RoomWalk, NotedWalk])
@given(seeds, st.integers(2, 12), st.integers(1, 90))
def test_answers_are_those_of_another_program(
    kind: type[RoomWalk], seed: int, rooms: int, moves: int
) -> None:
    problem = kind.draw(random.Random(seed), rooms, moves)
    written, solved, words = problem.write_problem(), list(problem.solve()), kind.list_words()
    answer = "".join(problem.answer())
    assert answer == f" {follow(''.join(written))}"
    assert "".join(solved).endswith(f"\nanswer:{answer}")
    if kind is NotedWalk:
        assert len(solved) <= NotedWalk.WORDS_OF_A_MOVE * moves + NotedWalk.WORDS_OF_ANSWER
        assert len(written) <= 4 * rooms + NotedWalk.WORDS_BESIDE_DOORS
    assert len(words) == len(set(words))
    longest = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))  # words can be told apart
    assert re.findall(longest, "".join((*written, *solved))) == [*written, *solved]
    assert set("".join(problem.start)) <= set(ROOMS)


@given(seeds, st.integers(2, 5), st.integers(2, 60))
def test_no_two_states_have_the_same_next_one_and_circles_are_found(
    seed: int, rooms: int, moves: int
) -> None:
    problem = RoomWalk.draw(random.Random(seed), rooms, moves)
    for side in "<>":
        doors = {door: room for door, room in problem.doors.items() if door.endswith(side)}
        assert len(doors) == len(set(doors.values())) == rooms
    states, walkers = [problem.start], list(problem.start)
    for move in problem.walk():
        walkers = [*walkers[1:], move.room]
        states.append(tuple(walkers))
    assert problem.goes_in_circles() == (len(set(states[:-1])) < len(states) - 1)


def test_the_problem_and_a_window_do_not_give_the_answer() -> None:
    # 60 moves of 4 tokens are what a quarter of the longest text leaves beside the problem.
    problems = NotesTiny(count=200).load()
    solved = sum("?" not in follow(problem.text, 60) for problem in problems)
    assert solved <= 0.05 * len(problems)
