"""Claims: one holder at a time, free again when he is gone, and nothing left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbench.core import claims
from kvbench.core.claims import claim, is_held
from tests.support.places import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from kvbench.core.claims import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_claim_is_refused_or_waited_for_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "deep" / ".work"
    with claim(path) as mine, claim(path, wait=False) as other:
        assert mine
        assert not other
        assert path.exists()
    assert not path.exists()
    with claim(path, wait=False) as mine:
        assert mine


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    inside, peak, guard = 0, 0, threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, peak
        with claim(tmp_path / ".work"):
            with guard:
                inside += 1
                peak = max(peak, inside)
            time.sleep(0.0005)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert peak == 1
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_a_killed_process_lapses(tmp_path: Path) -> None:
    path = tmp_path / ".work"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with claim(path, wait=False) as mine:
        assert not mine
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.exists()  # it could not tidy up
    with claim(path, wait=False) as mine:
        assert mine
    assert not path.exists()


def test_an_error_frees_the_claim(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="amid"), claim(tmp_path / ".work"):
        raise ValueError("amid")
    with claim(tmp_path / ".work", wait=False) as mine:
        assert mine


def make_elsewhere(path: Path, lapse: float, age: float) -> None:
    """Leave a claim that a process of another machine touched for the last time `age` seconds ago."""
    path.write_text(json.dumps({"machine": "elsewhere", "lapse": lapse}))
    last = path.stat().st_mtime - age
    os.utime(path, (last, last))


def test_a_claim_of_another_machine_lapses_when_it_was_not_touched_as_promised(tmp_path: Path) -> None:
    path = tmp_path / ".work"
    make_elsewhere(path, lapse=60, age=30)
    with claim(path, wait=False) as mine:
        assert not mine
    assert is_held(path)
    make_elsewhere(path, lapse=60, age=61)
    assert not is_held(path)
    with claim(path, wait=False) as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lapse", ["NaN", "1e300", "86401", "-5", "true", '"abc"'])
def test_a_promise_that_is_no_lapse_is_the_default(tmp_path: Path, lapse: str) -> None:
    path = tmp_path / ".work"
    for age, held in ((30, True), (61, False)):
        make_elsewhere(path, lapse=1, age=age)
        status = path.stat()
        path.write_text(f'{{"machine": "elsewhere", "lapse": {lapse}}}')
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
        assert is_held(path) is held
    with claim(path, wait=False) as mine:
        assert mine


PLACES = {
    "Is a directory": Path.mkdir,
    "not a regular file": os.mkfifo,
    "Is a symbolic link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_claim_is_named_and_held_by_nobody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".lock"
    PLACES[kind](path)
    assert not is_held(path)
    with pytest.raises(OSError, match=f"{kind}, in place of a claim; remove it: '{path}'"), claim(path):
        pass


def test_a_dead_claim_from_the_future_lapses(tmp_path: Path) -> None:
    """The file server's clock was set back by an hour after the last touch."""
    path = tmp_path / ".work"
    make_elsewhere(path, lapse=0.2, age=-3600)
    assert is_held(path)  # its holder may live, and touches it again
    deadline = time.monotonic() + 600
    while is_held(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    with claim(path, wait=False) as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []


def test_a_holder_keeps_his_claim_by_touching_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".work"
    monkeypatch.setattr(claims, "MACHINE", "here")
    with claim(path, lapse=1.0):
        monkeypatch.setattr(claims, "MACHINE", "elsewhere")  # which sees times alone
        last = path.stat().st_mtime - 100
        os.utime(path, (last, last))
        deadline = time.monotonic() + 600
        while not is_held(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_held(path)


def test_of_many_that_see_a_claim_lapse_one_takes_over(tmp_path: Path) -> None:
    for attempt in range(20):
        path, barrier = tmp_path / f".work-{attempt}", threading.Barrier(8)
        make_elsewhere(path, lapse=1, age=10)

        def take(_: int, path: Path = path, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            with claim(path, wait=False) as mine:
                barrier.wait()
                return mine

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(take, range(8))) == 1
        with claim(path, wait=False) as mine:
            assert mine


def test_who_was_taken_over_leaves_the_next_holder_alone(tmp_path: Path) -> None:
    path = tmp_path / ".work"
    with ExitStack() as stack, claim(path, wait=False):
        path.unlink()  # as who takes over does
        assert stack.enter_context(claim(path, wait=False))
        next_holder = stack.pop_all()
    assert is_held(path)
    next_holder.close()
    assert not path.exists()


def test_a_claim_removed_by_another_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".work"
    monkeypatch.setattr(claims, "MACHINE", "here")

    def is_stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with claim(path):
        monkeypatch.setattr(claims, "_read", is_stale)
        assert not is_held(path)
        monkeypatch.setattr(os.path, "samestat", is_stale)
    assert path.exists()  # which may be that of the next holder
