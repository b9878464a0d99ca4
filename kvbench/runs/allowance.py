"""The budget of a run, from the configured value to the capacity that the method gets."""

from dataclasses import dataclass, replace

import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.core.settings import Settings
from kvbench.core.storage import CHANNEL, CODE_DTYPES, CODEBOOKS
from kvbench.engine.coding.formats import Packing
from kvbench.engine.memory import token_bytes
from kvbench.engine.packed.bytes import bound_token_bytes, find_sure_capacity
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.capabilities import is_biased, mixes_precisions
from kvbench.models.base import Model


@dataclass(frozen=True)
class Allowance:
    """The budget of one run at each stage.

    Attributes:
        requested: the configured budget; its capacity fits whatever the method keeps.
        upper: the same bytes with the largest capacity in tokens that may fit.
        shard: this process's share of `requested`.
        final: the budget with the capacity of the prepared method, which may exceed `requested`; before, `requested`.
    """

    requested: Budget
    upper: Budget
    shard: Budget
    final: Budget


def find_allowance(settings: Settings, model: Model, method: Method, share: ModelSpec) -> Allowance:
    """Return the budget of a run; the full cache for a method without a budget, whose configured value is checked too.

    Args:
        settings: they hold the configured budget.
        model: whose shapes count.
        method: prepared or not.
        share: shapes of the heads that this process holds.

    Raises:
        ValueError: the configured value is no budget.
    """
    requested = read_budget(settings, model, method)
    if not method.budgeted:
        requested = Budget.parse(1, model.spec)
    packing, upper, final = find_packing(settings, method), requested, requested
    if packing is not None:
        final = getattr(method, "budget", requested)
        if requested.bytes is not None and method.static and not mixes_precisions(method):
            min_bytes, _ = bound_token_bytes(model.spec, packing)
            upper = Budget.parse_bytes(settings.budget, model.spec, min_bytes)
    return Allowance(requested, upper, requested.take_share(model.spec, share), final)


def find_dtype(settings: Settings, model: Model) -> torch.dtype:
    """Return the dtype of stored keys and values; of those in few bits, what attention reads them in."""
    name = settings.cache_dtype
    if name == "auto" or name in CODE_DTYPES:
        return model.compute_dtype(settings.device)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def find_packing(settings: Settings, method: Method) -> Packing | None:
    """Return how keys and values are stored in few bits; None where they are numbers of `find_dtype`."""
    name, storage = settings.cache_dtype, settings.storage
    if mixes_precisions(method):
        return Packing(16, CODEBOOKS)
    if name == "fp8":  # has no scales to choose
        plain = replace(CHANNEL, residual=storage.residual, before_rotation=storage.before_rotation)
        return Packing(8, plain, fp8=True)
    return Packing(CODE_DTYPES[name], storage) if name in CODE_DTYPES else None


def read_budget(settings: Settings, model: Model, method: Method) -> Budget:
    """Return the budget that settings name, in tokens or in bytes of keys and values as they are stored.

    Its capacity is what is sure to fit, whatever the method keeps.

    Raises:
        ValueError: it is none.
    """
    if settings.budget_unit == "tokens":
        return Budget.parse(settings.budget, model.spec)
    packing = find_packing(settings, method)
    if packing is not None and not mixes_precisions(method):
        return find_sure_capacity(Budget.parse_bytes(settings.budget, model.spec, 1), model.spec, packing)
    # A method's own precisions have 16 bits at most.
    itemsize = 2 if mixes_precisions(method) else find_dtype(settings, model).itemsize
    each = token_bytes(model.spec, itemsize, biased=is_biased(method))
    return Budget.parse_bytes(settings.budget, model.spec, each)
