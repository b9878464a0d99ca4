"""Sums and messages between two processes that share a model, over a real group on this machine."""

from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

from kvbench.core.processes import Processes


def take_part(rank: int, meeting: str) -> tuple[list[float], str, list[int]]:
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1))
    both = Processes(rank, 2)
    total = both.add(torch.tensor([1.0, 10.0 * rank]))
    return total.tolist(), both.broadcast(f"by {rank}"), both.gather(rank)


def test_two_processes_add_broadcast_and_gather(tmp_path) -> None:
    meeting = str(tmp_path / "store")
    with get_context("fork").Pool(2) as members:
        found = members.starmap(take_part, [(0, meeting), (1, meeting)], chunksize=1)
    assert found == [([2.0, 10.0], "by 0", [0, 1]), ([2.0, 10.0], "by 0", [1])]
