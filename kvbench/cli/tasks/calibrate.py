"""`task=calibrate`: the calibrations of a method, or of every method of a model."""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import leaving_out, list_methods
from kvbench.cli.console import say
from kvbench.cli.tasks.job import make_job
from kvbench.core.settings import Settings
from kvbench.engine.coding.scale_residuals import SIDES, ScaleResiduals, share_energies
from kvbench.methods.heatkv.order_file import write_orders
from kvbench.methods.heatkv.scores import AttentionByScale, rank_heads, scas
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.report.figures.draw import NOT_INSTALLED, can_draw
from kvbench.runs.generate.batch import load
from kvbench.runs.job import Job
from kvbench.runs.prepare import locate_calibration, observe


def calibrate(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Do `task=calibrate`: calibrate the method, or every method of the model if the method needs nothing.

    With `storage.centroids=scale`, a method that needs nothing calibrates the predictions of scales alone.

    Returns:
        The calibrations' files.
    """
    job = make_job(cfg, settings)
    needs = job.method.needs()
    observers = [needs] if isinstance(needs, Observer) else []
    predicted = isinstance(job.cache_plan.codebooks, ScaleResiduals)
    if not observers and not predicted:
        observers = list_observers(cfg)
    observers += [] if job.cache_plan.codebooks is None else [job.cache_plan.codebooks]
    load(job)
    artifacts = observe(job, observers)
    paths = [locate_calibration(job, observer)[0] for observer in observers]
    for observer, path in zip(observers, paths, strict=True):
        say(f"{observer.kind}: {path}")
    for artifact, path in zip(artifacts, paths, strict=True):
        if artifact.kind == ScaleResiduals.kind:
            _show_energies(job, artifact, path)
    orders = job.settings.calibrate.orders
    for artifact in artifacts if orders is not None else ():
        if artifact.kind == AttentionByScale.kind:
            ranks = rank_heads(scas(artifact.tensors["mass"]))
            write_orders(Path(str(orders)).expanduser(), ranks, job.settings.sinks, artifact.metadata)
            say(f"orders: {orders}")
    return paths


def _show_energies(job: Job, artifact: Artifact, path: Path) -> None:
    """Print the energies of scales as shares of the whole, and draw them beside the calibration."""
    sizes = [(segment.height, segment.width) for segment in job.model.spec.segments[:-1]]
    for side in SIDES:
        plain, predicted = share_energies(artifact.tensors, side)
        for (height, width), before, after in zip(sizes, plain, predicted, strict=True):
            say(
                f"{side} of {height} x {width} tokens: plain {before:.3f}, predicted {after:.3f} of the energy"
            )
        factors = artifact.tensors[f"{side}_factor"]
        say(
            f"{side}: {100 * float((factors[..., 1:] != 0).double().mean()):.0f} % of scales and heads predicted"
        )
    if not can_draw():
        say(NOT_INSTALLED)
        return
    from kvbench.report.figures import scale_plots, styles  # take long to import

    title = (
        f"{job.model.name}: energy of scales and of their differences, {len(job.calibration_prompts)} prompts"
    )
    shares = {side: share_energies(artifact.tensors, side) for side in SIDES}
    say(f"figure: {styles.save(scale_plots.draw_energies(shares, sizes, title), path.with_suffix('.png'))}")


def list_observers(cfg: DictConfig) -> list[Observer]:
    """Return the observers of the methods for the model, each method at its defaults, without duplicates."""
    other, needs = cfg.copy(), []
    OmegaConf.set_struct(other, False)
    for name in list_methods(instantiate(cfg.model).spec.family):
        with leaving_out(f"method={name}"):
            other.method = hydra.compose(f"method/{name}").method
            needs.append(instantiate(other.method).needs())
    return list({repr(one): one for one in needs if isinstance(one, Observer)}.values())
