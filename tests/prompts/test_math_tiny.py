"""The set of generated problems: the same by its seed, equally long, each with its answer."""

from kvbench.prompts.math_tiny import MathTiny, NotesTiny
from tests.puzzles.test_walks import follow


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
        assert problem.meta["answer"] == follow(problem.text)
        assert len(str(problem.meta["answer"]).split()) == 8
        assert len(problem.text.split()) == 47


def test_sets_begin_alike_repeat_problems_and_are_calibrated_on_others() -> None:
    few, more, seeded = MathTiny(count=5), MathTiny(count=9, per_prompt=2).load(), MathTiny(count=5, seed=1)
    assert [problem.text for problem in more[:10:2]] == [problem.text for problem in few.load()]
    assert [problem.text for problem in more[::2]] == [problem.text for problem in more[1::2]]
    assert [problem.meta["prompt_index"] for problem in more] == [number // 2 for number in range(18)]
    others = few.load_others(4, 3)
    assert [problem.index for problem in others] == [0, 1, 2, 3]
    known = {problem.text for problem in more}
    assert not {problem.text for problem in (*seeded.load(), *others)} & known
