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

from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from benchmarks.support.fake_gpu import prepare_cases, run
from benchmarks.support.table import Table

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
