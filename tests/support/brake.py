"""The brake on the time of tests: fast tests over two seconds of processor are named.

`pytest --brake` fails on them. Time is the processor's of the test's own process, on a machine that may be busy.
"""

import time
from collections.abc import Iterator

import pytest

LIMIT = 2.0
"""Seconds of processor that a fast test may take."""
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
        session.exitstatus = int(bool(find_faults(reporter)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was too slow."""
    if faults := find_faults(terminalreporter):
        terminalreporter.section("processor time")
        for seconds, name in faults:
            terminalreporter.line(f"{seconds:5.1f} s of at most {LIMIT:g}  {name}")


def find_faults(reporter: pytest.TerminalReporter) -> list[tuple[float, str]]:
    """Return processor seconds and name of each fast test over the limit, the slowest first."""
    found = [
        (seconds, report.nodeid)
        for reports in reporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call" and "slow" not in report.keywords
        for name, seconds in report.user_properties
        if name == SECONDS and isinstance(seconds, float) and seconds > LIMIT
    ]
    return sorted(found, reverse=True)
