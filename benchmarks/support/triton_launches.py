"""Triton launches without a device: launches are recorded instead of run."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import kvbench.kernels.triton as programs

Note = Callable[..., object]
"""Function of a kernel's name, the kernel, and the arguments of a launch."""


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
