"""What two processes that share a model send each other, over a real group on this machine."""

from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from kvbench.core.processes import ALONE, Processes

COUNT = 2


def take_part(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), COUNT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=COUNT, timeout=timedelta(minutes=1))
    processes = Processes(rank, COUNT)
    found = {
        "sum": processes.add(torch.tensor([1.0, 10.0 * rank])).tolist(),
        "told": processes.broadcast(f"by {rank}"),
        "gathered": processes.gather(rank),
    }
    (folder / f"{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


def test_two_processes_add_broadcast_and_gather(tmp_path: Path) -> None:
    fork = get_context("fork")
    members = [fork.Process(target=take_part, args=(rank, tmp_path)) for rank in range(COUNT)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    both = {"sum": [2.0, 10.0], "told": "by 0"}
    assert (tmp_path / "0.txt").read_text() == repr({**both, "gathered": [0, 1]})
    assert (tmp_path / "1.txt").read_text() == repr({**both, "gathered": [1]})


def test_one_process_needs_no_group() -> None:
    numbers = torch.tensor([1.0, 2.0])
    assert ALONE.add(numbers) is numbers
    assert (ALONE.broadcast("word"), ALONE.gather(3)) == ("word", [3])
