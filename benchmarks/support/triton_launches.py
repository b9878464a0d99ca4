"""Triton launches without a device: launches are recorded instead of run, and described for the compiler."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import kvbench.kernels.triton as programs

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "u8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
Note = Callable[..., object]
"""Function of a kernel's name, the kernel, and the arguments of a launch."""


class Variant(NamedTuple):
    """One kernel with the types of its arguments, its compile-time arguments, `num_warps` and `num_stages`."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    @property
    def source(self) -> str:
        """Everything that the compiler is given, as one string; the variant's name is no part of it."""
        options = {"num_warps": 4, "num_stages": 3} | self.options
        return f"{self.kernel.__name__} {self.constants} {self.signature} {options}"


class Launch:
    """Kernel whose launches over any grid call a function."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __getitem__(self, grid: object) -> Callable[..., object]:
        """Return the function that replaces a launch over a grid."""
        return self._call


@contextmanager
def replace_launches(note: Note) -> Iterator[None]:
    """Call `note` instead of every launch of a kernel of `kvbench.kernels.triton`."""
    with ExitStack() as stack:
        for module in pkgutil.iter_modules(programs.__path__):
            owner = importlib.import_module(f"{programs.__name__}.{module.name}")
            for name, kernel in list(vars(owner).items()):
                if name.endswith("_kernel"):
                    stack.enter_context(patch.object(owner, name, Launch(partial(note, name, kernel))))
        yield


def record_launches(variants: list[Variant] | None) -> AbstractContextManager[None]:
    """Append the variant of every launch, under the kernel's name, to a list if there is one; launch nothing."""

    def note(name: str, kernel: Any, *arguments: Any, **named: Any) -> None:
        if variants is not None:
            variants.append(describe_launch(name, kernel, arguments, named))

    return replace_launches(note)


def list_launches(name: str, launcher: Callable[..., object], *inputs: Any, **more: Any) -> list[Variant]:
    """Return the variants that a launcher launches, under one name."""
    variants: list[Variant] = []
    with record_launches(variants):
        launcher(*inputs, **more)
    return [variant._replace(name=name) for variant in variants]


def describe_launch(name: str, kernel: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Variant:
    """Return the variant of a kernel that a launch with these arguments compiles, under a name.

    An interpreted kernel is not compiled: its variant has no types and constants.
    """
    params = getattr(kernel, "params", ())
    values = dict(zip((p.name for p in params), arguments, strict=False)) | named
    constants = {p.name: values[p.name] for p in params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.is_constexpr else p.annotation_type or _name_type(values[p.name])
        for p in params
    }
    options = {option: values[option] for option in ("num_warps", "num_stages") if option in values}
    return Variant(name, kernel, signature, constants, options)


def _name_type(value: Any) -> str:
    """Return Triton's name of the type of a tensor, a tile descriptor or a scalar."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32"
    return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>".replace(" ", "")
