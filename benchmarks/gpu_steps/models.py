"""The embedded models on the GPU against the CPU: in float32 the same but for rounding, in 16 bits nearly so."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import MODELS, SHRUNK, Generator, compare, load
from benchmarks.support.build import build_model
from kvbench.models.outputs import Outputs

BUDGET = "0.7"


class Compressed(NamedTuple):
    """A method by its choices and settings, and the dtype of a cache in few bits."""

    method: tuple[str, ...]
    stored: str | None = None


CASES: Mapping[str, Compressed] = {
    "full": Compressed(("method=full",)),
    "heatkv": Compressed(("method=heatkv",)),
    "snapkv": Compressed(("method=snapkv",)),
    "hard_kv exact": Compressed(("method=hard_kv", "method.merge=exact")),
    "int4": Compressed(("method=full",), "int4"),
    "fp8": Compressed(("method=full",), "fp8"),
}
NEAR = {
    "float32": {"images": 45.0, "texts": 0.999},
    "16 bits": {"images": 30.0, "texts": 0.5},
}
"""Threshold of the median sample, dB of PSNR or the share of equal leading text. Another order of sums turns a drawn
bit now and then, and that image becomes another one. In 16 bits a CPU's medians are 34 dB or more."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield every model with every way of compression, in float32 and then in 16 bits."""
    models = machine.choose([*MODELS], [*MODELS], ["var_tiny"])
    kept = machine.choose([*CASES], [*CASES], ["heatkv", "int4"])
    expected = {name: Reference(machine, name) for name in models}
    for label, model in product(machine.choose([*NEAR], [*NEAR], ["float32"]), models):
        device = cache(partial(load_on_device, machine, model, label))
        for name in kept if label == "float32" else machine.choose(kept, ["heatkv"]):
            yield Case(
                f"{model} {name} {label}", partial(check, machine, expected[model], device, name, label)
            )


class Reference:
    """A model on the CPU in float32, loaded once, and what it draws by every way of compression.

    Args:
        machine: says how many prompts there are.
        name: of the model.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        self._load = cache(
            partial(load, choose_settings(machine, name), machine.choose(3, 1), "cpu", torch.float32)
        )
        self.draw = cache(lambda compressed: draw(self._load(), compressed, torch.float32))


def choose_settings(machine: Machine, name: str) -> list[str]:
    """Return a model's settings; a rehearsal's model has random weights and a few tokens."""
    return [f"model={name}", *MODELS[name], *machine.choose((), SHRUNK[name])]


def load_on_device(machine: Machine, name: str, label: str) -> Generator:
    """Load a model in float32, or in the 16 bits that it computes in on a GPU."""
    overrides = choose_settings(machine, name)
    half = build_model(name).half if not machine.interpreted else machine.half
    return load(
        overrides, machine.choose(3, 1), machine.device, torch.float32 if label == "float32" else half
    )


def check(
    machine: Machine, expected: Reference, load: Callable[[], Generator], name: str, label: str
) -> Figures:
    """Generate on both and compare.

    Raises:
        Failed: the device makes something else.
        Skipped: the method is for models of another family.
    """
    reference, device = expected.draw(CASES[name]), load()
    with machine.branches():
        found = draw(device, CASES[name], device.model.compute_dtype(machine.device))
    near = compare(found, reference)
    figures = {"nearness": round(median(near), 3), "least": round(min(near), 3)}
    wanted = NEAR[label][device.model.output]
    if label == "16 bits":
        wanted *= machine.choose(1, 0.3)  # random weights enlarge what rounding does
    if figures["nearness"] < wanted:
        raise Failed(f"not what the CPU makes: {figures}, at least {wanted} wanted")
    return figures


def draw(one: Generator, compressed: Compressed, dtype: torch.dtype) -> Outputs:
    """Generate by a compression.

    Raises:
        Skipped: its method is for models of another family.
    """
    method = one.prepare(compressed.method, BUDGET)
    return one.draw(one.open_cache(method, dtype, compressed.stored))
