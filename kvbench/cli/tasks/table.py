"""Implementations of each `task=` on a composed configuration."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.compose import count_processes, read_values
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import list_choices, list_methods
from kvbench.cli.console import CONSOLE
from kvbench.cli.sweeps.jobs import Recorder, note_run, read_entries
from kvbench.cli.sweeps.outcomes import list_failures, list_runs
from kvbench.cli.tasks.check import check_run, show_findings
from kvbench.cli.tasks.dashboard import task_dashboard
from kvbench.cli.tasks.doctor import examine
from kvbench.cli.tasks.models import keep_model
from kvbench.core.config import ConfigError
from kvbench.core.devices import use_device
from kvbench.core.processes import join, leave
from kvbench.core.settings import Settings
from kvbench.data.export import export_frames
from kvbench.engine.memory import MIB, token_bytes
from kvbench.engine.packed.bytes import bound_token_bytes
from kvbench.kernels.batch_invariance import set_batch_invariant
from kvbench.methods.heatkv.order_file import write_orders
from kvbench.methods.heatkv.scores import AttentionByScale, rank_heads, scas
from kvbench.methods.shared.base import Method, Observer
from kvbench.methods.shared.capabilities import is_biased
from kvbench.models.base import Model
from kvbench.models.files.hub import format_bytes
from kvbench.models.files.stored import list_files
from kvbench.plan import Plan, export, make_plan
from kvbench.policy import export_policy
from kvbench.profile.tables import profile_and_show
from kvbench.report.calibrations import show_calibrations
from kvbench.report.collect import collect_runs, read_runs, read_with_references
from kvbench.report.differences import show_differences
from kvbench.report.document import write_report
from kvbench.report.figures.draw import draw_figures
from kvbench.report.one_run import show_outcome, show_run
from kvbench.report.papers import comparison as published_comparison
from kvbench.report.papers import memory as paper_memory
from kvbench.report.papers.published import find
from kvbench.report.plan_table import show_plan
from kvbench.report.runs_table import show_runs
from kvbench.runs.allowance import find_dtype, find_packing, read_budget
from kvbench.runs.calibrate import choose_calibration
from kvbench.runs.calls import remember
from kvbench.runs.execute import rescore, run
from kvbench.runs.generate.batch import follow, load
from kvbench.runs.job import Job
from kvbench.runs.prepare import books_used, calibration_file, file_used, observe
from kvbench.runs.record.merge import merge_runs


def make_job(cfg: DictConfig, settings: Settings) -> Job:
    """Make the objects of one run out of its configuration, and meet the processes that share its model.

    Raises:
        ConfigError: the device is not there, or prompts cannot be read.
        ProcessLost: the other processes do not come.
    """
    count = count_processes(cfg)
    if count > 1:
        settings = replace(settings, device=choose_device(settings.device))
    use_device(settings.device)
    set_batch_invariant(settings.batch_invariant)
    source = instantiate(cfg.prompts)
    recorder, choices = Recorder.current, HydraConfig.get().runtime.choices
    prompts = source.load()
    model: Any = instantiate(cfg.model) if recorder is None else keep_model(cfg.model, settings.device)
    if count > 1:
        model.processes = join(count, settings.device)
    return Job(
        settings=settings,
        model=model,
        method=instantiate(cfg.method),
        method_name=choices["method"],
        prompts=prompts,
        config=read_values(cfg),
        calibration_prompts=choose_calibration(settings.calibrate, source, prompts),
        evaluators={name: instantiate(node) for name, node in (cfg.get("eval") or {}).items()},
        logger=instantiate(cfg.logger) if cfg.logger else None,
        sweep=None if recorder is None else choices.get("sweeps") or recorder.folder.name,
    )


def choose_device(device: str) -> str:
    """Return the device of this one of several processes: of GPUs that with its number on its machine.

    Raises:
        ConfigError: one GPU is named for all.
    """
    if device in ("cpu", "cpu:0"):
        return device
    if device != "cuda":
        raise ConfigError(
            f"device={device}: each process of model.tensor_parallel has a GPU; set device=cuda"
        )
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def task_run(cfg: DictConfig, settings: Settings) -> Path | None:
    """Do `task=run`: one run with its reference and calibration; return its folder, None while other shards work.

    Of several processes that share the model the first does it, and the others generate beside it.
    """
    job = make_job(cfg, settings)
    if job.processes.rank > 0:
        follow(job)
        leave()
        return None
    outcome = run(job, note_run)
    job.processes.broadcast(None)
    leave()
    if outcome.results is None:
        CONSOLE.print(
            f"this shard's share is done; the run is complete when the others are: {outcome.folder}"
        )
        return None
    remember(job, outcome, file_used(job), books_used(job))
    return show_outcome(CONSOLE, outcome, verbose=settings.verbose)


def task_evaluate(cfg: DictConfig, settings: Settings) -> Path:
    """Do `task=evaluate`: add metrics to a finished run without generating again; return its folder."""
    outcome = rescore(make_job(cfg, settings))
    assert outcome.results is not None
    show_run(CONSOLE, outcome.results, verbose=settings.verbose)
    return outcome.folder


def task_bounds(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=bounds`: run the full cache in another batch size and with other seeds, against the full cache."""
    job = make_job(cfg, settings)
    show_runs(CONSOLE, read_runs([run(bound).folder for bound in job.bounds()]))


def task_plan(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=plan`: print schedule and memory from shapes, or a paper's memory column."""
    if settings.plan.table is not None:
        _plan_table(settings.plan.table)
        return
    method = instantiate(cfg.method)
    plan = _plan(settings, instantiate(cfg.model), method)
    show_plan(CONSOLE, plan, list_methods(plan.spec.family))
    if settings.plan.export is not None:
        export(Path(settings.plan.export), plan.spec, plan.budget, method)
        CONSOLE.print(f"schedule written to {settings.plan.export}", highlight=False, soft_wrap=True)


def task_check(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=check`: what the run would need; weights are not loaded and nothing is generated."""
    job = make_job(cfg, settings)

    def list_memory() -> str:
        at_once = _plan(settings, job.model, instantiate(cfg.method)).at_once
        if not at_once:
            raise ConfigError("what a cache in few bits needs is measured by its run")
        cache, full = at_once["method"] / MIB, at_once["full"] / MIB
        weights = job.model.parameters * job.model.compute_dtype(settings.device).itemsize / MIB
        caches = f"cache at most {cache:.1f} MiB at batch {settings.batch_size} (full cache {full:.1f})"
        return f"{caches}, weights {weights:.1f} MiB"

    show_findings(CONSOLE, list(check_run(job, list_memory)))


def task_doctor(_: DictConfig, settings: Settings) -> None:
    """Do `task=doctor`: what this machine and this installation can do; nothing is loaded."""
    chosen = [name for name in list_choices("eval") if name != "none"]
    every = hydra.compose("config", overrides=[f"eval=[{','.join(chosen)}]"]).eval
    evaluators = {name: instantiate(node) for name, node in every.items()}
    show_findings(CONSOLE, list(examine(evaluators, settings.runs_dir)))


def task_weights(cfg: DictConfig, _: Settings) -> None:
    """Do `task=weights`: fetch, convert and stage what the model reads; list its parts and their bytes."""
    model: Model = instantiate(cfg.model)
    model.prepare()
    for part, source in model.list_sources().items():
        files = list_files(source.locate())
        about = source.describe()
        size = format_bytes(sum(file.stat().st_size for file in files))
        commit = f", commit {about['commit']}" if about.get("commit") else ""
        CONSOLE.print(
            f"{part}: {size} in {source.locate()}{commit}, sha256 {about['sha256']}",
            highlight=False,
            soft_wrap=True,
        )


def _plan(settings: Settings, model: Model, method: Method) -> Plan:
    """Work out what a run will hold with a method, which is prepared for it."""
    budget, dtype = read_budget(settings, model, method), find_dtype(settings, model)
    stored, flying = (
        token_bytes(model.spec, one.itemsize, biased=is_biased(method))
        for one in (dtype, model.compute_dtype(settings.device))
    )
    packing = find_packing(settings, method)
    if packing is not None:
        _, stored = bound_token_bytes(model.spec, packing)
    return make_plan(
        model, budget, method, settings.batch_size, settings.plan.gpu_gib, stored, flying, packing
    )


def _plan_table(name: str) -> None:
    """Print a published memory column beside what the shapes of its models give."""
    specs, there = {}, list_choices("model")
    for model in paper_memory.models(name):
        if model in there:
            specs[model] = instantiate(hydra.compose("config", overrides=[f"model={model}"]).model).spec
        else:
            CONSOLE.print(f"left out: model={model} has no configuration here", highlight=False)
    if claims := paper_memory.TABLES[name](specs):
        published_comparison.show_claims(CONSOLE, name, paper_memory.sources(name), claims)


def task_calibrate(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Do `task=calibrate`: what the method needs (or every method for the model), and optionally an order file.

    Returns:
        The calibrations' files.
    """
    job = make_job(cfg, settings)
    needs = job.method.needs()
    observers = [needs] if isinstance(needs, Observer) else every_observer(cfg)
    observers += [] if job.codebooks is None else [job.codebooks]
    load(job)
    artifacts = observe(job, observers)
    paths = [calibration_file(job, observer)[0] for observer in observers]
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
    """Return what the methods that are for the model calibrate with at their defaults, each once."""
    other, needs = cfg.copy(), []
    OmegaConf.set_struct(other, False)
    for name in list_methods(instantiate(cfg.model).spec.family):
        other.method = hydra.compose(f"method/{name}").method
        needs.append(instantiate(other.method).needs())
    return list({repr(one): one for one in needs if isinstance(one, Observer)}.values())


def task_profile(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=profile`: measure time, memory and phases over batch sizes."""
    profile_and_show(CONSOLE, make_job(cfg, settings))


def task_train(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=train`: train an embedded model from scratch."""
    cfg.device = settings.device  # of recipes, which take it from there
    out = instantiate(cfg.train).train(instantiate(cfg.model))
    CONSOLE.print(f"trained weights: {out}", highlight=False, soft_wrap=True)


def task_report(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=report`: tables and figures of every finished run under `runs_dir`, or of a sweep's."""
    runs_dir = settings.runs_dir
    place = settings.writes
    failures: list[tuple[str, str]] = []
    if settings.work.folder is None:
        runs = collect_runs(runs_dir)
    else:
        sweep = Path(settings.work.folder)
        place = sweep if settings.output is None else place
        entries = read_entries(sweep)
        runs, failures = read_with_references(list_runs(entries)), list_failures(entries)
    show_runs(CONSOLE, runs, failures)
    if not runs:
        raise ConfigError(
            f"runs_dir={runs_dir}: holds no finished runs"
            + " of this sweep" * (settings.work.folder is not None)
        )
    table = None if settings.published is None else find(settings.published)
    if settings.against is not None:
        show_differences(CONSOLE, runs, runs_dir, settings.against, settings.writes)
    show_calibrations(CONSOLE, runs, runs_dir, place, settings.against)
    figures, left_out = draw_figures(runs_dir, runs, place)
    for line in left_out:
        CONSOLE.print(f"left out: {line}", highlight=False, soft_wrap=True)
    section = None if table is None else published_comparison.make_section(table, runs)
    report = write_report(place, runs, section, figures)
    if table is not None:
        published_comparison.show_beside(CONSOLE, table, runs, runs_dir)
    for path in (report, report.with_suffix(".tex"), report.with_suffix(".csv"), *figures):
        CONSOLE.print(f"written: {path}", highlight=False, soft_wrap=True)


def task_export(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Do `task=export`: write a policy, or frames of all finished runs and of their samples; return the files."""
    if settings.export.policy is not None:
        paths = [Path(settings.export.policy).expanduser()]
        export_policy(make_job(cfg, settings), paths[0])
    else:
        paths = export_frames(settings.runs_dir, settings.export.format, settings.writes)
    for path in paths:
        CONSOLE.print(f"written: {path}", highlight=False, soft_wrap=True)
    return paths


def task_merge(_: DictConfig, settings: Settings) -> None:
    """Do `task=merge`: copy runs and calibrations of other folders into `runs_dir`; conflicts are one line each.

    Raises:
        ConfigError: a folder is missing, or something was in conflict and not merged.
    """
    if not settings.sources:
        raise ConfigError(
            "from: missing; task=merge from=other/runs names a folder of runs, from=[a,b] several"
        )
    sources = [Path(source).expanduser() for source in settings.sources]
    for source in sources:
        if not source.is_dir():
            raise ConfigError(f"from={source}: no such folder")
        if settings.runs_dir.exists() and source.samefile(settings.runs_dir):
            raise ConfigError(f"from={source}: is runs_dir itself; name another folder")
    merged = [one for source in sources for one in merge_runs(source, settings.runs_dir)]
    problems = [one for one in merged if one.problem is not None]
    for one in problems:
        CONSOLE.print(f"conflict: {one.name}: {one.problem}", highlight=False, markup=False, soft_wrap=True)
    added, known = sum(one.added for one in merged), sum(one.known for one in merged)
    said = f"merged {len(merged)} runs and calibrations: {added} samples added, {known} known"
    CONSOLE.print(f"{said}; {len(problems)} conflicts", highlight=False)
    if problems:
        raise ConfigError(
            f"task=merge: {len(problems)} conflicts; what was in {settings.runs_dir} is unchanged"
        )


TASKS = {
    "run": task_run,
    "evaluate": task_evaluate,
    "bounds": task_bounds,
    "plan": task_plan,
    "check": task_check,
    "doctor": task_doctor,
    "weights": task_weights,
    "calibrate": task_calibrate,
    "profile": task_profile,
    "train": task_train,
    "report": task_report,
    "dashboard": task_dashboard,
    "export": task_export,
    "merge": task_merge,
}
