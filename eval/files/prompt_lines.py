"""Prompts in text and JSON lines files, read alike by runs and by the command that scores folders."""

import json
from pathlib import Path

from kvbench.core.files import parse_json

Entry = tuple[int, str, dict[str, object]]
"""Line number, text and metadata of a prompt."""


def read_text(path: Path) -> str:
    r"""Return the text of a file in UTF-8 without its byte order mark; `\r\n` and `\r` become `\n`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    return path.read_text(encoding="utf-8-sig")


def parse_lines(text: str) -> list[Entry]:
    r"""Return the lines of a text that are not blank, stripped. Only `\n` ends a line, U+2028 does not."""
    return [(number, line.strip(), {}) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse_json_lines(text: str) -> list[Entry]:
    """Return `prompt` of each line that is not blank, with the line's fields as metadata.

    Raises:
        ValueError: a line is not an object with a non-empty text `prompt`, or has a lone surrogate.
    """
    entries: list[Entry] = []
    for number, line, _ in parse_lines(text):
        try:
            record = parse_json(line)
            prompt = record["prompt"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} is not a JSON object with `prompt`") from None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"line {number}: `prompt` must be a non-empty text")
        try:
            check_letters(record)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        entries.append((number, prompt, record))
    return entries


def check_letters(value: object) -> None:
    """Raise a ValueError if a JSON value has half of a surrogate pair, which no file in UTF-8 can hold."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        letter = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{letter} is half of a surrogate pair; remove it or complete the pair") from None
