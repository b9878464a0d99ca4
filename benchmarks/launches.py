"""Counts of Triton kernels, torch operations, copies and host synchronisations in a generation.

No GPU is needed: whole generations run on tensors without data (`fake_gpu.py`). Counted are the operations of torch
that write on the device; a library may launch several kernels for one of them. The host waits when it reads a scalar
and during copies that are not asynchronous. Reads of methods that look at data, one per layer and scale, are replaced
here and not counted. With `--repeated`, CUDA graphs repeat the scales, as from the third batch on, and the host's other
launches are counted; a method whose scales are not recorded has no replays.

For a next-token model, the benchmark counts one token in the middle of a segment, sampling included, and its last layer
alone: once with torch's operations for norms, rotation and gate, once with Triton kernels. Then it counts what Python
launches in a whole generation after the first, with one recorded step that is repeated, and step by step. A repetition
is one launch.

python -m benchmarks launches [--model infinity_2b] [--batch 8] [--method heatkv --budget 0.1] [--names 12]
python -m benchmarks launches --model qwen3_8b --budget 1 model.max_tokens=512
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, get_args
from unittest.mock import patch

from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from benchmarks.support.fake_gpu import CountedReplays, Model, prepare, run
from benchmarks.support.table import Table
from benchmarks.support.triton_launches import Variant
from kvbench.methods.shared.base import Method
from kvbench.models.next_token import NextTokenModel
from kvbench.models.noise import Kind
from kvbench.models.parts.decoder import Decoder, DecoderBlock

COPIES = {"clone", "copy_", "_to_copy", "cat", "index_select", "stack"}
NO_WRITES = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "device",
}  # fmt: skip
"""Operations of torch, besides views, that write nothing on the device."""
CASES = (("full", "1"), ("heatkv", "0.1"), ("heatkv", "0.04"), ("snapkv", "0.1"))
"""Default methods and budgets; the last method looks at data."""


class Watch(DeviceWatch):
    """Counter of operations that write on the device, of those the host waits for, and of bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copied = 0

    def note_read(self, number: Tensor) -> None:
        """Count a device-to-host read of a scalar."""
        self.waits["_local_scalar_dense"] += number.is_cuda

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Count an operation that writes on the device, and a copy that the host waits for."""
        name = func.overloadpacket.__name__
        devices = {tensor.device.type for tensor in list_tensors((args, kwargs)) + results}
        if "cuda" not in devices or name in NO_WRITES or func.is_view:
            return
        self.operations[name] += 1
        if name in COPIES:
            self.copied += sum(tensor.nbytes for tensor in results)
        if len(devices) > 1 and name in ("_to_copy", "copy_"):
            free = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            self.waits[name] += not free


OPTIONS = {
    "noise": Option("counter", "kind of noise; `stream` is generated on the CPU", choices=get_args(Kind)),
    "model": "infinity_2b", "batch": 8, "method": None, "budget": "0.1", **OVERRIDES,
    "repeated": Option(False, "count a generation whose scales CUDA graphs repeat"),
    "names": Option(0, "number of operations of each method that are listed"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the counts of each method and budget, or of one token of a next-token model."""
    model, method = prepare_case(options, options.method or "full", options.budget)
    if isinstance(model, NextTokenModel):
        count_recorded(options, count_tokens(options, model, method))
    else:
        count_generations(options)


def prepare_case(options: argparse.Namespace, method: str, budget: str) -> tuple[Model, Method]:
    """Prepare the model of the options and a method (`prepare`)."""
    return prepare([f"model={options.model}", f"method={method}", f"budget={budget}", *options.overrides])


def count_generations(options: argparse.Namespace) -> None:
    """Print the launches and operations of whole generations."""
    print(f"{options.model}, batch {options.batch}, one generation")
    counts = dict.fromkeys(("Triton", "torch", "copies"), "d")
    columns = {"budget": "s"} | counts | {"GB copied": ".2f", "waits": "d", "replays": "d"}
    table = Table(columns, "method")
    for method, budget in ((options.method, options.budget),) if options.method else CASES:
        watch, launches = Watch(), list[Variant]()
        record = CountedReplays() if options.repeated else None
        before = 2 if options.repeated else 1
        case = prepare_case(options, method, budget)
        run(*case, options.batch, watch, launches, before=before, record=record, kind=options.noise)
        launched = count_kernels(launches)
        copies = sum(count for name, count in watch.operations.items() if name in COPIES)
        kernels, operations, waits = (counts.total() for counts in (launched, watch.operations, watch.waits))
        replays = None if record is None else record.replays
        table.add(method, budget, kernels, operations, copies, watch.copied / 1e9, waits, replays)
        list_names(options, launched, watch.operations, watch.waits)


def count_tokens(options: argparse.Namespace, model: Model, method: Method) -> int:
    """Print the counts of one token, with torch's operations, then with Triton kernels; return the second total."""
    print(f"{options.model}, {type(method).__name__}, batch {options.batch}, one token")
    columns = dict.fromkeys(("Triton a layer", "torch a layer"), "d")
    table = Table(columns | dict.fromkeys(("Triton", "torch", "waits"), "d"), "norms, rotation, gate")
    for name, uses_triton in (("torch", False), ("programs", True)):
        with ExitStack() as stack:
            for module in ("modulate", "qk_norm_rope", "rms_norm", "swiglu"):
                target = f"kvbench.kernels.{module}.uses_triton"
                stack.enter_context(patch(target, lambda x, triton=uses_triton: triton and x.is_cuda))
            layer, token = count_token(model, method, options)
        shares = (layer[kind].total() for kind in ("Triton", "torch"))
        table.add(name, *shares, *(counts.total() for counts in token.values()))
        list_names(options, *layer.values())
    return token["Triton"].total() + token["torch"].total()


def count_recorded(options: argparse.Namespace, token: int) -> None:
    """Print what Python launches in the second generation of a next-token model with CUDA graphs, and without.

    `token` is the number of launches of one token.
    """
    name, columns = options.method or "full", ("Triton", "torch", "repetitions", "launches", "waits")
    print(f"\n{options.model}, {name}, batch {options.batch}, one generation")
    watch, launches, record = Watch(), list[Variant](), CountedReplays()
    model, method = prepare_case(options, name, options.budget)
    run(model, method, options.batch, watch, launches, before=1, record=record, kind=options.noise)
    counts, tokens = (len(launches), watch.operations.total(), record.replays), model.spec.drawn_tokens
    table = Table(dict.fromkeys(columns, "d"), "steps", 16)
    table.add("one recording", *counts, sum(counts), watch.waits.total())
    print(
        f"one by one: {tokens} tokens of {token} launches, {tokens * token} in all, without changes of storage"
    )
    list_names(options, watch.operations, watch.waits)


Counts = dict[str, Counter[str]]
"""Counts by name, for each of `Triton` kernels, `torch` operations and `waits` of the host."""
DECODER_CALLS = 4
"""Calls of the decoder in a generation: the prompt, then tokens of one segment. The last call is counted."""


class StopGeneration(Exception):
    """Signal that ends a generation after the last counted call."""


def count_token(model: Model, method: Method, options: argparse.Namespace) -> tuple[Counts, Counts]:
    """Return the counts of the last layer in one token, and of the whole token."""
    watch, launches = Watch(), list[Variant]()
    tokens, layers = list[Counts](), list[Counts]()
    run_decoder, run_layer = Decoder.forward, DecoderBlock.forward

    def read() -> Counts:
        counts = {"torch": watch.operations.copy(), "waits": watch.waits.copy()}
        return {"Triton": count_kernels(launches), **counts}

    def note_token(*inputs: Any) -> Tensor:
        tokens.append(read())
        if len(tokens) > DECODER_CALLS:
            raise StopGeneration
        return run_decoder(*inputs)

    def note_layer(*inputs: Any) -> tuple[Tensor, Tensor]:
        before = read()
        out = run_layer(*inputs)
        layers.append(subtract(before, read()))
        return out

    watched = patch.object(Decoder, "forward", note_token), patch.object(DecoderBlock, "forward", note_layer)
    with watched[0], watched[1], suppress(StopGeneration):
        run(model, method, options.batch, watch, launches, kind=options.noise)
    return layers[-1], subtract(*tokens[-2:])


def subtract(before: Counts, after: Counts) -> Counts:
    """Return the differences between two readings of the counts."""
    return {kind: after[kind] - before[kind] for kind in before}


def count_kernels(launches: Sequence[Variant]) -> Counter[str]:
    """Return the number of launches of each kernel."""
    return Counter(launch.name for launch in launches)


def list_names(options: argparse.Namespace, *counts: Counter[str]) -> None:
    """Print the most frequent names, `options.names` of each counter."""
    for counter in counts:
        for name, count in counter.most_common(options.names):
            print(f"    {name} {count}")
