"""Source code that decides what a class does: its file and the files that this one imports, as syntax trees."""

import ast
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Lock
from types import FunctionType, ModuleType

from kvbench.core.files import hash_content, hash_values, read_bytes
from kvbench.core.imports import find_import_time

CONSTANTS = (bool, int, float, str, tuple)
UNREAD_FIELDS = frozenset({"kind", "type_comment", "type_ignores"})
"""Fields of syntax trees without effect on what runs."""
NOTEBOOK = "__main__"
PARSING = Lock()
"""Held while a file is parsed: CPython 3.11 counts the depth of the trees of all threads together (gh-106905)."""

Source = tuple[Path | None, bytes]
"""File of a module, None for the cells of a notebook, and its content as this process imported it."""


@dataclass(frozen=True)
class Code:
    """Code that decides what a class does.

    Attributes:
        files: first twelve hex digits of the SHA-256 of each file's syntax tree, or of its bytes if it is not
            Python source, by module.
        libraries: top-level names of the imported packages whose code is not read.
        sources: the files that were read, by module.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    libraries: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """SHA-256 of the files; comments, formatting and docstrings do not count."""
        return hash_values(dict(self.files))


class ChangedFileError(ValueError):
    """A file was edited between its import and the first look at it, so that what runs is unknown."""


_READ: dict[str, tuple[object, object, Path, bytes]] = {}
"""State, import specification, file and content of each module that was read."""


def read_code(cls: type, is_read: Callable[[str], bool]) -> Code:
    """Return the code of a class's module and of every module that it imports, directly or not, anywhere in its file.

    Names in strings, and what other modules assign at run time, are not followed.

    Args:
        cls: class to begin with.
        is_read: whether the code of a module, given by its dotted name, counts; other packages are named.

    Raises:
        ValueError: the class has no source.
        ChangedFileError: a file was edited after it was imported and before it was read.
    """
    begin = cls.__module__
    own = _write_cells(cls) if begin == NOTEBOOK else None
    pending, seen, libraries = [begin], {begin}, set()
    sources: dict[str, Source] = {}
    files: dict[str, str] = {}
    while pending:
        name = pending.pop()
        source = (None, own) if own is not None and name == begin else read_source(name)
        if source is None:
            continue  # a folder without __init__.py, or an optional module that is missing
        sources[name] = source
        files[name], imports = read_tree(name, *source)
        libraries |= {one.partition(".")[0] for one in imports if not is_read(one)}
        found = [one for one in imports if is_read(one) and (one in sys.modules or find_spec(one))]
        used = {part for one in found for part in _list_parents(one)}
        pending += [one for one in used - seen if is_read(one)]
        seen |= used
    if begin not in sources:
        raise ValueError(f"{begin}.{cls.__qualname__}: has no Python source; define the class in a module")
    return Code(dict(sorted(files.items())), frozenset(libraries), sources)


def hold_loaded(is_read: Callable[[str], bool]) -> int:
    """Read the loaded modules that count; return a number that changes if other code would be executed.

    A module is read once after it was loaded: a later edit, which this process does not execute, does not count.
    `importlib.reload` counts, and so does an edit of a module that is not loaded yet.
    """
    for name in {*_READ, *(name for name in [*sys.modules] if is_read(name))}:
        with suppress(ChangedFileError):  # an error for the classes that use it
            read_source(name)
    return hash(tuple((name, str(state)) for name, (state, *_) in sorted(_READ.items())))


def read_source(name: str) -> tuple[Path, bytes] | None:
    """Return a module's file and its content as it was imported, or would be; None if there is no file.

    Raises:
        ChangedFileError: the file was edited after it was imported and before it was read.
    """
    loaded = sys.modules.get(name)
    spec = find_spec(name) if loaded is None else getattr(loaded, "__spec__", None)
    file = getattr(loaded, "__file__", getattr(spec, "origin", None))
    state: object = (file, id(spec))
    if loaded is not None and name in _READ and _READ[name][0] == state:
        return _READ[name][2:]
    path = Path(file) if file is not None else None
    if path is None or not path.is_file():
        return None
    status = path.stat()
    if loaded is None:
        state = path, status.st_size, status.st_ctime_ns
    elif status.st_ctime_ns > find_import_time(name):
        raise ChangedFileError(f"{path} was edited after {name} was imported; start the command again")
    if name not in _READ or _READ[name][0] != state:
        _READ[name] = state, spec, path, read_bytes(path)  # holding `spec` keeps its id from being reused
    return _READ[name][2:]


def find_spec(name: str) -> ModuleSpec | None:
    """Return where a module would be imported from, without importing its parents; None if it is not found."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
    known = sys.modules.get(parent)
    outer = find_spec(parent) if known is None else None
    places = getattr(known, "__path__", None) if outer is None else outer.submodule_search_locations
    if places is None:
        return None
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _list_parents(name: str) -> Iterator[str]:
    """Yield a module and the packages around it, which are executed before it."""
    while name:
        yield name
        name, _, _ = name.rpartition(".")


@cache
def read_tree(name: str, path: Path | None, content: bytes) -> tuple[str, frozenset[str]]:
    """Return 12 hex digits of a file's digest, and the dotted names of modules and objects that it imports.

    The digest is of the syntax tree, without comments, formatting and docstrings.
    """
    try:
        with PARSING:
            tree = ast.parse(content) if path is None or path.suffix == ".py" else None
    except (SyntaxError, ValueError):  # an optional file that no process can import
        tree = None
    if tree is None:
        return hash_content(content)[:12], frozenset()
    is_package = path is not None and path.name == "__init__.py"
    imports = {one for node in _walk(tree) for one in _list_imports(name, is_package, node)}
    return hash_content(describe_tree(tree))[:12], frozenset(imports)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and the statements in it, except code for type checkers only."""
    yield node
    test = getattr(node, "test", None)
    typing = "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))
    for inner in node.orelse if typing and isinstance(node, ast.If) else ast.iter_child_nodes(node):
        if not isinstance(inner, ast.expr):
            yield from _walk(inner)


def _list_imports(module: str, is_package: bool, node: ast.AST) -> Iterator[str]:
    """Yield the dotted names of modules in an import, and of what is imported from them, which may be a module."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    if isinstance(node, ast.ImportFrom):
        parents = module.split(".")[: is_package - node.level or None] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        yield source
        yield from (f"{source}.{one.name}" for one in node.names if one.name != "*")


def describe_tree(node: object) -> str:
    """Return a syntax tree as a string that is equal in every version of Python, without docstrings."""
    if isinstance(node, list):
        return f"[{','.join(map(describe_tree, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and _is_text(value[:1]):
            value = value[1:]  # a docstring
        if isinstance(node, ast.JoinedStr):
            value = [part for part in value if getattr(part, "value", None) != ""]
        if value is not None and value != [] and name not in UNREAD_FIELDS:
            fields.append(f"{name}={describe_tree(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text(body: list[ast.stmt]) -> bool:
    """Return whether the statements are one string, which has no effect."""
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _write_cells(cls: type) -> bytes | None:
    """Return the definitions, constants and imports of a notebook that one of its classes uses, as a source text.

    None if `__main__` is a script, which counts by its file, or has no source.
    """
    space = vars(sys.modules[NOTEBOOK])
    if "__file__" in space:
        return None
    lines: dict[str, str] = {}
    pending = [cls.__name__]
    while pending:
        name = pending.pop()
        if name in lines or name not in space:
            continue
        lines[name] = line = _write_name(name, space[name])
        pending += [node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)]
    return "\n".join(lines[name] for name in sorted(lines)).encode() if lines.get(cls.__name__) else None


def _write_name(name: str, value: object) -> str:
    """Return the statement that binds a name of a notebook: definition, import or constant; else empty."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__}"
    if isinstance(value, CONSTANTS):
        return f"{name} = {value!r}"
    module = getattr(value, "__module__", None)
    if module != NOTEBOOK:
        return f"from {module} import {name}" if module else ""
    members = [value, *vars(value).values()] if isinstance(value, type) else [value]
    codes = [one.__code__ for one in map(_unwrap, members) if isinstance(one, FunctionType)]
    for cell in dict.fromkeys("".join(linecache.getlines(code.co_filename)) for code in codes):
        for statement in ast.parse(cell).body:
            if getattr(statement, "name", None) == name:
                return ast.unparse(statement)
    return ""


def _unwrap(member: object) -> object:
    """Return the function behind a decorator, a property, a class method or a static one."""
    inner = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
    return inspect.unwrap(inner) if callable(inner) else inner
