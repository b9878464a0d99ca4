"""results.json as dataclasses (docs/results_schema.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbench.core.budget import BudgetUnit
from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.core.storage import select_used
from kvbench.engine.ledger import Step
from kvbench.eval.files.prompt_lines import check_letters
from kvbench.eval.protocol.records import read_fields
from kvbench.eval.protocol.scores import Metric, Status
from kvbench.runs.record.earlier import SCHEMA_VERSION, EarlierRun
from kvbench.runs.record.sanity import check_results

FILE = "results.json"
MAX_LOAD = 1.2
"""Threads per processor above which a machine is busy."""
NEUTRAL = (
    "tensor_parallel", "default_alpha", "default_tau", "default_leading", "default_prompts", "default_eval",
    "default_file_eval", "default_windows", "default_base",
)  # fmt: skip
"""Settings of a model that change no sample: rounding, and defaults that other groups have as settings of their own."""
WELL_USED = 0.97
"""Share of the budget below which a method has a disadvantage that the peak does not show."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the cache: tokens of one sequence over all layers and heads, bytes of the largest batch.

    Attributes:
        budget_tokens: capacity B; for a byte budget, the tokens that the method was given.
        peak_tokens: peak tokens, measured after every layer.
        full_tokens: tokens of the full cache.
        peak_bytes: peak storage of keys and values, as allocated.
        full_bytes: storage of the full cache at the same dtype and batch.
        rebuild_bytes: peak storage during a rebuild.
        transient_bytes: peak bytes of keys and values in flight.
        state_bytes: peak bytes of a method's state.
        gpu_peak_bytes: the allocator's peak on a GPU; 0 on a CPU.
        gpu_reserved_bytes: peak bytes that the allocator reserved on a GPU; None on a CPU.
        batch: largest batch, prompts.
        paper_full_mib: `full_tokens` in MiB as HeatKV and ScaleKV count them.
        paper_peak_mib: `peak_tokens` in MiB as HeatKV and ScaleKV count them.
        last_tokens: tokens held while the last segment runs, minimum over samples; for texts, held at the end of the
            longest text.
        least_share: minimum share of min(B, all tokens so far) held after a segment.
        lse_drift: mean change, in nats, of the log-sum-exp of watched queries by drops, minimum over batches; None if
            the method watches no queries or a batch dropped nothing.
        utilisation: slot utilisation (SU): tokens held over slots if all rows were as long as the sequence's longest,
            mean over samples; None if no token was held.
        regular_tokens: peak tokens of a sequence if all rows were as long as the longest, as Hard-KV's HA-Max
            allocates; None if a sample had no rows.
        budget_unit: unit of the budget.
        budget_bytes: bytes that one sequence may hold; None for a token budget.
        sequence_bytes: peak bytes of keys and values of one sequence, as stored.
        full_sequence_bytes: bytes of one sequence's full cache in 16 bits.
        last_bytes: bytes that one sequence held when it held `last_tokens`.
        bytes_read: bytes that attention reads from the cache for an image, or for a token of texts, mean over images or
            over all tokens, all sequences of a prompt together; None if a sample lacks it.
        protected_drops: slots of score +inf that were dropped because a row's capacity was smaller, summed over layers,
            segments and samples; None if none were.
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
    budget_unit: BudgetUnit = "tokens"
    budget_bytes: float | None = None
    sequence_bytes: int
    full_sequence_bytes: int
    last_bytes: int
    protected_drops: int | None = None
    bytes_read: float | None = None

    @property
    def budget(self) -> float:
        """Budget as a fraction of the full cache: of its tokens, or of its bytes in 16 bits."""
        if self.budget_bytes is None:
            return self.budget_tokens / self.full_tokens
        return self.budget_bytes / self.full_sequence_bytes

    @property
    def budget_text(self) -> str:
        """Budget for tables: a fraction of the full cache, with its unit if in bytes."""
        return f"{self.budget:.4g}" + (" bytes" if self.budget_unit == "bytes" else "")

    @property
    def allowed(self) -> tuple[float, BudgetUnit]:
        """Key of runs with equal budgets: the rounded fraction and its unit."""
        return round(self.budget, 6), self.budget_unit

    @property
    def byte_peak(self) -> float:
        """Peak bytes as a fraction of the full cache's in 16 bits."""
        return self.sequence_bytes / self.full_sequence_bytes

    @property
    def at_once_bytes(self) -> int:
        """Upper bound of the cache's bytes: rebuild, data in flight and state at their peaks."""
        return max(self.peak_bytes, self.rebuild_bytes) + self.transient_bytes + self.state_bytes

    @property
    def exceeded(self) -> bool:
        """Whether the peak of one sequence exceeds the budget, both in tokens or both in bytes."""
        if self.budget_bytes is None:
            return self.peak_tokens > self.budget_tokens
        return self.sequence_bytes > self.budget_bytes

    @property
    def peak(self) -> float:
        """Peak tokens as a fraction of the full cache."""
        return self.peak_tokens / self.full_tokens

    @property
    def last_share(self) -> float:
        """Tokens (or bytes) held while the last segment runs, as a fraction of the budget."""
        if self.budget_bytes is None:
            return self.last_tokens / self.budget_tokens
        return self.last_bytes / self.budget_bytes

    @property
    def well_used(self) -> bool:
        """Whether at least 97 % of the budget was used whenever enough tokens existed."""
        return self.least_share >= WELL_USED

    @property
    def lacks_tokens(self) -> bool:
        """Whether the budget is not in use at the end because there are fewer tokens, as in a short text."""
        return self.well_used and self.last_share < WELL_USED


@dataclass(frozen=True)
class Latency:
    """Wall-clock time of generation, from text to pixels or to text; a text counts as an image.

    Values are of the samples that ran under the condition (batch size, kind of device, machine, load) most common in
    the run.

    Attributes:
        seconds_per_image: mean time of a batch divided by its prompts.
        seconds_per_image_median: median time of a batch divided by its prompts.
        images_per_second: images over total time.
        batch: batch size, prompts.
        device: torch device.
        machine: processor that generated these samples.
        samples: number of these samples.
        tokens_per_second: tokens of these texts over total time; None for images.
        others: number of samples that ran under other conditions and are left out.
        busy: whether these samples ran beside other work: more than `MAX_LOAD` threads per processor.
    """

    seconds_per_image: float
    seconds_per_image_median: float
    images_per_second: float
    batch: int
    device: str
    machine: str
    samples: int
    tokens_per_second: float | None = None
    others: int = 0
    busy: bool = False

    @property
    def mark(self) -> str:
        """`~` for a time beside other work, or without samples of other conditions; else empty."""
        return "~" if self.others or self.busy else ""


@dataclass(frozen=True)
class Evaluated:
    """Outcome of one evaluator of the configuration.

    Attributes:
        settings: its settings, JSON values.
        status: ok, skipped or failed.
        protocol: definition that it follows.
        lacking: missing requirements of a skipped evaluator, each with its remedy.
        inputs: digests of the metadata and reference files that it reads, see `hash_inputs`.
    """

    settings: object
    status: Status
    protocol: str
    lacking: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)


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
        memory: memory of the cache.
        latency: times of generation.
        evaluated: outcomes of evaluators by config name.
        metrics: metrics by name.
        steps: contents of a sequence after each segment, mean over samples; empty if no queries are watched.
        finished: UTC time of the last evaluation.
        overrides: overrides that compose the run (`kvbench.runs.record.repeat`); None if they are not recorded.
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
    overrides: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """Return the contents of results.json."""
        values = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    def setting(self, path: str) -> object:
        """Return a setting by its dotted path in the configuration; None if it is missing."""
        node: object = self.config
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def stored(self) -> str:
        """The setting `cache_dtype`."""
        return str(self.setting("cache_dtype"))

    @property
    def storage(self) -> dict[str, object]:
        """The settings of low-bit storage that the run used; none in 16 or 32 bits."""
        settings = self.setting("storage")
        return select_used(settings, self.stored) if isinstance(settings, Mapping) else {}

    @property
    def noise(self) -> str:
        """The kind of noise, `stream` or `counter`."""
        return str(self.setting("noise"))

    @property
    def budget_text(self) -> str:
        """Budget for tables: tokens per head if it was given as such, otherwise a fraction of the full cache."""
        given = self.setting("budget")
        in_tokens = self.memory.budget_unit == "tokens" and self.memory.budget < 1
        if in_tokens and isinstance(given, (int, float)) and given > 1:
            return f"{given:g}"
        return self.memory.budget_text

    @property
    def model(self) -> str:
        """Name of the model, `model.name`."""
        return str(self.setting("model.name") or "?")

    @property
    def model_label(self) -> str:
        """Name of the model, marked if its weights are random."""
        return self.model + (" (random weights)" if self.setting("model.weights") == "random" else "")

    @property
    def prompts_label(self) -> str:
        """Name of the prompt set: its file's stem, or its class in lower case."""
        path = self.setting("prompts.path")
        if path is not None:
            return Path(str(path)).stem
        return str(self.setting("prompts._target_") or "?").rsplit(".", 1)[-1].lower()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run, or of this process's share.

    Attributes:
        folder: folder of the run.
        results: None while other processes work on the run.
        reused: whether the run was already finished.
    """

    folder: Path
    results: Results | None
    reused: bool = False


def read_results(folder: Path) -> Results | None:
    """Return the results of a run folder; None if it has no results.json yet.

    Raises:
        EarlierRun: an earlier version wrote the file.
        ConfigError: the file is damaged, or a later version wrote it.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    remedy = "delete it and start the run again: its samples are kept"
    try:
        content = read_text(path)
        values = parse_json(content, finite=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {remedy}") from None
    if isinstance(values, Mapping) and values.get("schema_version") != SCHEMA_VERSION:
        found = values.get("schema_version")
        if found == 1:
            raise EarlierRun(path)
        raise ConfigError(
            f"{path}: has schema_version {found}, this program reads {SCHEMA_VERSION}; use the one that wrote it"
        )
    try:
        results = read_fields(Results, values)
        if "\\u" in content:  # characters that UTF-8 cannot hold are escaped like this
            check_letters(values)
        check_results(vars(results))
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); {remedy}") from None
    return results
