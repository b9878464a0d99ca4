"""`task=calibrate`: the calibrations of a method, or of every method of a model."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import list_choices, make_each
from kvbench.cli.console import say
from kvbench.cli.tasks.job import make_job
from kvbench.core.settings import Settings
from kvbench.methods.heatkv.order_file import write_orders
from kvbench.methods.heatkv.scores import AttentionByScale, rank_heads, scas
from kvbench.methods.shared.calibration import Observer
from kvbench.runs.generate.batch import load
from kvbench.runs.prepare import locate_calibration, observe


def calibrate(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Run `task=calibrate`: calibrate the method, or every method for the model if it needs no calibration.

    Returns:
        The calibrations' files.
    """
    job = make_job(cfg, settings)
    needs = job.method.needs()
    observers = [needs] if isinstance(needs, Observer) else []
    if not observers:
        observers = list_observers(cfg)
    observers += [] if job.cache_plan.codebooks is None else [job.cache_plan.codebooks]
    load(job)
    artifacts = observe(job, observers)
    paths = [locate_calibration(job, observer)[0] for observer in observers]
    for observer, path in zip(observers, paths, strict=True):
        say(f"{observer.kind}: {path}")
    orders = job.settings.calibrate.orders
    for artifact in artifacts if orders is not None else ():
        if artifact.kind == AttentionByScale.kind:
            ranks = rank_heads(scas(artifact.tensors["mass"]))
            write_orders(Path(str(orders)).expanduser(), ranks, job.settings.sinks, artifact.metadata)
            say(f"orders: {orders}")
    return paths


def list_observers(cfg: DictConfig) -> list[Observer]:
    """Return the observers of the methods for the model, each method at its defaults, without duplicates."""
    family = instantiate(cfg.model).spec.family
    methods = (method for _, method in make_each("method", list_choices("method"), cfg))
    needs = [method.needs() for method in methods if family in method.families]
    return list({repr(one): one for one in needs if isinstance(one, Observer)}.values())
