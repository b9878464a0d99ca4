"""The set of generated problems: the same by its seed, equally long, each with its answer."""

from kvbench.prompts.math_tiny import MathTiny, NotesTiny
from tests.puzzles.test_noted_walk import follow_notes
from tests.puzzles.test_room_walk import follow


def test_problems_carry_their_answers_and_are_equally_long() -> None:
    problems = MathTiny(count=40, rooms=8).load()
    assert [problem.index for problem in problems] == list(range(40))
    assert len({problem.text for problem in problems}) == 40
    for problem in problems:
        assert problem.meta["answer"] == follow(problem.text)
        assert len(problem.text.split("\n")[0].split()) == 1 + 2 * 16
        assert 170 <= int(str(problem.meta["moves"])) <= 330


def test_problems_of_notes_ask_for_four_of_them() -> None:
    problems = NotesTiny(count=20).load()
    assert len({problem.text for problem in problems}) == 20
    for problem in problems:
        assert problem.meta["answer"] == follow_notes(problem.text)
        assert len(str(problem.meta["answer"]).split()) == 8
        assert len(problem.text.split()) == 47


def test_a_longer_set_begins_with_the_shorter_one_and_another_seed_differs() -> None:
    few, more, others = MathTiny(count=5), MathTiny(count=9), MathTiny(count=5, seed=1)
    assert more.load()[:5] == few.load()
    assert not {problem.text for problem in others.load()} & {problem.text for problem in more.load()}


def test_every_problem_may_be_asked_several_times() -> None:
    problems = MathTiny(count=3, per_prompt=2).load()
    assert [problem.meta["prompt_index"] for problem in problems] == [0, 0, 1, 1, 2, 2]
    assert [problem.text for problem in problems[::2]] == [problem.text for problem in problems[1::2]]


def test_problems_to_calibrate_on_are_not_evaluated() -> None:
    problems = MathTiny(count=6)
    others = problems.load_others(4, 3)
    assert [problem.index for problem in others] == [0, 1, 2, 3]
    assert not {problem.text for problem in others} & {problem.text for problem in problems.load()}
