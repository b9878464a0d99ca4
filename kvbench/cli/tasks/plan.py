"""`task=plan`: schedule and memory of a run from shapes, or a paper's memory column."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import list_choices, list_methods
from kvbench.cli.console import CONSOLE, say
from kvbench.core.settings import Settings
from kvbench.engine.memory import token_bytes
from kvbench.engine.packed.bytes import bound_token_bytes
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.plan import Plan, export, make_plan
from kvbench.report.plan_table import show_plan
from kvbench.runs.cache_plan import find_dtype, find_packing, read_budget


def plan(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=plan`: print schedule and memory from shapes, or a paper's memory column."""
    if settings.plan.table is not None:
        _show_paper_memory(settings.plan.table)
        return
    method = instantiate(cfg.method)
    made = plan_cache(settings, instantiate(cfg.model), method)
    show_plan(CONSOLE, made, list_methods(made.spec.family))
    if settings.plan.export is not None:
        export(Path(settings.plan.export), made.spec, made.budget, method)
        say(f"schedule written to {settings.plan.export}")


def plan_cache(settings: Settings, model: Model, method: Method) -> Plan:
    """Return what the cache of a run will hold; prepares the method."""
    packing = find_packing(settings, method)
    budget, dtype = read_budget(settings, model, method, packing), find_dtype(settings, model)
    stored, flying = (
        token_bytes(model.spec, one.itemsize, biased=method.uses.bias)
        for one in (dtype, model.compute_dtype(settings.device))
    )
    if packing is not None:
        _, stored = bound_token_bytes(model.spec, packing)
    return make_plan(
        model, budget, method, settings.batch_size, settings.plan.gpu_gib, stored, flying, packing
    )


def _show_paper_memory(name: str) -> None:
    """Print a published memory column next to the one worked out from the shapes of its models."""
    from kvbench.report.papers import comparison, memory

    specs, choices = {}, list_choices("model")
    for model in memory.models(name):
        if model in choices:
            specs[model] = instantiate(hydra.compose("config", overrides=[f"model={model}"]).model).spec
        else:
            say(f"left out: model={model} has no configuration here")
    if figures := memory.TABLES[name](specs):
        comparison.show_printed(CONSOLE, name, memory.sources(name), figures)
