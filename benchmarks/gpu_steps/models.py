"""Step that compares the embedded models on the GPU with the CPU, in float32 and in 16 bits."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import MODELS, Generator, choose_settings, compare, load
from benchmarks.support.build import build_model
from kvbench.models.outputs import Outputs

BUDGET = "0.7"


class Compressed(NamedTuple):
    """Choices and settings of a method, and the dtype of a low-bit cache."""

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
THRESHOLDS = {"float32": {"images": 45.0, "texts": 0.999}, "16 bits": {"images": 30.0, "texts": 0.5}}
"""Minimum of the median sample: PSNR in dB or the share of equal leading text. Another order of sums sometimes flips a
sampled bit, and then the image differs. In 16 bits a CPU's medians are at least 34 dB."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield every model with every compression, in float32 and then in 16 bits."""
    models = machine.choose([*MODELS], [*MODELS], ["var_tiny"])
    names = machine.choose([*CASES], [*CASES], ["heatkv", "int4"])
    for label, model in product(machine.choose([*THRESHOLDS], [*THRESHOLDS], ["float32"]), models):
        device = cache(partial(load_on_device, machine, model, label))
        for name in names if label == "float32" else machine.choose(names, ["heatkv"]):
            yield Case(f"{model} {name} {label}", partial(check, machine, model, device, name, label))


@cache
def load_reference(machine: Machine, name: str) -> Generator:
    """Load a model on the CPU in float32, once."""
    return load(choose_settings(machine, name), machine.choose(3, 1), "cpu", torch.float32)


@cache
def draw_reference(machine: Machine, name: str, compressed: Compressed) -> Outputs:
    """Return a model's samples on the CPU for a compression, once."""
    return draw(load_reference(machine, name), compressed)


def load_on_device(machine: Machine, name: str, label: str) -> Generator:
    """Load a model in float32, its decoder too, or in 16 bits: its own dtypes on a GPU, float16 in a rehearsal."""
    overrides, model = choose_settings(machine, name), build_model(name)
    if label == "float32" and model.output == "images":
        overrides.append("model.decoder_dtype=float32")
    half = model.half if not machine.interpreted else machine.half
    return load(
        overrides, machine.choose(3, 1), machine.device, torch.float32 if label == "float32" else half
    )


def check(machine: Machine, model: str, load: Callable[[], Generator], name: str, label: str) -> Figures:
    """Generate on the device and compare the outputs with the CPU's; raise `Failed` below the threshold."""
    reference, device = draw_reference(machine, model, CASES[name]), load()
    with machine.branches():
        samples = draw(device, CASES[name])
    similarity = compare(samples, reference)
    figures = {"nearness": round(median(similarity), 3), "least": round(min(similarity), 3)}
    threshold = THRESHOLDS[label][device.model.output]
    if label == "16 bits":
        threshold *= machine.choose(1, 0.3)  # random weights amplify rounding
    if figures["nearness"] < threshold:
        raise Failed(f"samples differ from the CPU's: {figures}, the median must be at least {threshold}")
    return figures


def draw(generator: Generator, compressed: Compressed) -> Outputs:
    """Generate the outputs of a case, with its method and storage."""
    method = generator.prepare(compressed.method, BUDGET)
    return generator.draw(generator.open_cache(method, compressed.stored))
