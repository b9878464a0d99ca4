"""Prompts from a text, JSON lines or CSV file."""

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.eval.files.prompt_lines import Entry, parse_json_lines, parse_lines
from kvbench.eval.text.string_match import OUTPUTS, check_outputs
from kvbench.prompts.base import Count, Prompt, check_total, leave_out, make_prompts


@dataclass(frozen=True)
class PromptFile:
    """Prompts from a file: lines of a .txt, or `prompt` of a .jsonl or .csv, whose other fields are metadata.

    Attributes:
        path: .txt, .jsonl or .csv.
        count: number of prompts, from the start of the file; None takes all.
        per_prompt: consecutive samples of every prompt, numbered by `image_index` in their metadata.
    """

    path: str
    count: Count | None = None
    per_prompt: Count = 1

    def __post_init__(self) -> None:
        if Path(self.path).suffix not in PARSERS:
            raise ConfigError(f"prompts.path={self.path}: must be .txt, .jsonl or .csv")

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return the first `count` prompts of the file that are not evaluated."""
        return leave_out(replace(self, count=None, per_prompt=1).load(), self.load(), count)

    def load(self) -> list[Prompt]:
        """Read the prompts.

        Raises:
            ConfigError: the file is missing, unreadable or empty, has fewer than `count` prompts or a line without one.
        """
        path = Path(self.path).expanduser()
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompts.path={path}: cannot be read ({error})") from None
        if (null := text.find("\0")) >= 0:
            line = text.count("\n", 0, null) + 1
            raise ConfigError(f"prompts.path={path}: is not text: line {line} has a null character")
        try:
            entries = self._parse(text)
        except ValueError as error:
            raise ConfigError(f"prompts.path={path}: {error}") from None
        if not entries:
            raise ConfigError(f"prompts.path={path}: contains no prompts")
        if self.count is not None and self.count > len(entries):
            raise ConfigError(
                f"prompts.count={self.count}: {path} has {len(entries)} prompts; prompts.count=null takes all"
            )
        entries = entries[: self.count]
        check_total(self.per_prompt * len(entries), "per_prompt", self.per_prompt)
        lines = [number for number, _, _ in entries for _ in range(self.per_prompt)]
        prompts = make_prompts(((text, meta) for _, text, meta in entries), self.per_prompt)
        pairs = zip(prompts, lines, strict=True)
        return [replace(prompt, origin=f"prompts.path={path}: line {line}") for prompt, line in pairs]

    def _parse(self, text: str) -> list[Entry]:
        return PARSERS[Path(self.path).suffix](text)


@dataclass(frozen=True)
class RulerFile(PromptFile):
    """Questions of a .jsonl that RULER's official code writes (Hsieh et al., arXiv:2404.06654), with their `outputs`.

    `input` ends with the beginning of the answer; newer files have the beginning in `answer_prefix`.
    """

    def _parse(self, text: str) -> list[Entry]:
        entries: list[Entry] = []
        for number, asked, record in parse_json_lines(text, "input"):
            meta = {key: value for key, value in record.items() if key != "input"}
            try:
                check_outputs(meta.get(OUTPUTS))
            except ValueError as error:
                raise ValueError(f"line {number} is not of RULER's form: {error}") from None
            begun = meta.get("answer_prefix", "")
            if not isinstance(begun, str):
                raise ValueError(f"line {number}: `answer_prefix` must be a string")
            entries.append((number, asked + begun, meta))
        return entries


def _parse_table(text: str) -> list[Entry]:
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # a prompt may be a whole book
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        lines = [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num} cannot be read ({error})") from None
    if "prompt" not in (rows.fieldnames or ()):
        raise ValueError("the first line has no column `prompt`")
    if len(set(rows.fieldnames or ())) < len(rows.fieldnames or ()):
        raise ValueError("the header repeats a column")
    entries: list[Entry] = []
    for number, row in lines:
        if None in row or not (row["prompt"] or "").strip():
            raise ValueError(f"line {number} has no prompt, or too many columns")
        entries.append((number, row["prompt"].strip(), dict(row)))
    return entries


PARSERS = {"": parse_lines, ".txt": parse_lines, ".jsonl": parse_json_lines, ".csv": _parse_table}
"""Function from the content of a prompt file to its entries, by suffix."""
