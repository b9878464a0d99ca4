"""Widths of LaTeX tables in Computer Modern, estimated from their letters so that a table fits a page."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvbench.report.latex_letters import LETTER

TEXT_WIDTH = 345.0
"""Points: text width of LaTeX's article class at 10 pt, the narrowest common page of one column."""
COLUMN_GAP = 12.0
"""Points between two columns, twice LaTeX's \\tabcolsep."""
SIZES = {"normalsize": 1.0, "small": 0.925, "footnotesize": 0.85, "scriptsize": 0.8}
"""Widths of letters by font size, relative to 10 pt."""
BOLD = 1.16
"""Width of bold letters, relative to others."""
LETTERS = {
    **dict.fromkeys(".,:;'|!il", 2.8),
    **dict.fromkeys(" ()[]/Ijft", 3.9),
    **dict.fromkeys("acegorsyz0123456789", 5.0),
    **dict.fromkeys("mwMW%", 8.4),
    **dict.fromkeys("±<>=+↑↓†-", 7.8),
}
"""Points of a letter at 10 pt; 5.6 for others in lower case, 7.8 in upper case."""
COMMANDS = {r"\pm": "±", r"\uparrow": "↑", r"\downarrow": "↓", r"\dagger": "†", r"\_": "x", r"\,": "i"}


class Width(NamedTuple):
    """Points of a text at 10 pt: of letters in the size of the table, and of those that are always in script size."""

    text: float
    script: float = 0.0

    def at(self, scale: float) -> float:
        """Return the points in a font size of `SIZES`."""
        return scale * self.text + self.script


def measure(text: str) -> Width:
    """Return the width of a text of LaTeX, without its commands."""
    script = "".join(re.findall(r"\{\\scriptsize((?:[^{}]|\{[^{}]*\})*)\}", text))
    rest = re.sub(r"\{\\scriptsize(?:[^{}]|\{[^{}]*\})*\}", "", text)
    bold = "".join(re.findall(r"\\textbf\{([^{}]*)\}", rest))
    plain = re.sub(r"\\textbf\{[^{}]*\}", "", rest)
    return Width(_add(plain) + BOLD * _add(bold), SIZES["scriptsize"] * _add(script))


def _add(text: str) -> float:
    text = re.sub(rf"\{LETTER}\{{\w+\}}\{{.\}}", "WWi", text)  # its code in tiny letters
    for command, letter in COMMANDS.items():
        text = text.replace(command, letter)
    letters = re.sub(r"\\[a-z]+|[\\{}$_^]", "", text)
    return sum(LETTERS.get(one, 7.8 if one.isupper() else 5.6) for one in letters)


def measure_columns(rows: Sequence[Sequence[str]]) -> list[Width]:
    """Return the width of each column of rows of cells, without gaps."""
    return [max(map(measure, column), key=sum) for column in zip(*rows, strict=True)]


def choose_size(widths: Sequence[Width]) -> str | None:
    """Return the largest font size at which columns fit `TEXT_WIDTH`; None if none does."""
    for size, scale in SIZES.items():
        if sum(width.at(scale) + COLUMN_GAP for width in widths) <= TEXT_WIDTH:
            return size
    return None


def split_columns(widths: Sequence[Width], lead: int) -> list[list[int]]:
    """Return the numbers of columns in blocks that fit `TEXT_WIDTH` in some font size.

    Each block begins with the first `lead` columns. A block has at least one other column.
    """
    blocks: list[list[int]] = [[*range(lead)]]
    for number in range(lead, len(widths)):
        block = blocks[-1]
        if len(block) > lead and choose_size([widths[one] for one in (*block, number)]) is None:
            blocks.append([*range(lead)])
        blocks[-1].append(number)
    return blocks
