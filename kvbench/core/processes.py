"""Process groups that share one model; process 0 leads."""

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

PEER_TIMEOUT = timedelta(minutes=10)
"""Timeout for other processes to start, or to reach the same layer."""
COMMAND_TIMEOUT = timedelta(days=30)
"""Timeout for the next command: process 0 may be scoring, or waiting for another run."""


class ProcessLost(UserError, RuntimeError):
    """A process of the group ended or does not answer."""


@dataclass(frozen=True)
class Processes:
    """Group of processes that share a model, seen from one process. All call the same methods in the same order.

    Attributes:
        rank: index of this process; 0 leads.
        count: number of processes.
        messages: torch's group for messages; tensors use the default group.

    Raises:
        ProcessLost: another process ended or does not answer; every call can raise it.
    """

    rank: int = 0
    count: int = 1
    messages: dist.ProcessGroup | None = None

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, bitwise equal in all of them; x may be overwritten."""
        if self.count > 1:
            with self._explaining():
                dist.all_reduce(x)
        return x

    def broadcast(self, message: T) -> T:
        """Return the message of process 0."""
        messages = [message]
        if self.count > 1:
            with self._explaining():
                dist.broadcast_object_list(messages, src=0, group=self.messages)
        return messages[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes by rank in process 0; other processes get their own value only."""
        if self.count == 1:
            return [value]
        values: list[T] | None = [value] * self.count if self.rank == 0 else None
        with self._explaining():
            dist.gather_object(value, values, dst=0, group=self.messages)
        return [value] if values is None else values

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
"""The only process, which holds the whole model."""


def join(count: int, device: str) -> Processes:
    """Join the process group that torchrun started, or a launcher that sets the same variables.

    GPUs use NCCL, CPUs Gloo.

    Raises:
        ProcessLost: the other processes did not join.
    """
    if count == 1:
        return ALONE
    on_gpu = torch.device(device).type == "cuda"
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PEER_TIMEOUT)
        messages = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ProcessLost(
            f"process {os.environ.get('RANK')} of {count}: the others did not join ({reason}); start all again"
        ) from None
    assert isinstance(messages, dist.ProcessGroup)  # this process is a member
    return Processes(dist.get_rank(), count, messages)


def leave() -> None:
    """Leave the process group if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
