"""`task=plan`: schedule and memory of a run from shapes, or a paper's memory column."""

from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from kvbench.cli.config.compose import list_words, name_method
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import list_choices, list_methods
from kvbench.cli.console import CONSOLE, ONCE, say
from kvbench.cli.tasks.job import make_method
from kvbench.core.budget import InfeasibleBudget
from kvbench.core.cards import CARDS
from kvbench.core.settings import Settings
from kvbench.engine.memory import token_bytes
from kvbench.engine.packed.bytes import bound_token_bytes
from kvbench.forced.decoding import ForcedDecoding
from kvbench.forced.given import GivenTexts
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.plan import Plan, export, find_floors, make_plan
from kvbench.prompts.retrieval import Retrieval
from kvbench.prompts.tasks import READ, Task
from kvbench.prompts.texts import Texts
from kvbench.report.plan_table import show_floors, show_plan
from kvbench.report.tables import print_line
from kvbench.runs.cache_plan import find_dtype, find_packing, read_budget
from kvbench.runs.job import fit_prompts, read_or_write


def plan(cfg: DictConfig, settings: Settings) -> None:
    """Run `task=plan`: print schedule and memory from shapes, or a paper's memory column."""
    if settings.plan.table is not None:
        _show_paper_memory(settings.plan.table)
        return
    card = CARDS.get(settings.device)
    if card is not None or any(word.startswith("plan.gpu_gib=") for word in list_words()):
        settings = replace(settings, device="cuda")
    method = make_method(cfg.method, name_method())
    model, source = instantiate(cfg.model), instantiate(cfg.prompts)
    if isinstance(source, Texts | Retrieval) or (isinstance(source, Task) and source.answer == READ):
        # These are scored by forced decoding, with another schedule.
        model = read_or_write(model, fit_prompts(model, source.load()), [])
    try:
        made = plan_cache(settings, model, method)
    except InfeasibleBudget as error:
        if model.spec.padding_counts or settings.budget_unit == "bytes" or isinstance(model, ForcedDecoding):
            raise
        longest = model.spec.segments[0].length
        raise InfeasibleBudget(
            f"{error}; a plan is for prompts of at most model.prompt_tokens={longest} tokens, a run for its own"
        ) from None
    show_plan(CONSOLE, made)
    fitting = f"methods for {made.spec.name}, a {made.spec.family} model: {', '.join(list_methods(made.spec.family))}"
    if fitting not in ONCE.seen:
        ONCE.seen.add(fitting)
        print_line(CONSOLE, fitting, "")
    if card is not None:
        floors = {
            name: find_floors(made.spec, made.steps, held, made.batch, model.least_work, card)
            for name, held in made.contents.items()
        }
        show_floors(CONSOLE, made, floors, card)
    if settings.plan.export is not None:
        export(Path(settings.plan.export).expanduser(), made.spec, made.budget, method)
        say(f"schedule written to {settings.plan.export}")


def plan_cache(settings: Settings, model: Model, method: Method, longest: int | None = None) -> Plan:
    """Return what the cache of a run will hold; prepares the method.

    The longest prompt has `longest` tokens; None for the longest prompt that the model takes.
    """
    packing = find_packing(settings, method)
    budget, dtype = read_budget(settings, model, method, packing), find_dtype(settings, model)
    stored, flying = (
        token_bytes(model.spec, one.itemsize, biased=method.uses.bias)
        for one in (dtype, model.compute_dtype(settings.device))
    )
    if packing is not None:
        packing.check(model.spec)
        _, stored = bound_token_bytes(model.spec, packing)
    scored = model.schedule.length - model.schedule.given if isinstance(model, GivenTexts) else None
    batch, gib = settings.batch_size, settings.plan.gpu_gib
    dtypes = dtype, find_dtype(replace(settings, device="cuda"), model)
    return make_plan(model, budget, method, batch, gib, stored, flying, dtypes, packing, longest, scored)


def _show_paper_memory(name: str) -> None:
    """Print a published memory column beside the column computed from the shapes of its models."""
    from kvbench.report.papers import comparison, memory

    specs, choices = {}, list_choices("model")
    for model in memory.models(name):
        if model in choices:
            specs[model] = instantiate(hydra.compose("config", overrides=[f"model={model}"]).model).spec
        else:
            say(f"left out: model={model} has no configuration here")
    if figures := list(memory.TABLES[name](specs)):
        comparison.show_printed(CONSOLE, name, memory.sources(name), figures)
