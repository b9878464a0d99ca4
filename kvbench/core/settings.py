"""Settings of a run, validated when they are read; other code never sees a raw configuration."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from kvbench.core.budget import UNITS, read_number
from kvbench.core.cards import CARDS
from kvbench.core.claims import LAPSE, MAX_LAPSE
from kvbench.core.config import (
    MAX_PROMPTS,
    MAX_SEED,
    ConfigError,
    Range,
    Rule,
    check_file,
    check_objects,
    check_part,
    check_rules,
    show,
)
from kvbench.core.storage import CHANNEL, CODE_DTYPES, StorageConfig
from kvbench.core.suggestions import suggest

TASKS = (
    "run", "evaluate", "bounds", "choose", "plan", "check", "doctor", "weights", "calibrate", "profile", "train",
    "report", "export", "merge", "dashboard", "work", "status",
)  # fmt: skip
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *CODE_DTYPES)
MAX_REPEATS = 10**9
"""Maximum number of repeats of a measurement, and of seconds of a setting."""
MIN_UNITS = 8
"""Minimum number of prompts before the first look of a race: intervals from fewer prompts are wrong."""
GROUPS = ("model", "method", "protect", "windows", "prompts", "eval", "logger", "train", "sampling", "sweeps")
"""Keys of a configuration that hold objects (`_target_`), names or nothing."""
READING_TASKS = ("report", "dashboard", "export")
"""Tasks that read runs and write to `output`."""
CHOICE_KEYS = (*GROUPS, "storage")
"""Keys of a configuration whose values name configuration files."""
RUN_KEYS = (
    "method", "protect", "windows", "storage", "prompts", "eval", "budget", "budget_unit", "sinks", "seed", "shuffle",
    "batch_size", "cache_dtype", "noise", "cuda_graph", "batch_invariant", "smoke", "calibrate", "sweeps",
)  # fmt: skip
"""Keys and groups of keys, without the model's, that may change the samples, costs or metrics of runs on a device."""

OUTPUT_FILES = {
    "plan.export": (".npz",),
    "calibrate.orders": (".json",),
    "profile.trace": (".json", ".json.gz"),
    "export.policy": (".safetensors",),
}
"""Settings that name a file to write, with the accepted suffixes."""

Count = Annotated[int, Range(1, MAX_PROMPTS)]
Seed = Annotated[int, Range(0, MAX_SEED)]
Seconds = Annotated[float, Range(0, MAX_REPEATS, above=True)]
Delay = Annotated[float, Range(0, MAX_REPEATS)]
"""Seconds of a delay; 0 for none."""


@dataclass(frozen=True)
class Protect:
    """Segments and tokens that methods always keep; files of methods refer to these keys of `conf/protect`."""

    sinks: Annotated[int, Range(0)]
    condensed: Annotated[int, Range(0)]
    initial: Annotated[int, Range(0)]
    leading: Annotated[int, Range(0)]
    first: Annotated[int, Range(0)]


@dataclass(frozen=True)
class Windows:
    """Observed windows of methods, by the keys of `conf/windows`."""

    window: Annotated[int, Range(1)]
    queries: Literal["grid", "last", "uniform"]
    softmax: Literal["all", "prefix"]
    group: Literal["mean", "max"]
    kernel: Annotated[int, Range(1, odd=True)]


@dataclass(frozen=True)
class Shard:
    """Share of a run's blocks that this process takes: block indices congruent to `index` modulo `count`."""

    index: int = 0
    count: Count = 1


@dataclass(frozen=True)
class PlanSettings:
    """Settings of `task=plan`: GPU memory for the largest batch, file of the schedule (.npz), a paper's table."""

    gpu_gib: Annotated[float, Range(0, above=True)] = 80.0
    export: str | None = None
    table: str | None = None


@dataclass(frozen=True)
class CalibrateSettings:
    """Settings of calibrations.

    Attributes:
        count: number of prompts.
        prompts: file of prompts.
        seed: seed of the choice of prompts and of their noise.
        batch_size: prompts generated together; texts are generated one by one.
        orders: order file to write (JSON).
    """

    count: Annotated[int, Range(1, 10**4)] = 10
    prompts: str | None = None
    seed: Seed = 1
    batch_size: Count = 8
    orders: str | None = None


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of `task=profile`.

    Attributes:
        batch_sizes: batch sizes to measure.
        warmup: untimed generations per batch size and cache.
        repeats: timed generations per batch size and cache.
        against_full: also time the full cache, alternating with the method.
        largest: find the largest batch that fits the GPU.
        trace: file of a Chrome trace of one batch, .json.
    """

    batch_sizes: tuple[Annotated[int, Range(1)], ...] = (1, 2, 4, 8)
    warmup: Annotated[int, Range(0, MAX_REPEATS)] = 2
    repeats: Annotated[int, Range(1, MAX_REPEATS)] = 9
    against_full: bool = True
    largest: bool = False
    trace: str | None = None


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `task=export`.

    Attributes:
        format: file format of the tables of runs and samples.
        policy: policy file of a static method, written in place of tables (.safetensors).
    """

    format: Literal["parquet", "csv", "json"] = "parquet"
    policy: str | None = None


@dataclass(frozen=True)
class ReportSettings:
    """Settings of `task=report`.

    Attributes:
        seeds: runs that differ only in seeds: one row with their mean, or a row for each.
        rows: rows of the tables of paper.tex.
        columns: columns of these tables, for each metric.
        metrics: metrics of these tables and of the figures; all if empty, three if None.
        code: of runs that differ only in seeds and code, keep runs of the current code, else of the newest; or all.
    """

    seeds: Literal["mean", "each"] = "mean"
    rows: Literal["method", "budget", "model", "prompts"] = "method"
    columns: Literal["method", "budget", "model", "prompts"] = "budget"
    metrics: tuple[str, ...] | None = None
    code: Literal["newest", "all"] = "newest"


@dataclass(frozen=True)
class DashboardSettings:
    """Settings of `task=dashboard`.

    Attributes:
        bundle: write one file with the page and its images.
        watch: rewrite the page every `every` seconds until all sweeps are done.
        every: seconds between two rewrites.
    """

    bundle: bool = False
    watch: bool = False
    every: Seconds = 30.0


@dataclass(frozen=True)
class ChooseSettings:
    """Settings of `task=choose`.

    Attributes:
        block: minimum number of prompts between two looks, and before the first; fewer before the last.
        error: bound on the probability that the best method is dropped, rare failures apart.
        seconds: methods that take longer per sample at the first look leave the race; None for no limit.
    """

    block: Annotated[int, Range(MIN_UNITS, MAX_PROMPTS)] = 16
    error: float = 0.05
    seconds: Seconds | None = None


@dataclass(frozen=True)
class SweepSettings:
    """Name by which tasks find a sweep again, whether all jobs are checked first, folder of a dataset of its runs."""

    name: str | None = None
    check: bool = False
    pack: str | None = None

    def __post_init__(self) -> None:
        is_name = self.name is None or re.fullmatch(r"\w[\w.-]{0,99}", self.name)
        form = "must be up to 100 letters, digits, dots, hyphens or underscores, a letter or digit first"
        place = "names no folder; name one, such as sweep.pack=published/mine"
        check_rules((("pack", self.pack == "", place), ("name", not is_name, form)), self, "sweep.")


@dataclass(frozen=True)
class WorkSettings:
    """Settings of processes that share the jobs of a sweep.

    Attributes:
        workers: workers that a launcher starts for `task=work`.
        lapse: seconds without a touch after which other processes take over a claim.
        wait: return when the sweep ends; otherwise it continues in the background, in Slurm's queue or on Ray.
        number: index of this worker; selects its GPU.
        folder: folder of the sweep; None finds it by the listed jobs.
        do: command to the workers of the sweep; None starts a worker.
        grace: seconds after SIGTERM in which a worker may finish its block.
        jitter: a worker starts at a random time within these seconds.
        run: runs that `drop` excludes or `requeue` repeats: index, folder name, or overrides.
    """

    workers: Annotated[int, Range(1, 10**4)] = 1
    lapse: Annotated[float, Range(0, MAX_LAPSE, above=True)] = LAPSE
    wait: bool = True
    number: Annotated[int, Range(0, 10**4)] = 0
    folder: str | None = None
    do: Literal["pause", "resume", "requeue", "drop", "stop"] | None = None
    run: str | int | None = None
    grace: Delay = 25.0
    jitter: Delay = 0.0


@dataclass(frozen=True)
class Settings:
    """Settings that belong to no group.

    Attributes:
        task: name of the task.
        budget: fraction of the full cache or, above 1, tokens per head or bytes per sequence; as written.
        sinks: leading segments that methods never prune.
        seed: seed of the noise.
        shuffle: seed of a random order of the prompts; None keeps the order of their source.
        batch_size: prompts generated together; changes rounding only.
        device: torch device.
        cache_dtype: dtype of stored keys and values; auto is float32 on a CPU and the model's dtype on a GPU.
        storage: low-bit storage of keys and values.
        budget_unit: unit of the budget, `tokens` or `bytes`.
        noise: one random stream per prompt on the CPU, or counter-based noise on the device.
        cuda_graph: record a step of a next-token model, or every scale, as CUDA graphs; `auto` does if it can.
        batch_invariant: on a GPU, attention of a row has the same bytes in every batch.
        runs_dir: folder of runs.
        runs_dirs: more folders, from which finished runs, references and calibrations are copied.
        sources: folders from which `task=merge` copies runs; `from` in a configuration.
        require: evaluators (names in `eval`) that must not be skipped.
        published: table of a paper to print with a sweep's results, or several tables, printed by metric.
        against: method with which `task=report` compares all other methods, sample by sample.
        metric: metric that `task=choose` compares.
        methods: methods that `task=choose` compares; None for all methods that fit.
        margin: difference of the metric within which `task=choose` takes methods as level.
        smoke: the run has two prompts and one cheap metric.
        verbose: print every metric of a run.
        output: folder for the files of `task=report`, `dashboard` and `export`; None for `runs_dir`.
        shard: share of the prompts.
    """

    task: str
    budget: float | int | str
    sinks: Annotated[int, Range(0, MAX_PROMPTS)]
    seed: Seed
    batch_size: Count
    device: str
    cache_dtype: str
    runs_dir: Path
    shuffle: Seed | None = None
    runs_dirs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    budget_unit: str = "tokens"
    storage: StorageConfig = CHANNEL
    noise: Literal["auto", "stream", "counter"] = "stream"
    cuda_graph: bool | Literal["auto"] = "auto"
    batch_invariant: bool = False
    require: tuple[str, ...] = ()
    published: str | tuple[str, ...] | None = None
    against: str | None = None
    metric: str | None = None
    methods: tuple[str, ...] | None = None
    margin: Annotated[float, Range(0)] = 0.0
    output: str | None = None
    smoke: bool = False
    verbose: bool = False
    shard: Shard = field(default_factory=Shard)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    work: WorkSettings = field(default_factory=WorkSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    calibrate: CalibrateSettings = field(default_factory=CalibrateSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    choose: ChooseSettings = field(default_factory=ChooseSettings)

    def __post_init__(self) -> None:
        for key, choices in (("task", TASKS), ("budget_unit", UNITS), ("cache_dtype", CACHE_DTYPES)):
            if (given := getattr(self, key)) not in choices:
                raise ConfigError(f"{key}={given}: no such value{suggest(given, choices, key)}")
        read_number(self.budget, self.budget_unit)
        for key, suffixes in OUTPUT_FILES.items():
            if (file := attrgetter(key)(self)) is not None:
                check_file(key, file, *suffixes)
        check_rules(self._list_rules(), self)

    def _list_rules(self) -> Sequence[Rule]:
        """Return the rules of all settings but storage and names of sweeps, which have their own."""
        storage, profile, report, shard = self.storage, self.profile, self.report, self.shard
        methods, metrics = self.methods, report.metrics or ()
        is_gpu, is_coded = self.device.startswith("cuda"), self.cache_dtype.startswith("int")
        cards = CARDS if self.task == "plan" else ()
        is_device = re.fullmatch(r"cpu(:0)?|cuda(:\d{1,3})?", self.device) or self.device in cards
        devices = "only auto, cpu, cuda and cuda:N are supported"
        devices += f"; with task=plan also {', '.join(cards)}" * bool(cards)
        coded = f"cache_dtype={self.cache_dtype} stores no codes; set cache_dtype=int4"
        on_gpu = f"is for GPUs, not for device={self.device}; use device=cuda"
        no_graphs = f"device={self.device} has no CUDA graphs; use device=cuda"
        ends = f"0..{shard.count - 1} (shard.count={shard.count})"
        several = "name two or more methods, each once"
        once = "is written once; leave out dashboard.watch"
        is_race = self.task == "choose"
        by_one = "task=choose compares methods by one metric; name it, such as psnr"
        unsharded = "processes share a race without shards; leave it out"
        is_full = is_race and self.budget == 1 and methods is None and self.cache_dtype == "auto"
        return (
            ("storage.key_bits", storage.key_bits is not None and not is_coded, coded),
            ("storage.value_bits", storage.value_bits is not None and not is_coded, coded),
            ("shard.index", shard.index not in range(shard.count), f"must be in {ends}"),
            ("output", self.output == "", "names no folder; use output=. for the current one"),
            ("methods", methods is not None and not 2 <= len({*methods}) == len(methods), several),
            ("device", not is_device, devices),
            ("cuda_graph", self.cuda_graph is True and not is_gpu, no_graphs),
            ("batch_invariant", self.batch_invariant and not is_gpu, on_gpu),
            ("profile.largest", self.task == "profile" and profile.largest and not is_gpu, on_gpu),
            ("profile.batch_sizes", not profile.batch_sizes, "name one or more"),
            ("report.columns", report.rows == report.columns, "must differ from report.rows"),
            ("report.metrics", len({*metrics}) < len(metrics), "names a metric twice"),
            ("dashboard.bundle", self.dashboard.bundle and self.dashboard.watch, once),
            ("metric", is_race and not self.metric, by_one),
            ("shard.count", is_race and shard.count > 1, unsharded),
            ("budget", is_full, "a race among full caches; give a smaller one, such as budget=0.1"),
            ("choose.error", not 0 < self.choose.error < 1, "must be a probability between 0 and 1"),
        )

    @property
    def writes(self) -> Path:
        """Folder that the task writes to: `output` for tasks that only read runs, else `runs_dir`."""
        if self.output is not None and self.task in READING_TASKS:
            return Path(self.output).expanduser()
        return self.runs_dir

    @classmethod
    def of(cls, values: Mapping[str, object], *, objects: bool = True) -> "Settings":
        """Read settings from a resolved configuration, and check the configuration's objects.

        Args:
            values: the configuration.
            objects: check the objects of the groups, which imports their classes.

        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type or is out of range.
        """
        own = {key: value for key, value in values.items() if key not in (*GROUPS, "from")}
        given = values.get("from") or []  # `from` is a keyword of Python
        sources = given if isinstance(given, list) else [given]
        if not all(isinstance(folder, str) and folder for folder in sources):
            raise ConfigError(f"from={show(given)}: must be a folder of runs or a list of them")
        own["sources"] = sources
        parts: dict[str, Any] = {key: kind for key, kind in get_type_hints(cls).items() if is_dataclass(kind)}
        check_part({key: value for key, value in own.items() if key not in parts}, cls, "")
        for group, kind in {"protect": Protect, "windows": Windows}.items():  # files of methods refer to them
            if group in values:
                check_part(values[group], kind, group)
        for key, part in parts.items():
            own[key] = part(**_make_tuples(check_part(own.get(key, {}), part, key)))
        if not own["runs_dir"]:
            raise ConfigError("runs_dir=: names no folder; use runs_dir=. for the current one")
        settings = cls(**{**_make_tuples(own), "runs_dir": Path(str(own["runs_dir"])).expanduser()})
        for group in GROUPS if objects else ():  # last, since it imports torch
            if group != "train" or values["task"] == "train":  # its modules take long to import
                check_objects(values.get(group), group)
        return settings


def _make_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with tuples in place of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
