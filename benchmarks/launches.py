"""Work that a generation sends to a GPU: programs, operations, copies and waits of the host.

No GPU is needed: whole generations run on tensors without numbers (`fake_gpu.py`). Of torch's operations those are
counted that write numbers on the device; a library may launch more than one program for one of them. The host waits
where it reads a number back, and for copies between it and the device that do not say otherwise. What methods that look
at data read back, once per layer and scale, is replaced here and not counted.

Of a next-token model one token in the middle of a segment is counted, sampling included, and the second layer's part
of it: by Triton programs for norms, rotation and gate, and by torch's own operations in their place, where an RMS norm
counts as the operations that torch makes it of.

python -m benchmarks launches [--model infinity_2b] [--batch 8] [--method heatkv --budget 0.1] [--names 12]
python -m benchmarks launches --model qwen3_8b --budget 1 model.max_tokens=512
"""

import argparse
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from benchmarks.support.fake_gpu import Model, prepare, prepare_cases, run
from benchmarks.support.table import Table
from kvbench.methods.shared.base import Method
from kvbench.models.next_token import NextTokenModel
from kvbench.models.parts.decoder import Decoder, DecoderBlock

COPIES = {"clone", "copy_", "_to_copy", "cat", "index_select", "stack"}
IDLE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "device"}
"""Operations that write nothing; views are others."""


class Watch(DeviceWatch):
    """Counts operations that write numbers on the device, and those that the host waits for.

    Attributes:
        operations: by name.
        waits: by name.
        copied: bytes written by copies on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copied = 0

    def note_read(self, number: Tensor) -> None:
        """Count a wait for a number of the device."""
        self.waits["_local_scalar_dense"] += number.is_cuda

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Count what is written on the device, and copies that the host waits for."""
        name = func.overloadpacket.__name__
        devices = {tensor.device.type for tensor in list_tensors((args, kwargs)) + results}
        if "cuda" not in devices or name in IDLE or func.is_view:
            return
        self.operations[name] += 1
        if name in COPIES:
            self.copied += sum(tensor.nbytes for tensor in results)
        if len(devices) > 1 and name in ("_to_copy", "copy_"):
            free = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            self.waits[name] += not free


OPTIONS = {
    "model": "infinity_2b", "batch": 8, "method": None, "budget": "0.1", **OVERRIDES,
    "names": Option(0, "also list that many operations of each method"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print counts per method and budget, or per token of a next-token model."""
    choices = [f"model={options.model}", f"method={options.method or 'full'}", f"budget={options.budget}"]
    model, method = prepare([*choices, *options.overrides])
    if isinstance(model, NextTokenModel):
        count_tokens(options, model, method)
    else:
        count_generations(options)


def count_generations(options: argparse.Namespace) -> None:
    """Print what whole generations ask for."""
    print(f"{options.model}, batch {options.batch}, one generation")
    counts = dict.fromkeys(("Triton", "torch", "copies"), "d")
    table = Table({"budget": "s"} | counts | {"GB copied": ".2f", "waits": "d"}, "method")
    for method, budget, prepared in prepare_cases(options):
        watch, launched = Watch(), Counter[str]()
        run(*prepared, options.batch, watch, launched, first=False)
        copies = sum(count for name, count in watch.operations.items() if name in COPIES)
        programs, operations, waits = (found.total() for found in (launched, watch.operations, watch.waits))
        table.add(method, budget, programs, operations, copies, watch.copied / 1e9, waits)
        list_names(options, launched, watch.operations, watch.waits)


def count_tokens(options: argparse.Namespace, model: Model, method: Method) -> None:
    """Print what one token asks for, by torch's operations and by programs."""
    print(f"{options.model}, {type(method).__name__}, batch {options.batch}, one token")
    columns = dict.fromkeys(("Triton a layer", "torch a layer"), "d")
    table = Table(columns | dict.fromkeys(("Triton", "torch", "waits"), "d"), "norms, rotation, gate")
    for name, off in (("torch", True), ("programs", False)):
        with patch("kvbench.kernels.dispatch.runs_program", lambda x, off=off: not off and x.is_cuda):
            layer, token = count_token(model, method, options.batch)
        shares = (layer[kind].total() for kind in ("Triton", "torch"))
        table.add(name, *shares, *(found.total() for found in token.values()))
        list_names(options, *layer.values())


Counts = dict[str, Counter[str]]
"""Names and numbers of Triton programs, of torch's operations, and of the host's waits."""
CALLS = 4
"""Calls of the decoder in a generation, of which the last is counted: the prompt, then tokens of one segment."""


class Counted(Exception):
    """Enough was seen of a generation."""


def count_token(model: Model, method: Method, batch: int) -> tuple[Counts, Counts]:
    """Return what the second layer asks for in one token, and what the whole token does."""
    watch, launched = Watch(), Counter[str]()
    tokens, layers = list[Counts](), list[Counts]()
    run_decoder, run_layer = Decoder.forward, DecoderBlock.forward

    def read() -> Counts:
        return {"Triton": launched.copy(), "torch": watch.operations.copy(), "waits": watch.waits.copy()}

    def note_token(*given: Any) -> Tensor:
        tokens.append(read())
        if len(tokens) > CALLS:
            raise Counted
        return run_decoder(*given)

    def note_layer(*given: Any) -> tuple[Tensor, Tensor]:
        layers.append(read())
        return run_layer(*given)

    watched = patch.object(Decoder, "forward", note_token), patch.object(DecoderBlock, "forward", note_layer)
    with watched[0], watched[1], suppress(Counted):
        run(model, method, batch, watch, launched)
    first = (CALLS - 1) * model.spec.layers
    return subtract(*layers[first + 1 : first + 3]), subtract(*tokens[-2:])


def subtract(before: Counts, after: Counts) -> Counts:
    """Return what came between two readings."""
    return {kind: after[kind] - before[kind] for kind in before}


def list_names(options: argparse.Namespace, *counts: Counter[str]) -> None:
    """Print the most frequent names, as many as were asked for."""
    for found in counts:
        for name, count in found.most_common(options.names):
            print(f"    {name} {count}")
