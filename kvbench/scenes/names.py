"""Names of pictures, captions of a model that is trained on pictures: a CSV file with a line per picture."""

import csv
import io
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import read_text, resolve_path
from kvbench.scenes import grammar
from kvbench.scenes.vocabulary import Vocabulary

LONGEST = 14
"""Maximum number of tokens of a name, including its end token."""
SPLITS = ("train", "held_out")


class Name(NamedTuple):
    """Name of a picture.

    Attributes:
        caption: words in lower case, separated by single spaces.
        category: category of the picture.
        picture: file name of the picture.
        background: name of the colour behind the picture.
        split: `train`, or `held_out` if training leaves the picture out.
    """

    caption: str
    category: str
    picture: str
    background: str
    split: str


def read_names(path: Path) -> tuple[Name, ...]:
    """Read a CSV file with the columns of `Name`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is wrong; the message names the first wrong line.
    """
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    names: dict[str, Name] = {}
    try:
        header = ",".join(next(rows, []))
        if header != ",".join(Name._fields):
            raise ValueError(f"line 1 is {header[:80]!r}, needed: {','.join(Name._fields)}")
        for row in rows:
            if problem := _find_problem(row, names):
                raise ValueError(f"line {rows.line_num}: {problem}")
            names[row[0]] = Name(*row)
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from None
    if not names:
        raise ValueError("contains no names")
    return tuple(names.values())


@cache
def find_vocabulary(captions: str) -> Vocabulary:
    """Return the vocabulary of `scenes`, or of a file of names, whose words are in alphabetical order.

    Raises:
        OSError, ValueError: see `read_names`.
    """
    if captions == "scenes":
        return grammar.VOCABULARY
    path = resolve_path(captions)
    words = {word for name in read_names(path) for word in name.caption.split()}
    return Vocabulary(path.stem, tuple(sorted(words)), LONGEST)


def _find_problem(row: list[str], earlier: dict[str, Name]) -> str:
    """Return why a row is not a name; empty if it is valid."""
    if len(row) != len(Name._fields):
        return f"{len(row)} columns, needed: {len(Name._fields)}"
    caption, *_, split = row
    words = caption.split()
    if not words or caption != " ".join(words).lower():
        return f"{caption[:40]!r} is not words in lower case, separated by single spaces"
    if len(words) >= LONGEST:
        return f"{len(words)} words, at most {LONGEST - 1} are allowed"
    if caption in earlier:
        return f"{caption!r} is also an earlier name"
    return "" if split in SPLITS else f"split {split[:40]!r} must be {' or '.join(SPLITS)}"
