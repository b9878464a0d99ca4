"""Names of people, and texts that a file can hold."""

MAX_LETTERS = 80


def clean_name(value: object, longest: int = MAX_LETTERS) -> str | None:
    """Return a name without spaces around it; None if it is empty, too long, or has unprintable characters."""
    name = value.strip() if isinstance(value, str) else ""
    return name if name and len(name) <= longest and name.isprintable() else None


def make_writable(text: str) -> str:
    r"""Return a text with characters that UTF-8 cannot hold, halves of surrogate pairs, as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def make_printable(text: str) -> str:
    """Return a text with `?` for unprintable characters, such as those that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
