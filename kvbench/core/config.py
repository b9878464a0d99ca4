"""Type checks of a configuration against the fields of the objects that it configures."""

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from inspect import isabstract
from operator import attrgetter
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvbench.core.files import find_obstacle

CONVERSIONS = ("none", "partial", "object", "all")
"""Accepted values of Hydra's `_convert_`."""
MAX_PROMPTS = 10**6
"""Maximum number of prompts of a run: file names of samples have six digits."""
MAX_SEED = 2**63 - 1
"""Maximum seed, the largest int64."""
MAX_SHOWN = 200
"""Maximum number of characters of a value in a message."""


class UserError(Exception):
    """Error that a user can correct; its message is one line with the remedy."""


class ConfigError(UserError, ValueError):
    """A setting is invalid; the message starts with its key."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, declared beside its type: `Annotated[int, Range(1, 10)]`.

    Attributes:
        least: lower bound, included unless `above`.
        most: upper bound, always included.
        above: the lower bound is excluded.
        odd: even numbers are refused.
    """

    least: float
    most: float = math.inf
    above: bool = False
    odd: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = self.least < value if self.above else self.least <= value
        return is_above and value <= self.most and not (self.odd and value % 2 == 0)

    def __str__(self) -> str:
        bounds = f"{'above' if self.above else 'of at least'} {self.least}"
        bounds += "" if self.most == math.inf else f" and at most {self.most}"
        return f"{bounds}, odd" if self.odd else bounds


Rule = tuple[str, bool, str]
"""A key, whether its value is wrong, and the problem or remedy; for rules that a field's type cannot express."""


def check_rules(rules: Iterable[Rule], owner: object, prefix: str = "") -> None:
    """Check the attributes of an object that the keys of rules name; messages put `prefix` before a key.

    Raises:
        ConfigError: a value is wrong; the message names the first wrong key and its value.
    """
    for key, is_wrong, problem in rules:
        if is_wrong:
            given = attrgetter(key)(owner)
            shown = show(list(given) if isinstance(given, tuple) else given)
            raise ConfigError(f"{prefix}{key}={shown}: {problem}")


def check_range(key: str, value: int, min_: int, max_: int) -> None:
    """Check that a number is in a range.

    Raises:
        ConfigError: the number is outside; the message names the key and the bound.
    """
    if not min_ <= value <= max_:
        bound = f"at least {min_}" if value < min_ else f"at most {max_}"
        raise ConfigError(f"{key}={value}: must be {bound}")


def check_file(key: str, value: str, *suffixes: str) -> None:
    """Check that a file can be written and has one of the suffixes; do not create it.

    Raises:
        ConfigError: the suffix is wrong, the path is a folder, or its folder cannot be written.
    """
    path = Path(value).expanduser()
    if not path.name.endswith(suffixes):
        raise ConfigError(
            f"{key}={shorten(value)}: must be a file name that ends with {' or '.join(suffixes)}"
        )
    if "\0" in value:
        raise ConfigError(f"{key}={shorten(value)}: its name contains a null character")
    try:
        problem = "it is a folder" if path.is_dir() else find_obstacle(path.parent)
    except OSError as error:  # a name that is too long
        problem = str(error)
    if problem is not None:
        raise ConfigError(f"{key}={shorten(value)}: cannot be written ({problem})")


def read_count(variable: str, default: int) -> int:
    """Return the whole number in an environment variable; the default if it is empty or not set.

    Raises:
        ConfigError: the variable has any other value.
    """
    if not (text := os.environ.get(variable)):
        return default
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(
            f"{variable}={shorten(text)}: must be a whole number; unset it, or start with torchrun"
        )
    return int(text)


def check_objects(node: object, key: str) -> None:
    """Check every `_target_` node against the fields of its dataclass or the parameters of its function.

    Raises:
        ConfigError: a key is invalid; the message names the first one.
    """
    for inner, own in list_nodes(node, key):
        _check_object(own, inner)


def list_nodes(value: object, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys and nodes of a configuration that have a `_target_`, outer nodes first; `value` is at `key`."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        parts = ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"[{number}]", item) for number, item in enumerate(value))
    for end, item in parts:
        yield from list_nodes(item, key + end)


def _check_object(node: Mapping[str, object], key: str) -> None:
    path, conversion = node["_target_"], node.get("_convert_", "none")
    if not isinstance(path, str):
        raise ConfigError(f"{key}._target_={show(path)}: must be the dotted path of a class")
    if conversion not in CONVERSIONS:
        raise ConfigError(f"{key}._convert_={show(conversion)}: must be one of {', '.join(CONVERSIONS)}")
    target = import_target(path, key)
    own = {name: value for name, value in node.items() if not name.startswith("_")}
    if isinstance(target, type):
        owner = next(one for one in target.__mro__ if "__init__" in vars(one))
        if "__dataclass_fields__" in vars(owner) and not isabstract(
            target
        ):  # its constructor takes the fields
            check_fields(own, target, f"{key}.")
    elif isinstance(target, FunctionType):
        hints = get_type_hints(target)
        for name, value in own.items():
            if not _fits(value, hints.get(name)):
                raise ConfigError(f"{key}.{name}={show(value)}: must be {_describe(hints[name])}")


def check_part(value: object, target: type, key: str) -> Mapping[str, object]:
    """Check a group of keys against a dataclass's fields and return it; the key of the whole configuration is empty.

    Raises:
        ConfigError: it is not a group, or a key is invalid or missing.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={show(value)}: must be {_describe(target)}")
    prefix = f"{key}." if key else ""
    check_fields(value, target, prefix)
    for field in fields(target):
        if field.default is field.default_factory is MISSING and field.name not in value:
            raise ConfigError(f"{prefix}{field.name}: missing; set it, or keep it as in conf/config.yaml")
    return value


def check_fields(values: Mapping[str, object], target: type, prefix: str) -> None:
    """Check that values are fields of a dataclass and have the fields' types.

    Raises:
        ConfigError: a key is no field, or its value has another type; the message names the first one.
    """
    known = list_types(target)
    for name, value in values.items():
        if name not in known:
            choices = f"there are {', '.join(known)}" if known else "there are none"
            raise ConfigError(f"{prefix}{name}: no such key; {choices}")
        check_value(value, known[name], f"{prefix}{name}")


@lru_cache(maxsize=1024)
def list_types(target: type) -> Mapping[str, object]:
    """Return the types of a dataclass's fields, read once for the entries of a sweep."""
    hints = get_type_hints(target, include_extras=True)
    return {field.name: hints[field.name] for field in fields(target) if field.init}


def check_value(value: object, hint: object, key: str) -> None:
    """Check that a JSON value has the type of a field.

    Raises:
        ConfigError: the type differs; the message names the key, or the first invalid key in it.
    """
    if isinstance(value, Mapping) and isinstance(hint, type) and is_dataclass(hint):
        path, target = value.get("_target_"), None
        if isinstance(path, str):
            target = import_target(path, key)
        if not (isinstance(target, type) and issubclass(target, hint)):
            base = hint.__name__
            raise ConfigError(
                f"{key}._target_={show(path)}: must derive from {base}; choose another with {key}="
            )
    elif isinstance(value, Mapping) and get_origin(hint) in (dict, Mapping):
        for name, item in value.items():
            check_value(item, get_args(hint)[1], f"{key}.{name}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be finite")
    elif not _fits(value, hint):
        raise ConfigError(f"{key}={show(value)}: must be {_describe(hint)}")


_SCALARS: dict[object, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str,), "a path"),
    bool: ((bool,), "true or false"),
    NoneType: ((NoneType,), "null"),
}


def _fits(value: object, hint: object) -> bool:
    """Return whether a JSON value fits a field annotated with `hint`; unknown annotations accept every value."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _fits(value, parts[0]) and value in parts[1]
    if hint in _SCALARS:
        fits = isinstance(value, _SCALARS[hint][0]) and (hint is bool or not isinstance(value, bool))
        return fits and (hint is not float or abs(value) <= sys.float_info.max)  # type: ignore[arg-type]
    if kind in (dict, Mapping) or is_dataclass(hint):
        return isinstance(value, Mapping)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        wanted = list(parts) if kind is tuple and parts[-1] is not Ellipsis else [parts[0]] * len(value)
        return len(value) == len(wanted) and all(map(_fits, value, wanted))
    return True


def _describe(hint: object) -> str:
    """Describe the values that a field annotated with `hint` accepts."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return f"{_describe(parts[0])} {parts[1]}"
    if hint in _SCALARS:
        return _SCALARS[hint][1]
    if kind in (Union, UnionType):
        numbers = (int,) if float in parts and int in parts else ()  # a number may be whole
        return " or ".join(dict.fromkeys(_describe(part) for part in parts if part not in numbers))
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if is_dataclass(hint):
        return f"a group of keys ({', '.join(field.name for field in fields(hint))})"
    if kind in (dict, Mapping):
        return "a group of keys"
    if kind is tuple and parts[-1] is not Ellipsis:
        return f"a list of {len(parts)}: [{', '.join(map(_describe, parts))}]"
    return "a list" + (f" ({_describe(parts[0])} each)" if parts else "")


def show(value: object) -> str:
    """Return a JSON value as on the command line, without the middle of a long value."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shorten(str(value))


def shorten(text: str, length: int = MAX_SHOWN) -> str:
    """Return a string of at most `length` characters, without the middle of a longer string.

    >>> shorten("abcdefghij", 7)
    'ab...ij'
    """
    end = (length - 3) // 2
    return text if len(text) <= length else f"{text[:end]}...{text[len(text) - end :]}"


def quote_prompt(text: str) -> str:
    """Return a prompt in quotes, for messages, without the middle of a long prompt."""
    return shorten(repr(text), 60)


def import_target(path: str, key: str) -> object:
    """Return the class or function that `_target_` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"{key}._target_={path}: cannot be imported ({type(error).__name__}: {error})"
        ) from None
