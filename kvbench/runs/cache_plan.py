"""Storage and budget of a run's cache, computed from settings, model and method."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.core.settings import Settings
from kvbench.core.storage import CHANNEL, CODE_DTYPES, CODEBOOKS, select_used
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing
from kvbench.engine.memory import token_bytes
from kvbench.engine.packed.bytes import find_sure_capacity
from kvbench.engine.recording.graphs import CudaGraphs, GraphRecorder
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model


@dataclass(frozen=True)
class CachePlan:
    """Storage of a run's keys and values.

    Attributes:
        spec: shapes of the heads that this process holds.
        dtype: dtype of stored keys and values; for low-bit storage, the dtype they are decoded to.
        packing: low-bit storage; None if values are stored in `dtype`.
        codebooks: observer that calibrates static codebooks; None if none are needed.
        graph_obstacle: why no CUDA graphs are recorded; None if they are.
    """

    spec: ModelSpec
    dtype: torch.dtype
    packing: Packing | None
    codebooks: Codebooks | None
    graph_obstacle: str | None

    def make_recorder(self) -> GraphRecorder | None:
        """Make a recorder of CUDA graphs; None if steps are not recorded."""
        return CudaGraphs() if self.graph_obstacle is None else None


def find_graph_obstacle(
    settings: Settings, model: Model, method: Method, packing: Packing | None
) -> str | None:
    """Return why no CUDA graphs are recorded; None if they are."""
    if settings.cuda_graph is False:
        return "cuda_graph=false"
    if not settings.device.startswith("cuda"):
        return f"device={settings.device} has no CUDA graphs"
    if model.processes.count > 1:
        return f"steps of several processes are not recorded (model.tensor_parallel={model.processes.count})"
    if packing is not None:
        return "steps that read low-bit storage are not recorded"
    if model.spec.family != "next-token" and (obstacle := method.graph_obstacle) is not None:
        return f"no scale of {model.name} is recorded under method={method.title}: {obstacle}"
    if method.uses.sparse_reads:
        return f"method={method.title} selects what every step attends to, so that no step can be repeated"
    return None


def find_dtype(settings: Settings, model: Model) -> torch.dtype:
    """Return the dtype of stored keys and values; for low-bit storage, the dtype they are decoded to."""
    name = settings.cache_dtype
    if name == "auto" or name in CODE_DTYPES:
        return model.compute_dtype(settings.device)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def find_packing(settings: Settings, method: Method) -> Packing | None:
    """Return the low-bit storage of keys and values; None if they are stored in the dtype of `find_dtype`."""
    name, storage = settings.cache_dtype, settings.storage
    if method.uses.precisions:
        return Packing(16, CODEBOOKS)
    if name == "fp8":
        used: dict[str, Any] = select_used(asdict(storage), name)
        return Packing(8, replace(CHANNEL, **used), fp8=True)
    return Packing(CODE_DTYPES[name], storage) if name in CODE_DTYPES else None


def read_budget(settings: Settings, model: Model, method: Method, packing: Packing | None) -> Budget:
    """Return the configured budget, in tokens, or in bytes of keys and values as stored.

    The capacity in tokens of a budget in bytes fits whichever tokens the method keeps.

    Raises:
        ValueError: the configured value is not a valid budget.
    """
    if settings.budget_unit == "tokens":
        return Budget.parse(settings.budget, model.spec)
    if packing is not None and not method.uses.precisions:
        return find_sure_capacity(Budget.parse_bytes(settings.budget, model.spec, 1), model.spec, packing)
    # A method's own precisions have 16 bits at most.
    itemsize = 2 if method.uses.precisions else find_dtype(settings, model).itemsize
    each = token_bytes(model.spec, itemsize, biased=method.uses.bias)
    return Budget.parse_bytes(settings.budget, model.spec, each)
