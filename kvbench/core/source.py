"""Source code that decides what a class does: its definition and all that it uses, read from syntax trees."""

import ast
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

from kvbench.core.files import hash_content, hash_values, read_bytes

Definition = tuple[str, str]
"""Module and top-level name; an empty name is the whole module."""
CONSTANTS = (bool, int, float, str, tuple)
COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match)
UNREAD_FIELDS = frozenset({"kind", "type_comment", "type_ignores"})
"""Fields of syntax trees without effect on what runs."""


@dataclass(frozen=True)
class Code:
    """Code that decides what some classes do.

    Attributes:
        definitions: twelve hex digits of the SHA-256 of each definition's syntax tree, by `module:name`.
        libraries: top-level names of the imported packages whose code is not read.
        sources: content of the files that hold the definitions, as it was read, by module; the path is None for cells
            of a notebook.
    """

    definitions: Mapping[str, str] = field(default_factory=dict)
    libraries: frozenset[str] = frozenset()
    sources: Mapping[str, tuple[Path | None, bytes]] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """SHA-256 of the definitions; comments, formatting and docstrings do not count."""
        return hash_values(dict(self.definitions))


@dataclass(frozen=True)
class _Module:
    """A module's statements by the name that they bind, its imports by name, and its other statements."""

    name: str
    path: Path | None
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, Definition] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)


_READ: dict[str, tuple[object, object, Path | None, bytes | None]] = {}
"""State (`_find_state`), import specification, file and content of each module that was read."""


def read_loaded(is_read: Callable[[str], bool]) -> int:
    """Read the loaded modules that count, and return a number that changes if other code would be executed.

    A module is read once after it was loaded, so that a later edit, which this process does not execute, does not
    count; `importlib.reload` counts, and so does an edit of a module that is not loaded yet.
    """
    for name in {*_READ, *(name for name in [*sys.modules] if is_read(name))}:
        _read_source(name)
    return hash(tuple((name, str(state)) for name, (state, *_) in sorted(_READ.items())))


def read_code(
    classes: Iterable[type],
    is_read: Callable[[str], bool],
    replace: Callable[[str, str], str | None] = lambda *_: None,
) -> Code:
    """Return the definitions of classes and, recursively, of everything that they name.

    Names in strings, and what other modules assign at run time, are not followed.

    Args:
        classes: where to begin.
        is_read: whether the code of a module, given by its dotted name, counts.
        replace: text in place of the tree of a definition (module, name) and of all that it uses; None to read it.

    Raises:
        ValueError: a class has no Python source.
    """
    pending = [(one.__module__, one.__qualname__.partition(".")[0]) for one in classes]
    for name, definition in pending:
        if (module := _read(name)) is None or definition not in module.bindings:
            raise ValueError(f"{name}.{definition}: has no Python source; define the class in a module")
    definitions, libraries, sources, seen = {}, set(), {}, set(pending)
    while pending:
        name, definition = pending.pop()
        if not is_read(name):
            libraries.add(name.partition(".")[0])
        elif (text := replace(name, definition)) is not None:
            definitions[f"{name}:{definition}"] = text
        elif (module := _read(name)) is not None:
            statements = _find_statements(module, definition)
            if statements:
                sources[name] = module.path, _read_source(name)[1] or b""
                definitions[f"{name}:{definition}"] = hash_content(*map(describe_tree, statements))[:12]
            used = {place for one in statements for place in _list_used(module, one, is_read)}
            if definition in module.imports:
                used.add(_resolve(module.imports[definition], [], is_read))
            pending += used - seen
            seen |= used
    return Code(dict(sorted(definitions.items())), frozenset(libraries), sources)


def describe_tree(node: object) -> str:
    """Return a syntax tree as text that is the same in every version of Python; docstrings are left out."""
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
    """Return whether statements are one text, which has no effect."""
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _read(name: str) -> _Module | None:
    """Return a module; None if it does not exist or is not Python source."""
    path, content = _read_source(name)
    return None if content is None else _parse(name, path, content)


def _read_source(name: str) -> tuple[Path | None, bytes | None]:
    """Return a module's file and its content; None if there is none."""
    state = _find_state(name)
    if name not in _READ or _READ[name][0] != state:
        path, loaded = _find_path(name), sys.modules.get(name)
        spec = getattr(loaded, "__spec__", None)  # held, so that no other one gets its id
        content = read_bytes(path) if path is not None else _collect_cells(loaded)
        _READ[name] = state, spec, path, content
    return _READ[name][2:]


def _find_state(name: str) -> object:
    """Return what changes when other code of a module would be executed: its file, or another import of it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return id(loaded.__spec__) if hasattr(loaded, "__file__") else _collect_cells(loaded)
    path = _find_path(name)
    return None if path is None else (path, path.stat().st_size, path.stat().st_mtime_ns)


def _find_path(name: str) -> Path | None:
    """Return the source file of a module, which may be loaded or not; None if there is none."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, AttributeError, ValueError):  # a parent is missing or is not a package
            spec = None
        file = None if spec is None else spec.origin
    return Path(file) if file is not None and file.endswith(".py") and Path(file).is_file() else None


def _collect_cells(module: ModuleType | None) -> bytes | None:
    """Return the cells of a notebook that define what `__main__` holds, and its constants; None for other modules."""
    if module is None or module.__name__ != "__main__":
        return None
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = [value for value in values.values() if getattr(value, "__module__", None) == "__main__"]
    members = [*own, *(inner for one in own if isinstance(one, type) for inner in vars(one).values())]
    codes = [one.__code__ for one in members if isinstance(one, FunctionType)]
    cells = ["".join(linecache.getlines(name)) for name in dict.fromkeys(code.co_filename for code in codes)]
    constants = [f"{name} = {value!r}" for name, value in values.items() if isinstance(value, CONSTANTS)]
    return "\n".join([*cells, *constants]).encode() if any(cells) else None


@cache
def _parse(name: str, path: Path | None, content: bytes) -> _Module:
    """Return a module's statements, sorted by what they bind."""
    module = _Module(name, path)
    for statement in ast.parse(content).body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        inner = list(ast.walk(statement)) if isinstance(statement, COMPOUND) else [statement]
        imports = dict(place for node in inner for place in _list_imports(module, node))
        module.imports.update(imports)
        bound = {text for node in inner for text in _list_bound(node)}
        for text in bound:
            module.bindings.setdefault(text, []).append(statement)
        # What a program or a notebook does is no part of what it defines.
        if not bound and not imports and not _is_text([statement]) and name != "__main__":
            module.effects.append(statement)
    return module


def _list_imports(module: _Module, node: ast.AST) -> Iterator[tuple[str, Definition]]:
    """Yield the names that an import binds, with what they are."""
    if isinstance(node, ast.Import):
        for one in node.names:
            whole = one.asname or one.name.partition(".")[0]
            yield whole, (one.name if one.asname else whole, "")
    if isinstance(node, ast.ImportFrom):
        for one in node.names:
            yield one.asname or one.name, (_name_source(module, node), "" if one.name == "*" else one.name)


def _name_source(module: _Module, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that an import reads, which may be relative."""
    if not node.level:
        return node.module or ""
    parents = module.name.split(".")
    parents = parents[
        : len(parents) - node.level + (module.path is not None and module.path.name == "__init__.py")
    ]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _list_bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement, which is no import, binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            yield from (one.id for one in elements if isinstance(one, ast.Name))


def _find_statements(module: _Module, definition: str) -> list[ast.stmt]:
    """Return the statements of a definition, with those that the module executes for every import."""
    if definition in module.bindings:
        return [*module.bindings[definition], *module.effects]
    if definition in module.imports:
        return module.effects
    names = module.bindings if not definition else ["__getattr__"]
    return [one for name in names for one in module.bindings.get(name, ())] + module.effects


def _list_used(module: _Module, statement: ast.stmt, is_read: Callable[[str], bool]) -> Iterator[Definition]:
    """Yield the definitions that a statement names, in its module and in others."""
    imports = module.imports | {
        name: place for node in ast.walk(statement) for name, place in _list_imports(module, node)
    }
    inner: set[int] = set()
    for node in ast.walk(statement):  # outer attributes first: `a.b.c` before its part `a.b`
        root, names = _read_chain(node)
        if root is None or id(root) in inner:
            continue
        inner.add(id(root))
        if root.id in module.bindings:
            yield module.name, root.id
        elif root.id in imports:
            yield _resolve(imports[root.id], names, is_read)
        elif "*" in imports:
            yield imports["*"]


def _read_chain(node: ast.AST) -> tuple[ast.Name | None, list[str]]:
    """Return the name at the root of `root.a.b` and the attributes; None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node, names) if isinstance(node, ast.Name) else (None, [])


def _resolve(place: Definition, names: list[str], is_read: Callable[[str], bool]) -> Definition:
    """Return the definition that attributes of an import lead to; names of submodules are followed."""
    module, name = place
    path = [*([name] if name else []), *names]
    while path and is_read(module):
        source = _read(module)
        known = source is not None and (path[0] in source.bindings or path[0] in source.imports)
        if known or _find_path(f"{module}.{path[0]}") is None:
            break
        module = f"{module}.{path.pop(0)}"
    return module, path[0] if path else ""
