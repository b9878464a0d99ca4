"""The code that a class uses is found in its module and in others, and only what can change its results counts."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from IPython.core.interactiveshell import InteractiveShell

from kvbench.core import imports
from kvbench.core.imports import find_import_time
from kvbench.core.source import ChangedFileError, Code, hold_loaded, read_code

FILES = {
    "__init__.py": "",
    "method.py": """
import functools
import own.deep.maths
import own.whole as alias
import own.plain.h
from own import helpers, again
from own.base import Base
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from own.types_only import Kind
try:
    import numpy
except ImportError:
    numpy = None

RATE = 2
WEIGHTS = {"a": RATE}


@functools.cache
def remember(x):
    return x


class Method(Base):
    '''A method.'''

    def keep(self, view: "Kind"):
        from own.late import later
        import own.plain.fast, own.broken
        total = own.deep.maths.add(helpers.scale(view), again.again(WEIGHTS["a"]))
        return later(alias.value + remember(total), f"{total:.2f}")
""",
    "base.py": """
from .registry import REGISTRY

class Base:
    floor = 1

    def seen(self):
        return REGISTRY
""",
    "helpers.py": """
def scale(x):
    return _inner(x)

def _inner(x):
    return 2 * x

def unused(x):
    return x
""",
    "again.py": "from .final import last as again\n",
    "final.py": "def last(x):\n    return x + 1\n\ndef other(x):\n    return x\n",
    "deep/__init__.py": "",
    "deep/maths.py": "def add(a, b):\n    return a + b\n",
    "whole.py": "value = 5\nunread = 6\n",
    "late.py": "def later(x, text):\n    return x\n",
    "registry.py": "REGISTRY = {}\nREGISTRY['a'] = 1\n",
    "types_only.py": "class Kind:\n    pass\n",
    "not_imported.py": "value = 1\n",
    "plain/h.py": "sign = 1\n",
    "plain/fast.so": "compiled",
    "broken.py": "def x(:",
}
COUNTS = [
    ("method.py", "RATE = 2", "RATE = 3"),
    ("method.py", '["a"]))', '["b"]))'),
    ("method.py", "    return x\n", "    return -x\n"),
    ("method.py", "@functools.cache\n", ""),
    ("method.py", ":.2f", ":.3f"),
    ("base.py", "floor = 1", "floor = 2"),
    ("helpers.py", "2 * x", "3 * x"),
    ("final.py", "x + 1", "x + 2"),
    ("again.py", "last as again", "other as again"),
    ("deep/maths.py", "a + b", "a - b"),
    ("whole.py", "value = 5", "value = 4"),
    ("late.py", "return x", "return text"),
    ("registry.py", "= 1", "= 2"),
    ("helpers.py", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
    ("__init__.py", "", "import numpy"),
    ("plain/h.py", "sign = 1", "sign = -1"),
    ("plain/fast.so", "compiled", "compiled again"),
    ("broken.py", "x(:", "y(:"),
]
NEUTRAL = [
    ("method.py", "RATE = 2", "RATE = 2  # a rate\n\n"),
    ("method.py", "'''A method.'''", "'''Another text.'''"),
    ("method.py", 'WEIGHTS = {"a": RATE}', "WEIGHTS = {\n    'a': RATE,\n}"),
    ("types_only.py", "pass", "x: int"),
    ("not_imported.py", "1", "2"),
]
Measure = Callable[..., Code]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measure]:
    """Writes the package `own` with one edit, imports it anew and reads the code of its method."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def write(file: str = "", old: str = "", new: str = "") -> Code:
        for name, text in FILES.items():
            path = tmp_path / "own" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert name != file or old in text
            path.write_text(text.replace(old, new, 1) if name == file else text)
        forget()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return read_code(load().Method, is_own)

    yield write
    forget()


def load() -> ModuleType:
    return importlib.import_module("own.method")


def is_own(module: str) -> bool:
    return module.partition(".")[0] == "own"


@pytest.mark.parametrize("edit", [*COUNTS, *NEUTRAL])
def test_an_edit_counts_if_it_is_of_what_is_used_and_has_an_effect(
    measure: Measure, edit: tuple[str, str, str]
) -> None:
    assert (measure().sha256 != measure(*edit).sha256) == (edit in COUNTS)


def test_files_and_libraries_are_named(measure: Measure) -> None:
    """A folder without `__init__.py` has no file; what only type checkers import does not count."""
    code = measure()
    modules = {f"own/{name}".rpartition(".")[0].removesuffix("/__init__").replace("/", ".") for name in FILES}
    assert {*code.files} == modules - {"own.types_only", "own.not_imported"}
    assert code.libraries == {"functools", "numpy", "typing"}
    path, content = code.sources["own.late"]
    assert path is not None
    assert (path.name, content.decode()) == ("late.py", FILES["late.py"])


def test_an_edit_that_this_process_does_not_execute_does_not_count(measure: Measure, tmp_path: Path) -> None:
    before, loaded = measure(), hold_loaded(is_own)
    path = tmp_path / "own" / "final.py"
    path.write_text(path.read_text().replace("x + 1", "x + 2"))
    assert (read_code(load().Method, is_own), hold_loaded(is_own)) == (before, loaded)
    importlib.reload(sys.modules["own.final"])
    assert hold_loaded(is_own) != loaded
    assert read_code(load().Method, is_own).sha256 != before.sha256


def test_an_edit_before_the_first_look_is_refused(measure: Measure, tmp_path: Path) -> None:
    """Whether the old or the new text runs cannot be known, whatever the time of modification says."""
    measure()
    importlib.reload(sys.modules["own.final"])
    path = tmp_path / "own" / "final.py"
    times = path.stat()
    while path.stat().st_ctime_ns <= find_import_time(
        "own.final"
    ):  # a file's clock ticks every few milliseconds
        path.write_text(path.read_text())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    hold_loaded(is_own)  # no error for classes that do not use it
    assert read_code(importlib.import_module("own.base").Base, is_own).files.keys() == {
        "own",
        "own.base",
        "own.registry",
    }
    with pytest.raises(ChangedFileError, match=r"final\.py was edited after own\.final was imported; start"):
        read_code(load().Method, is_own)


def test_a_class_of_a_script_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in ("class Mine: pass\nprint(1)\n", "class Mine: pass\nprint(2)\n"):
        script = ModuleType("__main__")
        script.__file__ = str(tmp_path / f"{len(found)}.py")
        Path(script.__file__).write_text(text)
        monkeypatch.setattr(imports, "STARTED", time.time_ns())  # as if kvbench were imported by the script
        monkeypatch.setitem(sys.modules, "__main__", script)
        found.append(read_code(type("Mine", (), {"__module__": "__main__"}), lambda name: name == "__main__"))
    assert [[*code.files] for code in found] == [["__main__"]] * 2
    assert found[0].sha256 != found[1].sha256


def test_cells_of_a_notebook_are_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell replaces it
    shell = InteractiveShell()

    def read() -> str:
        return read_code(shell.user_ns["Mine"], lambda module: module == "__main__").sha256

    try:
        shell.run_cell("RATE = 2\nprint(RATE)")
        shell.run_cell("def scale(x):\n    return RATE * x\n\ndef unused(x):\n    return x")
        shell.run_cell("class Mine:\n    def keep(self, view):\n        return scale(view)\n\nMine()")
        found = [read()]
        for cell in (
            "1 + 1",
            "def unused(x):\n    return -x",
            "RATE = 3",
            "def scale(x):\n    return -x * RATE",
        ):
            shell.run_cell(cell)
            found.append(read())
    finally:
        InteractiveShell.clear_instance()
    assert [one == before for before, one in pairwise(found)] == [True, True, False, False]


def test_a_class_without_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"own\.Made: has no Python source"):
        read_code(type("Made", (), {"__module__": "own"}), is_own)
