"""Memory that torch's CUDA allocator reserves for one generation, beside what the generation has in use.

No GPU is needed: the allocations of a whole generation are recorded on tensors without numbers (`fake_gpu.py`) and
replayed through a simulation of the allocator (`caching_allocator.py`), as it is by default and with expandable
segments. Weights are left out, and so are the workspaces of cuBLAS and cuDNN.

python -m benchmarks allocator [--model infinity_2b] [--batch 8] [--method heatkv --budget 0.1] [model.pixels=0.25M ...]
"""

import argparse

from benchmarks.support.arguments import OVERRIDES
from benchmarks.support.caching_allocator import replay
from benchmarks.support.fake_gpu import prepare_cases, record
from benchmarks.support.table import Table

GB = 1e9


OPTIONS = {"model": "infinity_2b", "batch": 8, "method": None, "budget": "0.1"} | OVERRIDES


def main(options: argparse.Namespace) -> None:
    """Print a row per method and budget."""
    print(
        f"{options.model}, batch {options.batch}, GB beyond weights; by default and with expandable segments"
    )
    columns = ("in use", "reserved", "ratio", "expandable", "ratio of it")
    table = Table({"budget": "s"} | dict.fromkeys(columns, ".2f"), "method")
    for method, budget, prepared in prepare_cases(options):
        events = record(*prepared, options.batch)
        usual, expandable = replay(events), replay(events, expandable=True)
        sizes = (usual.allocated / GB, usual.reserved / GB, usual.ratio, expandable.reserved / GB)
        table.add(method, budget, *sizes, expandable.ratio)
