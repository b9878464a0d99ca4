"""Work beside other work: in order, bounded, done at the end, and its errors told."""

import threading

import pytest

from kvbench.core.background import Work, working_beside


def test_work_is_done_in_order_and_all_of_it_at_the_end() -> None:
    done: list[int] = []
    with working_beside(max_=2) as give:
        for number in range(20):
            give(lambda number=number: done.append(number))
    assert done == list(range(20))


def test_giving_waits_once_so_much_is_undone() -> None:
    go, given = threading.Event(), []

    def give_three() -> None:
        with working_beside(max_=2) as give:
            for number in range(3):
                give(go.wait)
                given.append(number)

    thread = threading.Thread(target=give_three)
    thread.start()
    thread.join(0.2)
    assert given == [0, 1]
    go.set()
    thread.join(60)
    assert given == [0, 1, 2]


def fail() -> None:
    raise OSError("no space")


def work_at(*pieces: Work, error: type[Exception] | None = None) -> None:
    with working_beside(max_=2) as give:
        for piece in pieces:
            give(piece)
        if error is not None:
            raise error


def test_an_error_is_raised_where_more_work_is_given_or_at_the_end() -> None:
    done: list[int] = []
    with pytest.raises(OSError, match="no space"):
        work_at(fail, lambda: done.append(1), lambda: done.append(2))
    assert done == [1]  # what was given before, and nothing after
    with pytest.raises(OSError, match="no space"):
        work_at(fail)


def test_another_error_is_not_hidden_and_work_is_done_all_the_same() -> None:
    done: list[int] = []
    with pytest.raises(KeyError):
        work_at(fail, lambda: done.append(1), error=KeyError)
    assert done == [1]
