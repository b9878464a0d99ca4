"""Settings of one run, validated when they are read; other code never sees a raw configuration."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from kvbench.core.budget import UNITS
from kvbench.core.claims import LAPSE
from kvbench.core.config import (
    MAX_PROMPTS,
    MAX_SEED,
    ConfigError,
    check_fields,
    check_objects,
    check_part,
    check_range,
)
from kvbench.core.files import find_obstacle
from kvbench.core.storage import CHANNEL, CODE_DTYPES, StorageConfig

TASKS = (
    "run",
    "evaluate",
    "bounds",
    "plan",
    "check",
    "doctor",
    "weights",
    "calibrate",
    "profile",
    "train",
    "report",
    "export",
    "merge",
    "dashboard",
    "work",
    "status",
)
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *CODE_DTYPES)
MAX_CALIBRATED = 10**4
MAX_WORKERS = 10**4
MAX_REPEATS = 10**9
GROUPS = ("model", "method", "protect", "prompts", "eval", "logger", "train", "sampling", "sweeps")
"""Keys of a configuration that hold objects (`_target_`), names or nothing."""
READERS = ("report", "dashboard", "export")
"""Tasks that read runs and write what they make of them."""
CHOSEN = (*GROUPS, "storage")
"""Keys of a configuration whose values are the names of files."""


@dataclass(frozen=True)
class Shard:
    """Share of a run's blocks that this process takes: block numbers congruent to `index` modulo `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_range("shard.count", self.count, 1, MAX_PROMPTS)
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"shard.index={self.index}: must lie in 0..{self.count - 1} (shard.count={self.count})"
            )


@dataclass(frozen=True)
class PlanSettings:
    """Settings of `task=plan`: memory that the largest batch fills, a file for the schedule (.npz), a paper's table."""

    gpu_gib: float = 80.0
    export: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        if self.gpu_gib <= 0:
            raise ConfigError(f"plan.gpu_gib={self.gpu_gib}: must be positive")


@dataclass(frozen=True)
class CalibrateSettings:
    """Calibration.

    Attributes:
        count: prompts.
        prompts: file of them.
        seed: of their choice and noise.
        batch_size: how many are drawn together; texts, which end apart, are drawn one by one.
        orders: order file to write (JSON).
    """

    count: int = 10
    prompts: str | None = None
    seed: int = 1
    batch_size: int = 8
    orders: str | None = None

    def __post_init__(self) -> None:
        check_range("calibrate.count", self.count, 1, MAX_CALIBRATED)
        check_range("calibrate.seed", self.seed, 0, MAX_SEED)
        check_range("calibrate.batch_size", self.batch_size, 1, MAX_PROMPTS)
        if self.orders is not None and (problem := find_obstacle(Path(self.orders).expanduser().parent)):
            raise ConfigError(f"calibrate.orders={self.orders}: cannot be written ({problem})")


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of `task=profile`.

    Attributes:
        batch_sizes: prompts at a time, each measured.
        warmup: generations that are not timed, per batch size and cache.
        repeats: generations that are.
        against_full: time the full cache beside the method, in turns.
        largest: look for the largest batch that fits the GPU.
        trace: file for a Chrome trace of one batch, .json.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    warmup: int = 2
    repeats: int = 9
    against_full: bool = True
    largest: bool = False
    trace: str | None = None

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"profile.batch_sizes={list(self.batch_sizes)}: name numbers of at least 1")
        check_range("profile.warmup", self.warmup, 0, MAX_REPEATS)
        check_range("profile.repeats", self.repeats, 1, MAX_REPEATS)
        if self.trace is not None and not Path(self.trace).expanduser().parent.is_dir():
            raise ConfigError(f"profile.trace={self.trace}: its folder does not exist")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `task=export`.

    Attributes:
        format: of frames of runs and samples.
        policy: file for what a static method decided, which is written in place of frames (.safetensors).
    """

    format: Literal["parquet", "csv"] = "parquet"
    policy: str | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and (problem := find_obstacle(Path(self.policy).expanduser().parent)):
            raise ConfigError(f"export.policy={self.policy}: cannot be written ({problem})")


@dataclass(frozen=True)
class DashboardSettings:
    """Settings of `task=dashboard`: write the page again every `every` seconds until all sweeps are done."""

    watch: bool = False
    every: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.every <= MAX_REPEATS:
            raise ConfigError(f"dashboard.every={self.every}: must be a positive number of seconds")


@dataclass(frozen=True)
class WorkSettings:
    """Settings of processes that share the jobs of a sweep.

    Attributes:
        workers: of `task=work`, how many a launcher starts.
        lapse: seconds without a sign of life after which others take over what a process claimed.
        wait: whether a sweep's command returns at its end; otherwise it goes on in the background, in Slurm's
            queue or on a Ray cluster.
        number: which of these this one is; of several GPUs it takes that one.
        folder: the sweep's; None for that of the jobs that the command lists.
        do: what workers of the sweep are asked to do; None to work beside them.
        grace: seconds after SIGTERM in which a worker may finish its block.
        jitter: seconds within which a worker starts, at a random time.
        run: which runs `drop` leaves out or `requeue` tries again: number, name of the folder, or overrides.
    """

    workers: int = 1
    lapse: float = LAPSE
    wait: bool = True
    number: int = 0
    folder: str | None = None
    do: Literal["pause", "resume", "requeue", "drop", "stop"] | None = None
    run: str | int | None = None
    grace: float = 25.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_range("work.workers", self.workers, 1, MAX_WORKERS)
        check_range("work.number", self.number, 0, MAX_WORKERS)
        if not 0 < self.lapse < float("inf"):
            raise ConfigError(f"work.lapse={self.lapse}: must be a positive number of seconds")
        for key, value in (("grace", self.grace), ("jitter", self.jitter)):
            if not 0 <= value <= MAX_REPEATS:
                raise ConfigError(f"work.{key}={value}: must be a number of seconds, 0 or more")


@dataclass(frozen=True)
class Settings:
    """Settings that belong to no group.

    Attributes:
        task: what to do.
        budget: fraction of the full cache or, above 1, tokens per head or bytes of a sequence; as written.
        sinks: leading scales that methods never prune.
        seed: seed of the noise.
        batch_size: prompts generated together; changes rounding only.
        device: torch device.
        cache_dtype: of stored keys and values; auto is float32 on a CPU and what the model computes in on a GPU.
        storage: how keys and values of fewer than 16 bits are stored.
        budget_unit: what the budget counts, `tokens` or `bytes`.
        cuda_graph: record a segment's steps as a CUDA graph and repeat it; of models that draw scale by scale, every
            scale of a batch size, under methods that know their schedule. `auto` does where it can.
        batch_invariant: on a GPU, attention of a row has the same bytes in every batch.
        runs_dir: where run folders are.
        runs_dirs: further folders of runs, from which finished runs, references and calibrations are copied.
        sources: folders of runs that `task=merge` copies from, `from` in a configuration.
        require: evaluators (names in `eval`) that must not be skipped.
        published: table of a paper that the end of a sweep prints beside what it measured.
        against: method that `task=report` compares all others with, sample by sample.
        verbose: print every metric of a run.
        output: folder of what `task=report`, `dashboard` and `export` write; None for beside the runs.
        shard: share of the prompts.
        work: how processes share the jobs of a sweep.
        plan: of `task=plan`.
        calibrate: of calibrations.
        profile: of `task=profile`.
        export: of `task=export`.
        dashboard: of `task=dashboard`.
    """

    task: str
    budget: float | int | str
    sinks: int
    seed: int
    batch_size: int
    device: str
    cache_dtype: str
    runs_dir: Path
    runs_dirs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    budget_unit: str = "tokens"
    storage: StorageConfig = CHANNEL
    cuda_graph: bool | Literal["auto"] = "auto"
    batch_invariant: bool = False
    require: tuple[str, ...] = ()
    published: str | None = None
    against: str | None = None
    output: str | None = None
    verbose: bool = False
    shard: Shard = Shard()
    work: WorkSettings = WorkSettings()
    plan: PlanSettings = PlanSettings()
    calibrate: CalibrateSettings = CalibrateSettings()
    profile: ProfileSettings = ProfileSettings()
    export: ExportSettings = ExportSettings()
    dashboard: DashboardSettings = DashboardSettings()

    def __post_init__(self) -> None:
        for key, choices in (("task", TASKS), ("budget_unit", UNITS), ("cache_dtype", CACHE_DTYPES)):
            if getattr(self, key) not in choices:
                raise ConfigError(f"{key}={getattr(self, key)}: must be one of {', '.join(choices)}")
        check_range("batch_size", self.batch_size, 1, MAX_PROMPTS)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("sinks", self.sinks, 0, MAX_PROMPTS)
        if not re.fullmatch(r"cpu(:0)?|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device={self.device}: only auto, cpu, cuda and cuda:N are supported")
        if self.cuda_graph is True and not self.device.startswith("cuda"):
            raise ConfigError(f"cuda_graph=true: device={self.device} has no CUDA graphs; use device=cuda")
        if self.batch_invariant and not self.device.startswith("cuda"):
            raise ConfigError(
                f"batch_invariant=true: fixes how kernels of a GPU divide attention, and device={self.device} has none "
                "of them; use device=cuda"
            )
        if self.task == "profile" and self.profile.largest and not self.device.startswith("cuda"):
            raise ConfigError(
                f"profile.largest=true: finds what fits a GPU's memory and device={self.device}; use device=cuda"
            )

    @property
    def writes(self) -> Path:
        """Folder that the task writes to: `output` of those that only read runs, else `runs_dir`."""
        if self.output is not None and self.task in READERS:
            return Path(self.output).expanduser()
        return self.runs_dir

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Settings":
        """Make settings out of a resolved configuration, and check the configuration's objects too.

        Raises:
            ConfigError: a key that is unknown or missing, a value of the wrong type or out of range.
        """
        own = {key: value for key, value in values.items() if key not in (*GROUPS, "from")}
        own["sources"] = _read_sources(values.get("from"))  # `from` is a keyword of Python
        parts: dict[str, Any] = {key: kind for key, kind in get_type_hints(cls).items() if is_dataclass(kind)}
        check_fields({key: value for key, value in own.items() if key not in parts}, cls, "")
        if missing := [
            field.name for field in fields(cls) if field.default is MISSING and field.name not in own
        ]:
            raise ConfigError(f"{missing[0]}: missing; set it, or leave it as it stands in conf/config.yaml")
        for group in GROUPS:
            if group != "train" or values["task"] == "train":  # its modules take long to import
                check_objects(values.get(group), group)
        for key, part in parts.items():
            given = check_part(own.get(key, {}), part, key)
            own[key] = part(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        for key in ("require", "runs_dirs", "sources"):
            own[key] = tuple(own.get(key, ()))  # type: ignore[arg-type]
        if not own["runs_dir"]:
            raise ConfigError("runs_dir=: names no folder; runs_dir=. is the current one")
        return cls(**{**own, "runs_dir": Path(str(own["runs_dir"])).expanduser()})  # type: ignore[arg-type]


def _read_sources(given: object) -> list[str]:
    """Return the folders that `from` names, one or a list.

    Raises:
        ConfigError: it is something else.
    """
    folders = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(folder, str) and folder for folder in folders):
        raise ConfigError(f"from={given}: must be a folder of runs or a list of them")
    return [str(folder) for folder in folders]
