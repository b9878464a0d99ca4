"""A `python` that starts in a twentieth of the time: every program is forked from one that has imported the libraries.

`forks.py serve SOCKET` waits for requests; `forks.py call SOCKET WORDS...` takes the words of `python` and gives the
server its directory, environment and streams, waits for the program and ends with its status. Modules of kvbench are
not imported beforehand, so that a program finds those of its own `PYTHONPATH`.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("torch", "hydra", "rich.progress", "safetensors.torch", "scipy.stats", "matplotlib.pyplot")
"""Libraries whose imports take most of a short program's time."""


@contextlib.contextmanager
def serve_python() -> Iterator[str]:
    """Start a server; gives a shell command that stands for `python` while the context is open."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        path, file = Path(folder, "socket"), Path(__file__).resolve()
        words = [sys.executable, "-P", str(file), "serve", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True)
        try:
            while not path.exists():
                assert server.poll() is None
                time.sleep(0.01)
            yield f"{sys.executable} -I -S {file} call {path}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # programs that a test did not wait for as well
            server.wait()


def call(path: str, words: list[str]) -> int:
    """Have a server run `python` with these words; returns the exit status, as shells have it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = json.dumps([words, str(Path.cwd()), dict(os.environ)]).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        status = int(connection.makefile().read())
    return status if status >= 0 else 128 - status


def serve(path: str) -> list[str]:
    """Fork a process per request; returns in each of these, set up as the caller is, with the words of `python`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen()
        Path(path + ".new").rename(path)  # seen once it answers
        while True:
            connection, _ = listener.accept()
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words, directory, environment = _take_streams(connection)
    if program := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    return words


def _take_streams(connection: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Take over the caller's standard streams, and return the words, the directory and the environment it sends."""
    header, streams, *_ = socket.recv_fds(connection, 8, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    text = connection.makefile("rb").read(int.from_bytes(header, "big"))
    words, directory, environment = json.loads(text)
    return words, directory, environment


def run_words(words: list[str]) -> None:
    """Do what `python` does with its words: `-c` and code, `-m` and a module, or a file, and arguments."""
    kind, *rest = words
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if kind in ("-c", "-m"):
        name, *arguments = rest
        sys.path[:0] = ["" if kind == "-c" else str(Path.cwd()), *folders]
        sys.argv = [kind, *arguments]
    else:
        sys.path[:0] = [str(Path(kind).resolve().parent), *folders]
        sys.argv = words
    if kind == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), vars(main))
    elif kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    task, path, *words = sys.argv[1:]
    if task == "call":
        if words and (words[0] in ("-c", "-m") or not words[0].startswith("-")):
            sys.exit(call(path, words))
        os.execv(sys.executable, [sys.executable, *words])
    for library in LIBRARIES:
        importlib.import_module(library)
    run_words(serve(path))
