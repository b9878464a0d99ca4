"""What a generation asks a GPU for, its tables being made: programs, operations, copies among them, waits of the host.

No GPU is needed: whole generations run on tensors without numbers (`fake_gpu.py`). Of torch's operations those are
counted that write numbers on the device; a library may launch more than one program for one of them. The host waits
where it reads a number back, and for copies between it and the device that do not say otherwise. What methods that look
at data read back, once per layer and scale, is replaced here and not counted.

python benchmarks/launches.py [--model infinity_2b] [--batch 8] [--method heatkv --budget 0.1] [--names 12]
"""

import argparse
from collections import Counter
from typing import Any

import torch
from fake_gpu import prepare, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CASES = (("full", "1"), ("heatkv", "0.1"), ("snapkv", "0.1"))
"""Methods and budgets that are counted where none is asked for; the last method looks at data."""
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


def main() -> None:
    """Print counts per method and budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="infinity_2b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--method", help="only this one")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--names", type=int, default=0, help="also list that many operations of each method")
    parser.add_argument("overrides", nargs="*", help="settings key=value, as for run.py")
    options = parser.parse_args()
    print(f"{options.model}, batch {options.batch}, one generation")
    columns = ("method", "budget", "Triton", "torch", "copies", "GB copied", "waits")
    print("{:16s}{:>8s}{:>10s}{:>10s}{:>10s}{:>12s}{:>8s}".format(*columns))
    for method, budget in ((options.method, options.budget),) if options.method else CASES:
        choices = [f"model={options.model}", f"method={method}", f"budget={budget}", *options.overrides]
        watch, launched = Watch(), Counter[str]()
        run(*prepare(choices), options.batch, watch, launched, first=False)
        copies = sum(count for name, count in watch.operations.items() if name in COPIES)
        print(
            f"{method:16s}{budget:>8s}{launched.total():10d}{watch.operations.total():10d}{copies:10d}"
            f"{watch.copied / 1e9:12.2f}{watch.waits.total():8d}",
            flush=True,
        )
        for found in (launched, watch.operations, watch.waits):
            print(
                "".join(f"    {name} {count}\n" for name, count in found.most_common(options.names)), end=""
            )


if __name__ == "__main__":
    main()
