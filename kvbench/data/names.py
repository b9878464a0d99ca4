"""Cleaning of names, and of text for output."""

MAX_LETTERS = 80
"""Maximum number of characters of a name."""


def clean_name(value: object, longest: int = MAX_LETTERS) -> str | None:
    """Return a name without spaces around it; None if it is empty, too long, or has unprintable characters."""
    name = value.strip() if isinstance(value, str) else ""
    return name if name and len(name) <= longest and name.isprintable() else None


def make_writable(text: str) -> str:
    r"""Return a text in which characters without UTF-8, halves of surrogate pairs, are escaped as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def make_printable(text: str) -> str:
    """Return a text with `?` for unprintable characters, such as those that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
