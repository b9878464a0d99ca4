"""results.json as dataclasses (docs/results_schema.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbench.core.budget import Unit
from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.engine.ledger import Step
from kvbench.eval.protocol.records import read_fields
from kvbench.eval.protocol.scores import Metric, Status

SCHEMA_VERSION = 1
FILE = "results.json"
SIGNED = ("lse_drift",)
"""Costs that may be negative; of all others that is a sign of damage."""
WELL_USED = 0.97
"""Share of the budget below which a method is at a disadvantage that the peak does not show."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the cache. Tokens are summed over layers and heads, for one sequence; bytes are of the largest batch.

    Attributes:
        budget_tokens: capacity B; of a budget in bytes the tokens that a method was given for them.
        peak_tokens: most tokens held, measured after every layer.
        full_tokens: what the full cache holds.
        peak_bytes: storage of keys and values at the peak, as allocated.
        full_bytes: storage of the full cache at the same dtype and batch.
        rebuild_bytes: storage at the worst instant of a rebuild.
        transient_bytes: most bytes of keys and values in flight.
        state_bytes: most bytes a method keeps beside keys and values.
        gpu_peak_bytes: the allocator's peak on a GPU; 0 on a CPU.
        gpu_reserved_bytes: the most that the allocator reserved there, what is in use among it; None on a CPU.
        batch: largest batch that was generated together, prompts.
        paper_full_mib: `full_tokens` in MiB as HeatKV and ScaleKV count them.
        paper_peak_mib: `peak_tokens` in MiB as HeatKV and ScaleKV count them.
        last_tokens: tokens held while the last segment runs, the least of all batches.
        least_share: least share of min(B, all tokens so far) held after any segment.
        lse_drift: nats by which a drop changes the log-sum-exp of watched queries, the lowest mean of all batches; None
            where the method watches none or a batch dropped nothing.
        utilisation: slot utilisation (SU), tokens held over slots of rows as long as the longest one of a sequence, a
            mean over samples; None where no token left.
        regular_tokens: the most that one sequence held if all its rows were as long as the longest, which is what
            Hard-KV's HA-Max allocates for what is kept; None where a sample had no row.
        budget_unit: what the budget counts.
        budget_bytes: the bytes that one sequence may hold; None of a budget in tokens.
        sequence_bytes: most bytes of keys and values that one sequence held, as they are stored.
        full_sequence_bytes: bytes of one sequence's full cache in 16 bits.
        last_bytes: bytes that one sequence held while the last segment ran, the least of all batches.
    """

    budget_tokens: float
    peak_tokens: int
    full_tokens: int
    peak_bytes: int
    full_bytes: int
    rebuild_bytes: int
    transient_bytes: int
    state_bytes: int
    gpu_peak_bytes: int
    gpu_reserved_bytes: int | None = None
    batch: int
    paper_full_mib: float
    paper_peak_mib: float
    last_tokens: int
    least_share: float
    lse_drift: float | None = None
    utilisation: float | None = None
    regular_tokens: int | None = None
    budget_unit: Unit = "tokens"
    budget_bytes: float | None = None
    sequence_bytes: int
    full_sequence_bytes: int
    last_bytes: int

    @property
    def budget(self) -> float:
        """Budget as a fraction of the full cache: of its tokens, or, if it is in bytes, of its bytes in 16 bits."""
        if self.budget_bytes is None:
            return self.budget_tokens / self.full_tokens
        return self.budget_bytes / self.full_sequence_bytes

    @property
    def budget_text(self) -> str:
        """The budget as tables have it: a share of the full cache, and the unit of one in bytes."""
        return f"{self.budget:.4g}" + (" bytes" if self.budget_unit == "bytes" else "")

    @property
    def allowed(self) -> tuple[float, Unit]:
        """Key of runs at the same budget: the rounded fraction and its unit."""
        return round(self.budget, 6), self.budget_unit

    @property
    def byte_peak(self) -> float:
        """Most bytes held as a fraction of the full cache's in 16 bits."""
        return self.sequence_bytes / self.full_sequence_bytes

    @property
    def at_once_bytes(self) -> int:
        """Bytes of the largest batch that the cache may have needed at one time.

        The worst instant of a rebuild, what is in flight and what the method keeps beside, although these may not
        coincide.
        """
        return max(self.peak_bytes, self.rebuild_bytes) + self.transient_bytes + self.state_bytes

    @property
    def exceeded(self) -> bool:
        """Whether more was held than the budget, in its unit."""
        if self.budget_bytes is None:
            return self.peak_tokens > self.budget_tokens
        return self.sequence_bytes > self.budget_bytes

    @property
    def peak(self) -> float:
        """Most tokens held as a fraction of the full cache."""
        return self.peak_tokens / self.full_tokens

    @property
    def last_share(self) -> float:
        """Tokens, or bytes, held while the last segment runs as a fraction of the budget."""
        if self.budget_bytes is None:
            return self.last_tokens / self.budget_tokens
        return self.last_bytes / self.budget_bytes

    @property
    def well_used(self) -> bool:
        """Whether all but 3 % of the budget was in use whenever there was so much to hold."""
        return self.least_share >= WELL_USED


@dataclass(frozen=True)
class Latency:
    """Wall-clock time of generation alone, text to pixels or to text; a text counts as an image.

    Attributes:
        seconds_per_image: mean over images of the time of the batch over the prompts in it.
        seconds_per_image_median: median of the same.
        images_per_second: images over total time.
        batch: largest batch, prompts.
        device: torch device.
        tokens_per_second: tokens of all texts over total time; None of images.
    """

    seconds_per_image: float
    seconds_per_image_median: float
    images_per_second: float
    batch: int
    device: str
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """Outcome of one evaluator of the configuration.

    Attributes:
        settings: its settings, JSON values.
        status: ok, skipped or failed.
        protocol: which definition it follows.
        lacking: what a skipped one missed, each with its remedy.
    """

    settings: object
    status: Status
    protocol: str
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """A finished run.

    Attributes:
        run: name of its folder.
        reference: name of the reference run's folder, beside this one; None for the reference itself.
        method: name in `conf/method`.
        n: samples.
        config: the resolved configuration, JSON values.
        provenance: code, versions and machine; None if it was not recorded.
        memory: what the cache held.
        latency: how long it took.
        evaluated: by name in the configuration.
        metrics: by name.
        steps: what a sequence held after each segment, a mean over samples; empty where no queries are watched.
        finished: UTC time of the last evaluation.
    """

    run: str
    reference: str | None
    method: str
    n: int
    config: Mapping[str, object]
    provenance: Mapping[str, object] | None
    memory: Memory
    latency: Latency
    evaluated: Mapping[str, Evaluated] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    finished: str = ""

    def to_json(self) -> str:
        """Return the contents of results.json."""
        values = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    def setting(self, path: str) -> object:
        """Look a setting up by its dotted path in the configuration; None if there is none."""
        node: object = self.config
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def stored(self) -> str:
        """The `cache_dtype` of stored keys and values; `auto` where the device decided."""
        return str(self.setting("cache_dtype") or "auto")

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.setting("model.name") or "?")

    @property
    def model_label(self) -> str:
        """Name of the model, and that its weights are random where they are."""
        return self.model + (" (random weights)" if self.setting("model.weights") == "random" else "")

    @property
    def prompts_label(self) -> str:
        """Name of the prompt set: that of its file, or of its class in small letters."""
        path = self.setting("prompts.path")
        if path is not None:
            return Path(str(path)).stem
        return str(self.setting("prompts._target_") or "?").rsplit(".", 1)[-1].lower()


@dataclass(frozen=True)
class Outcome:
    """A finished run, or this process's share of one.

    Attributes:
        folder: where it is.
        results: None while other shards are at work.
        reused: nothing had to be done.
    """

    folder: Path
    results: Results | None
    reused: bool = False


def read_results(folder: Path) -> Results | None:
    """Read the results of a run folder; None while there are none.

    Raises:
        ConfigError: the file is damaged, or of another schema version.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    remedy = "delete it and start the run again: its samples are kept"
    try:
        values = parse_json(path.read_text(encoding="utf-8"), finite=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {remedy}") from None
    if isinstance(values, Mapping) and values.get("schema_version") != SCHEMA_VERSION:
        found = values.get("schema_version")
        raise ConfigError(
            f"{path}: has schema_version {found}, this program reads {SCHEMA_VERSION}; use the one that wrote it"
        )
    try:
        results = read_fields(Results, values)
        for name, number in (vars(results.memory) | vars(results.latency) | {"n": results.n}).items():
            if name not in SIGNED and isinstance(number, int | float) and number < 0:
                raise ValueError(f"{name} is {number}")
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); {remedy}") from None
    return results
