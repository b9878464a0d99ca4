"""retention.json: the share of each source's tokens that every head holds at the end (docs/results_schema.md)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.retention import Held, measure_shares
from kvbench.eval.protocol.records import read_fields

SCHEMA_VERSION = 1
FILE = "retention.json"
MAX_BINS = 32
"""Sources of a text, its prompt included."""


class Source(NamedTuple):
    """Tokens of positions `start` to `stop`, and what they are."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True)
class Retention:
    """Contents of the cache at the beginning of the last segment, for the first batch of prompts.

    Attributes:
        segment: index of that segment; of texts that all ended early, of the one that ran then.
        sources: labels of the sources.
        tokens: of each source; a mean over the sequences where prompts differ in length.
        kept: [L][H][sources], share of a source's tokens that a head holds, a mean over the sequences.
        prompts: how many the batch had.
    """

    segment: int
    sources: tuple[str, ...]
    tokens: tuple[float, ...]
    kept: tuple[tuple[tuple[float, ...], ...], ...]
    prompts: int

    def to_json(self) -> str:
        """Return the contents of retention.json."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, allow_nan=False) + "\n"


def read_retention(folder: Path) -> Retention | None:
    """Read what a run folder says of what was kept; None where it says nothing, as folders of older versions.

    Raises:
        ConfigError: the file is damaged, or of another schema version.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = parse_json(path.read_text(encoding="utf-8"), finite=True)
        found = read_fields(Retention, values)
        if values["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {values['schema_version']}, this program reads {SCHEMA_VERSION}"
            )
        count = len(found.sources)
        if len(found.tokens) != count or any(len(head) != count for layer in found.kept for head in layer):
            raise ValueError("not a number for each source")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it; tables leave it out") from None
    return found


def measure_retention(held: Held, spec: ModelSpec, prompts: int) -> Retention | None:
    """Work out what was held of each source; None where a model has one segment, before which there is nothing.

    Args:
        held: what this process's cache held as the last segment began.
        spec: shapes of this process's share of the model.
        prompts: of the batch.
    """
    sources = list_sources(spec, held.segment)
    if not sources:
        return None
    shares = measure_shares(held, spec.heads, [*(source.start for source in sources), sources[-1].stop])
    tokens = [round(count, 3) for count in shares.tokens.tolist()]
    return Retention(
        held.segment.index,
        tuple(source.label for source in sources),
        tuple(int(count) if count.is_integer() else count for count in tokens),
        tuple(
            tuple(tuple(round(share, 6) for share in head) for head in layer)
            for layer in shares.kept.tolist()
        ),
        prompts,
    )


def join_heads(shares: Sequence[Retention]) -> Retention:
    """Join what several processes held, each of its heads of every layer, which follow each other."""
    layers = zip(*(share.kept for share in shares), strict=True)
    return replace(shares[0], kept=tuple(tuple(head for part in layer for head in part) for layer in layers))


def list_sources(spec: ModelSpec, running: Segment) -> list[Source]:
    """Return what came before a segment: scales, or the prompt and the image's rows, or the prompt and bins of a text.

    >>> from kvbench.core.segments import next_token_image
    >>> rows = ModelSpec("rows", 1, 1, 8, next_token_image(2, 12, 4), line=4)
    >>> list_sources(rows, rows.segments[-1])[:2]
    [Source(label='prompt', start=0, stop=2), Source(label='row 1', start=2, stop=6)]
    """
    if spec.family == "next-scale":
        before = spec.segments[: running.index]
        return [Source(f"{at.height}x{at.width}", at.start, at.end) for at in before]
    begin, end = spec.segments[0].end, running.start
    if not end:
        return []
    width = spec.line or max(1, ceil((end - begin) / (MAX_BINS - 1)))
    drawn = [(start, min(start + width, end)) for start in range(begin, end, width)]
    return [
        Source("prompt", 0, begin),
        *(
            Source(f"row {row}" if spec.line else _name_bin(start - begin, stop - begin), start, stop)
            for row, (start, stop) in enumerate(drawn, 1)
        ),
    ]


def _name_bin(start: int, stop: int) -> str:
    """Name tokens of a text by their numbers, from 1."""
    return str(stop) if stop == start + 1 else f"{start + 1}-{stop}"
