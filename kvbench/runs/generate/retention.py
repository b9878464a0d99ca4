"""retention.json: shares of each source's tokens that heads hold at the end (docs/results_schema.md)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.core.segments import ModelSpec, Segment
from kvbench.eval.protocol.records import read_fields

if TYPE_CHECKING:  # imports torch, which reading runs does not need
    from kvbench.engine.retention import CacheSnapshot

SCHEMA_VERSION = 1
FILE = "retention.json"
MAX_BINS = 32
"""Maximum number of sources of a text, including its prompt."""


class TokenSource(NamedTuple):
    """Labelled tokens at positions `start` to `stop`, exclusive."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True)
class Retention:
    """Contents of the cache at the beginning of the last segment, for the first batch of prompts.

    Attributes:
        segment: index of that segment, or of the last one that ran if all texts ended early.
        sources: labels of the sources.
        tokens: tokens of each source, mean over sequences.
        kept: [L][H][sources], share of a source's tokens that a head holds, mean over sequences.
        prompts: prompts of the batch.
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
    """Read the retention of a run; None if it has none.

    Raises:
        ConfigError: the file is damaged, or has another schema version.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = parse_json(read_text(path), finite=True)
        retention = read_fields(Retention, values)
        if values["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {values['schema_version']}, this version reads {SCHEMA_VERSION}"
            )
        count = len(retention.sources)
        if len(retention.tokens) != count or any(
            len(head) != count for layer in retention.kept for head in layer
        ):
            raise ValueError("not one number for each source")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it; tables leave it out") from None
    return retention


def measure_retention(held: "CacheSnapshot", spec: ModelSpec, prompts: int) -> Retention | None:
    """Return the retention of a batch in this process; None if nothing precedes the last segment."""
    from kvbench.engine.retention import measure_shares  # imports torch

    sources = list_sources(spec, held.segment)
    if not sources:
        return None
    edges = [*(source.start for source in sources), sources[-1].stop]
    kept, tokens = measure_shares(held, spec.heads, edges)
    counts = [round(count, 3) for count in tokens.tolist()]
    return Retention(
        held.segment.index,
        tuple(source.label for source in sources),
        tuple(int(count) if count.is_integer() else count for count in counts),
        tuple(tuple(tuple(round(share, 6) for share in head) for head in layer) for layer in kept.tolist()),
        prompts,
    )


def join_heads(shares: Sequence[Retention]) -> Retention:
    """Concatenate the heads of each layer that tensor-parallel processes hold, in order of rank."""
    layers = zip(*(share.kept for share in shares), strict=True)
    return replace(
        shares[0], kept=tuple(tuple(head for heads in layer for head in heads) for layer in layers)
    )


def list_sources(spec: ModelSpec, running: Segment) -> list[TokenSource]:
    """Return the sources before a segment: scales, or the prompt with rows of the image or bins of the text.

    >>> from kvbench.core.segments import next_token_image
    >>> rows = ModelSpec("rows", 1, 1, 8, next_token_image(2, 12, 4), line=4)
    >>> list_sources(rows, rows.segments[-1])[:2]
    [TokenSource(label='prompt', start=0, stop=2), TokenSource(label='row 1', start=2, stop=6)]
    """
    if spec.family == "next-scale":
        before = spec.segments[: running.index]
        return [TokenSource(f"{scale.height}x{scale.width}", scale.start, scale.end) for scale in before]
    begin, end = spec.segments[0].end, running.start
    if not end:
        return []
    width = spec.line or max(1, ceil((end - begin) / (MAX_BINS - 1)))
    bins = [(start, min(start + width, end)) for start in range(begin, end, width)]
    return [
        TokenSource("prompt", 0, begin),
        *(
            TokenSource(f"row {row}" if spec.line else _name_bin(start - begin, stop - begin), start, stop)
            for row, (start, stop) in enumerate(bins, 1)
        ),
    ]


def _name_bin(start: int, stop: int) -> str:
    """Return the label of a text's tokens, numbered from 1."""
    return str(stop) if stop == start + 1 else f"{start + 1}-{stop}"
