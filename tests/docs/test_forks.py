"""A forked `python` does what one started anew does: streams, status, directory, environment and arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SHOW = "import os, sys; print(sys.argv, os.getcwd(), os.environ['KVBENCH_SHOWN'], sys.stdin.read())"
SHELLS = {
    "code": f'PYTHON -c "{SHOW}" a "b c" < text',
    "file": "PYTHON show.py a < text | cat",
    "module": "cd sub && PYTHON -m shown a < ../text",
    "standard input": "echo 'print(6 * 7)' | PYTHON -",
    "status": 'PYTHON -c "import sys; sys.exit(3)"',
    "message": 'PYTHON -c "import sys; sys.exit(str(len(sys.argv)))"',
    "killed": 'PYTHON -c "import os; os.kill(os.getpid(), 9)"; echo $?',
    "at the end": 'PYTHON -c "import atexit; atexit.register(print, 1); print(2)"',
    "class of its own": 'PYTHON -c "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))"',
    "error": 'PYTHON -c "1 / 0" 2>&1 | tail -n 1',
}


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_a_forked_python_is_like_another(shell: str, forked_python: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "text").write_text("read")
    for name in ("show.py", "sub/shown.py"):
        (tmp_path / name).write_text(SHOW)
    found = [
        subprocess.run(
            ["bash", "-c", shell.replace("PYTHON", python).replace("\\n", "\n")],
            cwd=tmp_path, env={**os.environ, "KVBENCH_SHOWN": "set"}, capture_output=True, text=True, timeout=60,
        )
        for python in (sys.executable, forked_python)
    ]  # fmt: skip
    assert [one.returncode for one in found] == [found[0].returncode] * 2
    assert found[0].stdout == found[1].stdout
    assert (
        found[0].stderr.splitlines()[-1:] == found[1].stderr.splitlines()[-1:] or "Killed" in found[0].stderr
    )
