"""Work that a generation sends to a GPU: programs, operations, copies and waits of the host.

No GPU is needed: whole generations run on tensors without numbers (`fake_gpu.py`). Of torch's operations those are
counted that write numbers on the device; a library may launch more than one program for one of them. The host waits
where it reads a number back, and for copies between it and the device that do not say otherwise. What methods that look
at data read back, once per layer and scale, is replaced here and not counted.

python -m benchmarks launches [--model infinity_2b] [--batch 8] [--method heatkv --budget 0.1] [--names 12]
"""

import argparse
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.support.arguments import add_options
from benchmarks.support.fake_gpu import prepare_cases, run
from benchmarks.support.table import Table

COPIES = {"clone", "copy_", "_to_copy", "cat", "index_select", "stack"}
ATEN = torch.ops.aten
IDLE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "device"}
"""Operations that write nothing; views are others."""


class Watch(TorchDispatchMode):
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operation; of those made of others, the others."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func is ATEN._local_scalar_dense.default:
            self.waits[name] += args[0].is_cuda
            return 1
        if name != "device":
            with self:  # in inference mode operations made of others arrive whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        before, after = _tensors((args, kwargs)), _tensors(out)
        devices = {tensor.device.type for tensor in before + after}
        if "cuda" not in devices or name in IDLE or func.is_view:
            return out
        self.operations[name] += 1
        if name in COPIES:
            self.copied += sum(tensor.nbytes for tensor in after)
        if len(devices) > 1 and name in ("_to_copy", "copy_"):
            free = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            self.waits[name] += not free
        return out


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, overrides=True, model="infinity_2b", batch=8, method=None, budget="0.1")
    parser.add_argument("--names", type=int, default=0, help="also list that many operations of each method")


def main(options: argparse.Namespace) -> None:
    """Print counts per method and budget."""
    print(f"{options.model}, batch {options.batch}, one generation")
    counts = dict.fromkeys(("Triton", "torch", "copies"), "d")
    table = Table({"budget": "s"} | counts | {"GB copied": ".2f", "waits": "d"}, "method")
    for method, budget, prepared in prepare_cases(options):
        watch, launched = Watch(), Counter[str]()
        run(*prepared, options.batch, watch, launched, first=False)
        copies = sum(count for name, count in watch.operations.items() if name in COPIES)
        programs, operations, waits = (found.total() for found in (launched, watch.operations, watch.waits))
        table.add(method, budget, programs, operations, copies, watch.copied / 1e9, waits)
        for found in (launched, watch.operations, watch.waits):
            for name, count in found.most_common(options.names):
                print(f"    {name} {count}")
