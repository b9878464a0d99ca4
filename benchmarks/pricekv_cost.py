"""Cost of PriceKV at a model's real shapes: calibration on random queries, keys and values, and allocation.

python -m benchmarks pricekv_cost [--model infinity_8b] [--device cpu] [--layers 1] [--prompts 5] [--budgets 0.04,0.1]

The allocation runs first, with random errors that decrease with the number of kept tokens. The calibration is timed on
`--layers` layers and all segments of one prompt, without the generation, and scaled to all layers and `--prompts`
prompts. CPU seconds are processor time. Memory is the increase of the process's peak (on a GPU the allocator's),
including the layer's random keys and queries.
"""

import argparse
import resource
from time import perf_counter, process_time

import torch

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.engine.layer import LayerInputs, LayerStore
from kvbench.engine.schedule import show_layer
from kvbench.kernels.layout import empty_layout
from kvbench.methods.pricekv.errors import SubsetError, sum_subsets
from kvbench.methods.pricekv.method import PriceKV
from kvbench.methods.pricekv.problem import list_sources, measure_usage
from kvbench.methods.shared.calibration import Artifact

MIB = 2**20


OPTIONS = {
    "model": "infinity_8b", "device": "auto", "prompts": 5, "threads": None,
    "layers": Option(1, "timed layers"),
    "budgets": Option("0.04,0.1", "allocated budgets, separated by commas"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print both costs."""
    spec = build_model(options.model).spec
    print(
        f"{spec.name}: {spec.layers} x {spec.heads} heads of {spec.head_dim} channels, {len(spec.segments)} segments"
    )
    observer = SubsetError()
    observer.prepare(spec)
    artifact = make_errors(spec, observer)
    for budget in options.budgets.split(","):
        before, start = read_peak("cpu"), process_time()
        method = PriceKV()
        method.prepare(spec, Budget.parse(budget, spec), artifact)
        seconds, held = process_time() - start, measure_usage(method.problem, method.solution).max()
        more = (read_peak("cpu") - before) / MIB
        print(
            f"allocation at {budget}: {seconds:.0f} s of a CPU, {more:.0f} MiB more at the peak; "
            f"{held} of {method.budget.tokens} tokens"
        )
    before, layers = read_peak(options.device), min(options.layers, spec.layers)
    seconds = time_calibration(spec, observer, options.device, layers)
    more = (read_peak(options.device) - before) / MIB
    print(
        f"statistics: {observer.sums['error'].nbytes / MIB:.0f} MiB; measuring them on {options.device}: "
        f"{seconds:.2f} s a layer and prompt, {seconds * spec.layers * options.prompts:.0f} s for {spec.layers} "
        f"layers and {options.prompts} prompts; {more:.0f} MiB more at the peak"
    )


def time_calibration(spec: ModelSpec, observer: SubsetError, device: str, layers: int) -> float:
    """Return the seconds of the observer for a layer of one prompt's generation."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    projection = torch.randn(
        spec.heads * spec.head_dim, spec.heads * spec.head_dim, device=device, dtype=dtype
    )
    rows, seconds = spec.branches * spec.heads, 0.0
    clock = process_time if device == "cpu" else perf_counter
    layout = empty_layout(rows, device)
    empty = torch.zeros(1, 0, spec.head_dim, device=device, dtype=dtype)
    for layer in range(layers):
        keys = torch.randn(1, rows, spec.segments[-1].end, spec.head_dim, device=device, dtype=dtype)
        for segment in spec.segments:
            # The whole past is passed as part of the segment; nothing else is stored.
            q = torch.randn(1, rows, segment.length, spec.head_dim, device=device, dtype=dtype)
            past = keys[:, :, : segment.end]
            store = LayerStore(layout, empty, empty)
            inputs = LayerInputs(
                layer, q, past, past, store, spec.head_dim**-0.5, projection=lambda _: projection
            )
            view = show_layer(layer, segment, layout, spec, spec.branches, inputs)
            view.position = torch.arange(segment.end, device=device).expand(rows, -1)
            view.segment_ids = torch.repeat_interleave(
                torch.arange(segment.index + 1, device=device),
                torch.tensor(spec.lengths[: segment.index + 1], device=device),
            ).expand(rows, -1)
            start = clock()
            observer.accumulate(view)  # ends on the CPU
            seconds += clock() - start
    return seconds / layers


def make_errors(spec: ModelSpec, observer: SubsetError) -> Artifact:
    """Make errors that decrease with the number of kept tokens: squares of the missing random masses."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for sources in list_sources(spec, observer.recent)[1:]:
        masses = (
            torch.rand(spec.layers, spec.heads, len(sources), generator=generator, dtype=torch.float64) ** 4
        )
        errors.append((masses.sum(-1, keepdim=True) - sum_subsets(masses)).square())
    return Artifact(observer.kind, {"error": torch.cat(errors, -1)})


def read_peak(device: str) -> int:
    """Return the peak bytes so far of the process, or of the allocator on a GPU."""
    if device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_allocated()
