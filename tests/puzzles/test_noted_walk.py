"""Problems of walkers who meet: rules by hand, a slow reference, and notes that neither problem nor window gives."""

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from kvbench.prompts.math_tiny import NotesTiny
from kvbench.puzzles.noted_walk import NotedWalk


def follow_notes(text: str, window: int | None = None) -> str:
    """Solve the text of a problem with dictionaries; a note last written over `window` moves ago is "?"."""
    doors, *starts, queries = text.split("\n")
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
    return " ".join(
        f"{room} {notes[room][0] if left - notes[room][1] <= forget else '?'}" for room in queries.split()[1:]
    )


def test_the_rules_by_hand() -> None:
    doors = {"a<": "b", "a>": "a", "b<": "a", "b>": "b"}
    problem = NotedWalk(doors, ("a", "b", "a"), 4, ("b",))
    # a goes to b and meets none: the last mover is in a. b stays in b, where the first is: the third is in a, so
    # that A is noted for b. a stays in a, and the last mover is in b. b goes to a, where the last mover is: B for a.
    assert "".join(problem.write_problem()).endswith("\n4 in a\n4 in b\n4 in a\nnotes b")
    assert "".join(problem.solve()) == "\n3 a< b .\n2 b> b A\n1 a> a .\n0 b< a B\nanswer: b A"


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 90))
def test_answers_are_those_of_another_program(seed: int, rooms: int, moves: int) -> None:
    problem = NotedWalk.draw(random.Random(seed), rooms, moves)
    text = "".join(problem.write_problem())
    assert "".join(problem.answer()) == f" {follow_notes(text)}"
    assert len(list(problem.solve())) <= NotedWalk.WORDS_OF_A_MOVE * moves + NotedWalk.WORDS_OF_ANSWER
    assert len(problem.write_problem()) <= 4 * rooms + NotedWalk.WORDS_BESIDE_DOORS


@given(st.integers(0, 2**32))
def test_all_is_written_in_words_that_can_be_told_apart(seed: int) -> None:
    problem, words = NotedWalk.draw(random.Random(seed), 12, 30), NotedWalk.list_words()
    assert len(words) == len(set(words))
    longest = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(longest, "".join((*problem.write_problem(), *problem.solve()))) == [
        *problem.write_problem(),
        *problem.solve(),
    ]


def test_the_problem_and_a_window_do_not_give_the_answer() -> None:
    # 60 moves of 4 tokens are what a quarter of the longest text leaves beside the problem.
    problems = NotesTiny(count=200).load()
    solved = sum("?" not in follow_notes(problem.text, 60) for problem in problems)
    assert solved <= 0.05 * len(problems)
