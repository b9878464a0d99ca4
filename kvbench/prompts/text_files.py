"""Files of whole texts: texts that ship, and a user's own."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.eval.files.prompt_lines import check_letters, parse_json_lines

DOMAINS = ("manuals", "novels", "code", "chat")
"""Domains of the texts that ship, folders of `kvbench/assets/texts`."""

TextEntry = tuple[str, dict[str, object]]
"""A text and its metadata."""


@cache
def read_shipped(domain: str, part: str) -> tuple[TextEntry, ...]:
    """Return the texts of a domain that ship, with their `source`; `part` is `evaluation` or `calibration`."""
    file = files("kvbench") / "assets" / "texts" / domain / f"{part}.jsonl"
    return tuple(_parse_records(file.read_text(encoding="utf-8")))


def read_own(path: Path) -> tuple[TextEntry, ...]:
    """Read a .jsonl with a `text` in each line, a .txt, which is one text, or the .txt files of a folder by name.

    Raises:
        ConfigError: the path is missing, unreadable, empty or of another format, or a line has no text.
    """
    paths = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"prompts.path={path}: the folder has no .txt files")
    entries: list[TextEntry] = []
    for file in paths:
        if file.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"prompts.path={path}: must be .txt, .jsonl or a folder of .txt files")
        try:
            text = read_text(file)
            check_letters(text)
            whole = file.suffix == ".txt"
            entries += [(text, {"source": file.name})] if whole else _parse_records(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompts.path={file}: cannot be read ({error})") from None
    if blank := [number for number, (text, _) in enumerate(entries, 1) if not text.strip()]:
        raise ConfigError(f"prompts.path={path}: text {blank[0]} is empty; remove it")
    if not entries:
        raise ConfigError(f"prompts.path={path}: contains no texts")
    return tuple(entries)


def read_texts(domain: str, path: str | None, part: str) -> tuple[TextEntry, ...]:
    """Return a domain's texts by `read_shipped` if `path` is None, else the user's own texts by `read_own`."""
    return read_shipped(domain, part) if path is None else read_own(Path(path).expanduser())


def _parse_records(content: str) -> list[TextEntry]:
    lines = parse_json_lines(content, "text")
    return [
        (text, {key: value for key, value in record.items() if key != "text"}) for _, text, record in lines
    ]
