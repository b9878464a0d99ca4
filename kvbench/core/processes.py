"""Groups of processes that hold one model together; the first one leads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvbench.core.config import UserError

T = TypeVar("T")

ANSWER = timedelta(minutes=10)
"""Time limit for other processes to start, or to reach the same layer."""
PATIENCE = timedelta(days=30)
"""Timeout of the wait for the next command: the first process may be scoring, or waiting for another run."""


class ProcessLost(UserError, RuntimeError):
    """Another process ended, or does not answer."""


@dataclass(frozen=True)
class Processes:
    """The processes that hold a model together, as one of them sees them; by itself it is the whole.

    All of them call the same of these in the same order.

    Attributes:
        rank: number of this process; 0 leads.
        count: how many there are.
        words: torch's group for what is said; what is computed goes through the default one.

    Raises:
        ProcessLost: another process ended, or does not answer. Every call can raise it.
    """

    rank: int = 0
    count: int = 1
    words: dist.ProcessGroup | None = None

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, the same bits in each of them; x may be overwritten."""
        if self.count > 1:
            with self._explaining():
                dist.all_reduce(x)
        return x

    def broadcast(self, message: T) -> T:
        """Return what the process that leads has given, in all of them."""
        said = [message]
        if self.count > 1:
            with self._explaining():
                dist.broadcast_object_list(said, src=0, group=self.words)
        return said[0]

    def gather(self, value: T) -> list[T]:
        """Return what every process has given, in order, in the one that leads; in the others their own alone."""
        if self.count == 1:
            return [value]
        found: list[T] | None = [value] * self.count if self.rank == 0 else None
        with self._explaining():
            dist.gather_object(value, found, dst=0, group=self.words)
        return [value] if found is None else found

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ProcessLost(
                f"process {self.rank} of {self.count}: another process ended or does not answer; start all again "
                f"({str(error).splitlines()[0]})"
            ) from None


ALONE = Processes()
"""One process with the whole model."""


def join(count: int, device: str) -> Processes:
    """Meet the other processes that torchrun, or whoever sets the same variables, has started.

    Args:
        count: how many there must be.
        device: torch device of this one, which talks through NCCL on a GPU and Gloo on a CPU.

    Raises:
        ProcessLost: they do not come.
    """
    if count == 1:
        return ALONE
    on_gpu = torch.device(device).type == "cuda"
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=ANSWER)
        words = dist.new_group(backend="gloo", timeout=PATIENCE)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ProcessLost(
            f"process {os.environ.get('RANK')} of {count}: the others did not join ({reason})"
        ) from None
    assert isinstance(words, dist.ProcessGroup)  # of which this process is one
    return Processes(dist.get_rank(), count, words)


def leave() -> None:
    """Part from the other processes, if there are any; nothing more is said."""
    if dist.is_initialized():
        dist.destroy_process_group()
