"""The brake on the time of tests: fast tests over two seconds of processor, and rooms over their share, are named.

`pytest --brake` fails on them. Time is the processor's of the test's own process, on a machine that may be busy.
"""

import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

LIMIT = 2.0
"""Seconds of processor that a fast test may take."""
EXCUSED = {
    "tests/cli/test_app.py::test_main_job_then_reuse_then_report": "the one whole job of the command line",
    "tests/cli/test_first_light.py::test_on_another_card_the_time_follows_the_floors_of_a_plan": "often first: imports",
    "tests/cli/test_speed_sweeps.py::test_a_sweep_ends_with_published_beside_measured_and_a_report_prints_it_again": (
        "the one whole sweep of profiles"
    ),
    "tests/kernels/test_triton.py::test_attention": "examples of every shape in the interpreter",
    "tests/models/test_recorded_methods.py::test_a_recording_waits_for_nothing": "the one recording beside a watch",
    "tests/runs/test_wandb.py::test_texts_that_were_read_arrive_by_their_beginning": "starts W&B's own service",
}
"""Reasons by the names of fast tests that may take longer; at most ten."""
SHARES: dict[str, float] = {
    "models": 0.22, "runs": 0.20, "methods": 0.20, "cli": 0.17, "kernels": 0.10, "eval": 0.08, "extras": 0.06,
    "report": 0.05, "engine": 0.05, "benchmarks": 0.04, "docs": 0.03, "cuda_shapes": 0.04, "dashboard": 0.02,
    "cuda_branches": 0.02,
}  # fmt: skip
"""Share of the fast tests' time that each room may take, by the folder of `tests`; they add up to more than 1."""
SECONDS = "processor seconds"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the processor time of a test in its report."""
    started = time.process_time()
    try:
        return (yield)
    finally:
        item.user_properties.append((SECONDS, time.process_time() - started))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that passed but was too slow, with `--brake`."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.getoption("brake") and not session.exitstatus:
        session.exitstatus = int(bool(find_faults(read_times(reporter))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was too slow."""
    if faults := find_faults(read_times(terminalreporter)):
        terminalreporter.section("processor time")
        for fault in faults:
            terminalreporter.line(fault)


def read_times(reporter: pytest.TerminalReporter) -> dict[str, float]:
    """Return the processor seconds of the fast tests that ran, by name."""
    return {
        report.nodeid: seconds
        for reports in reporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call" and "slow" not in report.keywords
        for name, seconds in report.user_properties
        if name == SECONDS and isinstance(seconds, float)
    }


def find_faults(times: dict[str, float]) -> list[str]:
    """Return a line for each test over the limit and, if tests of every room ran, for each room over its share."""
    faults = [
        f"{seconds:5.1f} s of at most {LIMIT:g}  {name}"
        for name, seconds in sorted(times.items(), key=lambda one: -one[1])
        if seconds > LIMIT and name.partition("[")[0] not in EXCUSED
    ]
    rooms: dict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        rooms[name.split("/")[1]] += seconds
    total = sum(rooms.values())
    if rooms.keys() >= SHARES.keys():
        faults += [
            f"{rooms[room] / total:5.1%} of at most {share:.0%} of all seconds  tests/{room}"
            for room, share in SHARES.items()
            if rooms[room] > share * total
        ]
    return faults
