"""Command line: `python run.py method=heatkv budget=0.04`. The only module that knows Hydra."""

import difflib
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from kvbench import conf, paper_memory, profile_report, report, runner, summary
from kvbench.attention_by_scale import AttentionByScale, rank_heads, scas
from kvbench.budget import Budget
from kvbench.cache import BudgetExceeded
from kvbench.config import ConfigError, Settings
from kvbench.differences import show_against
from kvbench.eval.base import missing
from kvbench.eval.fid import Fid
from kvbench.eval.images import ImageSetError
from kvbench.job import Job
from kvbench.memory import keep_freed_memory
from kvbench.methods.base import Observer
from kvbench.models.base import NotFinite
from kvbench.models.weights import WeightsError
from kvbench.orders import write_orders
from kvbench.plan import export, make_plan
from kvbench.published import find

EXPECTED = (
    ConfigError,
    ValueError,
    WeightsError,
    BudgetExceeded,
    NotFinite,
    ImageSetError,
    HydraException,
    OmegaConfBaseException,
    OSError,
    torch.OutOfMemoryError,
)
"""What a user can cause: told in one line. Anything else is our fault and shows its traceback."""

CONSOLE = Console(width=None if sys.stdout.isatty() else 160)
log = logging.getLogger(__name__)


class Summary(Callback):
    """After a multirun: one table of all jobs, a published one beside it, and a failing exit status if any failed."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._artifacts: list[Path] = []
        self._failures: list[tuple[str, str]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Remembers what a job left."""
        value = job_return._return_value
        if isinstance(value, Path):
            self._folders.append(value)
        elif isinstance(value, list):
            self._artifacts.extend(value)
        elif isinstance(value, str):
            self._failures.append((" ".join(job_return.overrides or []), value))

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Prints the tables."""
        folders = list(dict.fromkeys(self._folders))
        report.show_runs(CONSOLE, report.with_bounds(folders), self._failures)
        if config.published is not None:
            table, runs_dir = find(config.published), Path(config.runs_dir).expanduser()
            if table.figure == "stability":
                name, sinks = str(config.model.name), int(config.sinks)
                summary.show_stability(CONSOLE, table, self._artifacts, sinks, name, runs_dir)
            else:
                summary.show_beside(CONSOLE, table, report.with_references(folders), runs_dir)
        if self._failures:
            sys.exit(1)


def main() -> None:
    """Entry point."""
    os.environ.setdefault("KVBENCH_ROOT", str(Path.cwd()))
    logging.captureWarnings(capture=True)
    keep_freed_memory()
    problem = check_arguments(sys.argv[1:])
    if problem is not None:
        sys.exit(f"error: {problem}")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")
def _hydra_main(cfg: DictConfig) -> Path | list[Path] | str | None:
    multirun = HydraConfig.get().mode == hydra.types.RunMode.MULTIRUN
    try:
        return TASKS[_settings(cfg).task](cfg)
    except EXPECTED as error:
        line = _one_line(error)
    except Exception as error:  # our fault, but a sweep's other jobs are worth having
        if not multirun:
            raise
        log.exception("a job of the sweep broke")
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not multirun:
        sys.exit(f"error: {line}")
    CONSOLE.print(f"error: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    return line


def check_arguments(arguments: list[str]) -> str | None:
    """Composes configurations before Hydra does, to tell what is wrong in one line (None: nothing)."""
    try:
        for overrides in _tried([a for a in arguments if not a.startswith("-")]):
            with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
                settings = _settings(hydra.compose("config", overrides=overrides))
            if settings.task != "plan":
                settings.runs_dir.mkdir(parents=True, exist_ok=True)
    except OverrideParseException as error:
        return f"{error.override}: cannot be read as key=value; quote values that hold one of = , [ ] {{ }} ~"
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        return _explained(str(error))
    except OSError as error:
        return f"runs_dir={settings.runs_dir}: cannot be written ({error})"
    return None


def _tried(arguments: list[str]) -> list[list[str]]:
    """Overrides that try every value of every list once; a value is wrong by itself, not in a combination."""
    parsed = [
        o
        for o in OverridesParser.create().parse_overrides(arguments)
        if not o.key_or_group.startswith("hydra")
    ]
    listed = [o for o in parsed if o.is_choice_sweep()]
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    swept = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in listed]
    first = [values[0] for values in swept]
    others = [[*first[:i], value, *first[i + 1 :]] for i, values in enumerate(swept) for value in values[1:]]
    return [fixed + chosen for chosen in [first, *others]]


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, HydraException) else None
    if cause is None:
        return " ".join(str(error).split())
    if not isinstance(cause, (*EXPECTED, TypeError)):
        raise cause
    key = re.search(r"full_key: (\S+)", str(error))
    return f"{key[1]}: {cause}" if key is not None and isinstance(cause, TypeError) else _one_line(cause)


def _explained(message: str) -> str:
    """One line that names the key, out of Hydra's several."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if found := re.match(r"Could not override '(.+)'", lines[0]):
        key = found[1]
        near = difflib.get_close_matches(key, _keys(), 1)
        return f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "")
    if found := re.search(r"Could not (?:find|load) '(\w+)/(.+?)'", lines[0]):
        group, choice = found.groups()
        choices = ", ".join(p.stem for p in sorted(Path(conf.__file__).parent.glob(f"{group}/*.yaml")))
        return f"{group}={choice}: no such choice" + (f"; choose from {choices}" if choices else "")
    named = [line for line in lines if line.startswith(("Key '", "full_key"))]
    return " ".join(dict.fromkeys([lines[0], *named]))


def _keys() -> list[str]:
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        values = _values(hydra.compose("config"))
    inner = [
        f"{key}.{name}"
        for key, value in values.items()
        if isinstance(value, dict)
        for name in value
        if name[0] != "_"
    ]
    return [*values, *inner]


def task_run(cfg: DictConfig) -> Path | None:
    """`task=run`: one run."""
    outcome = runner.run(job_of(cfg))
    if outcome.results is None:
        CONSOLE.print(
            f"this shard's share is done; the run is complete when the others are: {outcome.folder}"
        )
        return None
    report.show_run(CONSOLE, outcome.results)
    CONSOLE.print(
        f"{'found finished' if outcome.reused else 'finished'}: {outcome.folder}",
        highlight=False,
        soft_wrap=True,
    )
    return outcome.folder


def task_evaluate(cfg: DictConfig) -> Path:
    """`task=evaluate`: adds metrics to a finished run without generating again."""
    outcome = runner.rescore(job_of(cfg))
    assert outcome.results is not None
    report.show_run(CONSOLE, outcome.results)
    return outcome.folder


def task_bounds(cfg: DictConfig) -> None:
    """`task=bounds`: full cache against full cache, in another batch size and with other seeds."""
    job = job_of(cfg)
    folders = [runner.run(bound).folder for bound in job.bounds()]
    report.show_runs(CONSOLE, [run for folder in folders for run in report.collect_one(folder)])


def task_plan(cfg: DictConfig) -> None:
    """`task=plan`: schedule and memory from shapes, or a paper's memory column."""
    settings = Settings.of(_values(cfg))
    if settings.plan.table is not None:
        _plan_table(settings.plan.table)
        return
    model, method = instantiate(cfg.model), instantiate(cfg.method)
    budget = Budget.parse(settings.budget, model.spec)
    plan = make_plan(model.spec, budget, method, model.parameters, settings.batch_size, settings.plan.gpu_gib)
    report.show_plan(CONSOLE, plan)
    if settings.plan.export is not None:
        export(Path(settings.plan.export), model.spec, budget, method)
        CONSOLE.print(f"schedule written to {settings.plan.export}", highlight=False, soft_wrap=True)


def _plan_table(name: str) -> None:
    """Prints a published memory column beside what the shapes of its models give."""
    specs = {}
    for model in paper_memory.models(name):
        if (Path(conf.__file__).parent / "model" / f"{model}.yaml").is_file():
            specs[model] = instantiate(hydra.compose("config", overrides=[f"model={model}"]).model).spec
        else:
            CONSOLE.print(f"left out: model={model} has no configuration here", highlight=False)
    if claims := paper_memory.TABLES[name](specs):
        summary.show_claims(CONSOLE, name, paper_memory.sources(name), claims)


def task_calibrate(cfg: DictConfig) -> list[Path]:
    """`task=calibrate`: what the method needs (every method, if it needs nothing), and optionally an order file."""
    job = job_of(cfg)
    needs = job.method.needs()
    observers = [needs] if isinstance(needs, Observer) else every_observer(cfg)
    job.model.load(job.settings.device)
    artifacts = runner.observe(job, observers)
    paths = [runner.calibration_file(job, observer)[0] for observer in observers]
    for observer, path in zip(observers, paths, strict=True):
        CONSOLE.print(f"{observer.kind}: {path}", highlight=False, soft_wrap=True)
    wanted = job.settings.calibrate.orders
    for artifact in artifacts if wanted is not None else ():
        if artifact.kind == AttentionByScale.kind:
            ranks = rank_heads(scas(artifact.tensors["mass"]))
            write_orders(Path(str(wanted)), ranks, job.settings.sinks, artifact.metadata)
            CONSOLE.print(f"orders: {wanted}", highlight=False, soft_wrap=True)
    return paths


def every_observer(cfg: DictConfig) -> list[Observer]:
    """What the methods of `conf/method` calibrate with at their defaults, each once."""
    found: dict[str, Observer] = {}
    other = cfg.copy()
    OmegaConf.set_struct(other, False)
    for path in sorted(Path(conf.__file__).parent.glob("method/*.yaml")):
        other.method = OmegaConf.load(path)
        needs = instantiate(other.method).needs()
        if isinstance(needs, Observer):
            found.setdefault(repr(needs), needs)
    return list(found.values())


def task_profile(cfg: DictConfig) -> None:
    """`task=profile`: time, memory and phases over batch sizes."""
    profile_report.profile_and_show(CONSOLE, job_of(cfg))


def task_train(cfg: DictConfig) -> None:
    """`task=train`: the embedded model from scratch."""
    from kvbench.training.run import train

    out = train(instantiate(cfg.model), instantiate(cfg.train))
    CONSOLE.print(f"trained weights: {out}", highlight=False, soft_wrap=True)


def task_report(cfg: DictConfig) -> None:
    """`task=report`: one table of every finished run under `runs_dir`."""
    settings = Settings.of(_values(cfg))
    runs_dir = settings.runs_dir
    runs = report.collect(runs_dir)
    if not runs:
        raise ConfigError(f"runs_dir={runs_dir}: holds no finished runs")
    report.show_runs(CONSOLE, runs)
    CONSOLE.print(f"written: {report.write_report(runs_dir, runs)}", highlight=False, soft_wrap=True)
    if settings.against is not None:
        chosen = [instantiate(node) for node in (cfg.eval or {}).values()]
        distances = [one for one in chosen if isinstance(one, Fid) and not missing(one)]
        show_against(CONSOLE, runs, runs_dir, settings.against, distances)
    if settings.published is not None:
        summary.show_beside(CONSOLE, find(settings.published), runs, runs_dir)
    summary.draw_fidelity(CONSOLE, runs, runs_dir, "fidelity")


TASKS = {
    "run": task_run,
    "evaluate": task_evaluate,
    "bounds": task_bounds,
    "plan": task_plan,
    "calibrate": task_calibrate,
    "profile": task_profile,
    "train": task_train,
    "report": task_report,
}


def job_of(cfg: DictConfig) -> Job:
    """Objects of one run out of its configuration."""
    values = _values(cfg)
    settings = Settings.of(values)
    if torch.device(settings.device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={settings.device}: torch finds no GPU here; use device=cpu")
    prompts = instantiate(cfg.prompts)
    return Job(
        settings=settings,
        model=instantiate(cfg.model),
        method=instantiate(cfg.method),
        method_name=HydraConfig.get().runtime.choices["method"],
        prompts=prompts.load(),
        config=values,
        calibration_prompts=prompts.sibling(settings.calibrate.count, settings.calibrate.seed).load(),
        evaluators={name: instantiate(node) for name, node in (cfg.eval or {}).items()},
        logger=instantiate(cfg.logger) if cfg.logger else None,
    )


def _settings(cfg: DictConfig) -> Settings:
    settings = Settings.of(_values(cfg))
    table = settings.plan.table
    if table is not None and table not in paper_memory.TABLES:
        choices = ", ".join(paper_memory.TABLES)
        raise ConfigError(f"plan.table={table}: no memory column is worked out for it; choose from {choices}")
    if settings.published is not None:
        find(settings.published)
    return settings


def _values(cfg: DictConfig) -> Mapping[str, object]:
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]
