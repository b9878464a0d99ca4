"""Prompts in text and JSON lines files, for runs and for the command that scores folders."""

import json
import math
import re
from collections.abc import Mapping, Sequence

from kvbench.core.files import MAX_INTEGER, MAX_NUMBER, parse_json

Entry = tuple[int, str, dict[str, object]]
"""Line number, text and metadata of a prompt."""
MAX_DEPTH = 64
"""Maximum number of levels of nested lists and objects in a line."""


def parse_lines(text: str) -> list[Entry]:
    r"""Return the non-blank lines of a text, stripped and without metadata; only `\n` ends a line, U+2028 does not."""
    return [(number, line.strip(), {}) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse_json_lines(text: str, key: str = "prompt") -> list[Entry]:
    """Return the field `key` of each non-blank line, with all fields of the line as metadata.

    Raises:
        ValueError: a line is not an object with a non-empty string under the key, or `check_record` fails.
    """
    entries: list[Entry] = []
    for number, line, _ in parse_lines(text):
        try:
            record = parse_json(line)
            value = record[key]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} is not a JSON object with `{key}`") from None
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"line {number}: `{key}` must be a non-empty string")
        check_record(number, line, record)
        entries.append((number, value, record))
    return entries


def check_record(number: int, line: str, record: Mapping[str, object]) -> None:
    """Check that files of a run can hold the values `record` of a line of JSON.

    Raises:
        ValueError: an object repeats a key, values are nested too deeply, a number is not finite or too large for a
            run's files, or `check_letters` fails.
    """
    try:
        _check_values(record, MAX_DEPTH)
        json.loads(line, object_pairs_hook=_check_keys)
        check_letters(record)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _check_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key `{twice}` is repeated; remove one")
    return record


def _check_values(value: object, depth: int) -> None:
    if depth < 0:
        raise ValueError(f"lists and objects are nested in more than {MAX_DEPTH} levels; flatten them")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number that JSON can hold; use null")
    if isinstance(value, int | float) and abs(value) > (
        MAX_INTEGER if isinstance(value, int) else MAX_NUMBER
    ):
        raise ValueError(f"{value!s:.20} is too large for a number; write a string")
    if isinstance(value, Mapping):
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_values(item, depth - 1)


def check_letters(value: object) -> None:
    """Raise a ValueError for half of a surrogate pair or a null character in a JSON value, which no text file holds."""
    written = json.dumps(value, ensure_ascii=False, default=str)
    try:
        written.encode()
    except UnicodeEncodeError as error:
        letter = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{letter} is half of a surrogate pair; remove it or complete the pair") from None
    if re.search(r"(?<!\\)(?:\\\\)*\\u0000", written):
        raise ValueError("\\u0000 is a null character; remove it")
