"""Conversion of results to strict JSON, and of JSON to dataclasses with checked values."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from kvbench.core.config import shorten
from kvbench.core.files import MAX_INTEGER

T = TypeVar("T")
MAX_SHOWN = 40  # characters of a value in a message

_fields, _get_args, _get_origin = cache(fields), cache(get_args), cache(get_origin)


def strict(value: Mapping[str, object]) -> dict[str, object]:
    """Return a mapping as JSON values; non-finite numbers become null, and `nonfinite` is added to count them."""
    count = 0

    def plain(item: object) -> object:
        nonlocal count
        if isinstance(item, Mapping):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if isinstance(item, np.generic):
            return plain(item.item())
        if isinstance(item, float) and not math.isfinite(item):
            count += 1
            return None
        return item

    whole = {str(key): plain(entry) for key, entry in value.items()}
    return {**whole, "nonfinite": count} if count else whole


def read_fields(kind: type[T], values: object, path: str = "") -> T:
    """Build a dataclass and its nested dataclasses from JSON values.

    Unknown keys are ignored: newer versions of a schema add fields.

    Args:
        kind: the dataclass, with fields of JSON types, optionals, literals, tuples, mappings and dataclasses.
        values: JSON object.
        path: keys that lead to the values in their file, such as `memory.peak`, for errors.

    Raises:
        ValueError: a value is missing or has another type; the message names its path.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'the whole'} is {shorten(repr(values), MAX_SHOWN)}, not an object")
    assert is_dataclass(kind)
    arguments = {}
    for field in _fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        if field.name in values:
            arguments[field.name] = _read(field.type, values[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} is missing")
    return kind(**arguments)


def _read(kind: Any, value: object, path: str) -> object:
    if type(value) is kind:  # the common case, which has to be fast
        return value
    if isinstance(kind, UnionType):
        [other] = [option for option in _get_args(kind) if option is not NoneType]
        return None if value is None else _read(other, value, path)
    if is_dataclass(kind) and isinstance(kind, type):
        return read_fields(kind, value, path)
    origin: Any = _get_origin(kind)
    inner = _get_args(kind)
    if origin is tuple and isinstance(value, list):
        return _read_tuple(inner, value, path)
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _read(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int and abs(value) <= MAX_INTEGER:
        return float(value)
    if kind is object or value in inner:  # `inner` holds the values of a literal
        return value
    raise ValueError(f"{path} is {shorten(repr(value), MAX_SHOWN)}, not {kind if inner else kind.__name__}")


def _read_tuple(inner: tuple[Any, ...], value: list[object], path: str) -> tuple[object, ...]:
    kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(value):
        raise ValueError(f"{path} has {len(value)} values, not {len(kinds)}")
    return tuple(_read(kind, item, path) for kind, item in zip(kinds, value, strict=True))
