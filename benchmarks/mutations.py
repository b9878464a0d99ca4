"""Wrong lines that tests must notice: changes one line of a copied checkout at a time and runs the tests of its part.

python -m benchmarks mutations [--only critical quest] [--folder FOLDER]
`benchmarks/support/mutations.yaml` lists the lines and, for each, the fast tests of its part. A line is `killed` if a
test fails that passes on the right code, `lives` if all pass, `hangs` if tests do not end, and `broken` if they do not
start or fail on the right code too. The exit status is 1 unless all are killed.
"""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import yaml

from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT

OPTIONS = {
    "only": Option([""], "parts of a path or note; only matching lines are changed"),
    "folder": Option(None, "new folder for the copy; a temporary one by default"),
    "timeout": Option(900, "seconds after which tests are stopped"),
}
LIST = Path(__file__).parent / "support" / "mutations.yaml"
LIBRARIES = ("pytest", "hypothesis", "hydra", "torch.distributed.tensor")
"""Libraries of most tests, which take longer to import than the tests to run."""
OWN = ("kvbench", "benchmarks", "tests")
PASSED, FAILED, NONE_FAST = 0, 1, 5
"""Exit statuses of pytest: tests passed, one failed, or all are slow; any other means that it could not run."""
RESULTS = ("killed", "lives", "hangs", "broken")


@dataclass(frozen=True)
class Mutation:
    """A wrong line.

    Attributes:
        file: path within the checkout.
        find: right text, which occurs in the file exactly once.
        put: wrong text that replaces it.
        note: what is wrong.
        tests: arguments of pytest that select the tests of the file's part.
    """

    file: str
    find: str
    put: str
    note: str
    tests: tuple[str, ...]

    def apply(self, content: str) -> str:
        """Return `content` with `put` for `find`.

        Raises:
            ValueError: `find` does not occur exactly once.
        """
        if (count := content.count(self.find)) != 1:
            raise ValueError(f"{LIST.name}: {self.file} has {self.find!r} {count} times; it must occur once")
        return content.replace(self.find, self.put)


def read_mutations() -> list[Mutation]:
    """Return the mutations of `benchmarks/support/mutations.yaml`."""
    groups = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [
        Mutation(**line, tests=tuple(shlex.split(group["tests"])))
        for group in groups
        for line in group["lines"]
    ]


def copy_checkout(copy: Path) -> None:
    """Copy the checkout's files that git tracks or would add into a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # git also lists deleted files
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def main(options: argparse.Namespace) -> int:
    """Print a row per wrong line; return 1 unless all are killed.

    Raises:
        ValueError: no line is chosen, or a right line is not in its file exactly once.
    """
    every = read_mutations()
    chosen = [line for line in every if any(part in f"{line.file} {line.note}" for part in options.only)]
    if not chosen:
        raise ValueError(f"--only {' '.join(options.only)}: matches no file or note of {LIST.name}")
    for mutation in chosen:
        mutation.apply((ROOT / mutation.file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(options.folder or folder) / "checkout"
        copy_checkout(copy)
        results = list(_report(copy, chosen, options.timeout))
    counts = {result: results.count(result) for result in RESULTS}
    print(f"{len(results)} lines:", ", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(counts["killed"] < len(results))


def _report(copy: Path, mutations: Sequence[Mutation], timeout: float) -> Iterator[str]:
    """Print and yield the result of each wrong line."""
    trial = Trial(copy, timeout)
    for line in mutations:
        started = time.monotonic()
        content = (copy / line.file).read_text(encoding="utf-8")
        result, test = trial.try_content(copy / line.file, line.apply(content), line.tests)
        seconds = time.monotonic() - started
        print(f"{result:7}{seconds:5.0f} s  {line.file}: {line.note}{test and f'  [{test}]'}", flush=True)
        yield result


class Trial:
    """Runner of tests of a copied checkout with wrong contents of its files.

    Args:
        copy: folder of the copy.
        timeout: seconds after which tests are stopped.
    """

    def __init__(self, copy: Path, timeout: float) -> None:
        self._copy, self._timeout = copy, timeout
        self._passes: dict[str, bool] = {}  # whether a test passes on the unchanged code
        for name in LIBRARIES:
            importlib.import_module(name)

    def try_content(self, path: Path, wrong: str, tests: Sequence[str]) -> tuple[str, str]:
        """Return the result of a file's wrong content, and the test that failed; the file is restored.

        Args:
            path: the file, in the copy.
            wrong: its wrong content.
            tests: arguments of pytest that select tests.
        """
        content = path.read_text(encoding="utf-8")
        path.write_text(wrong, encoding="utf-8")
        try:
            status, output = run_tests(self._copy, tests, self._timeout)
        finally:
            path.write_text(content, encoding="utf-8")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", output, re.MULTILINE)
        if status == FAILED and failed:
            test = failed[1]
            if test not in self._passes:
                self._passes[test] = run_tests(self._copy, [test], self._timeout)[0] == PASSED
            return ("killed" if self._passes[test] else "broken"), test
        return {None: "hangs", PASSED: "lives", NONE_FAST: "lives"}.get(status, "broken"), ""


def run_tests(copy: Path, tests: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run fast tests of a copy up to the first failure; return pytest's exit status, None if stopped, and its output.

    The tests run in a fork, which has imported the libraries already.
    """
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as output:
        process = get_context("fork").Process(target=_run_pytest, args=(copy, tests, output.fileno()))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            return None, ""
        output.seek(0)
        return process.exitcode, output.read()


def _run_pytest(copy: Path, tests: Sequence[str], output: int) -> None:
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1, encoding="utf-8", closefd=False)
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    # Byte code would outlive its wrong line: the next file may have the same size and time.
    sys.dont_write_bytecode = True
    pytest = importlib.import_module("pytest")
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
