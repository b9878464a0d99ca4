"""Comparison of the arithmetic that a run was drawn in with the arithmetic here."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvbench.runs.job import Job
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.provenance import describe_arithmetic, provenance

LIBRARIES = ("torch", "numpy")
"""Packages whose versions decide how numbers are rounded."""


def use_threads(recorded: Mapping[str, Any]) -> None:
    """Compute with the recorded number of threads if this machine has as many processors."""
    threads = recorded.get("threads")
    if type(threads) is int and 1 <= threads <= (os.cpu_count() or 1):
        torch.set_num_threads(threads)


def list_differences(job: Job, recorded: Mapping[str, Any]) -> list[str]:
    """Return what differs between the recorded arithmetic of a run and the arithmetic here; empty if it is the same.

    Compared are the type of the device, its name, the number of threads on a CPU, the versions of libraries, and the
    settings of matrix products and attention. What is not recorded counts as different.
    """
    device, plan = job.settings.device, job.cache_plan
    here: Mapping[str, Any] = provenance(device, plan.graph_obstacle)
    arithmetic = json.loads(json.dumps(describe_arithmetic(device, job.model.spec.head_dim, plan.dtype)))
    found = [name for origin in list_origins(recorded) for name in _compare(origin, here)]
    if recorded and recorded.get("arithmetic") != arithmetic:
        found.append("arithmetic")
    return list(dict.fromkeys(found)) if recorded else ["provenance.json"]


def _compare(origin: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    on_cpu = _name_type(here) == "cpu"
    if _name_type(origin) != _name_type(here):
        yield "device"
    if _name_machine(origin) != _name_machine(here):
        yield "machine"
    if on_cpu and origin.get("threads") != here["threads"]:
        yield "threads"
    for name in LIBRARIES:
        if (origin.get("versions") or {}).get(name) != here["versions"][name]:
            yield name


def _name_type(origin: Mapping[str, Any]) -> str:
    """Return the type of a device, `cuda` of `cuda:1`."""
    return str(origin.get("device")).partition(":")[0]


def _name_machine(origin: Mapping[str, Any]) -> str:
    """Return the name of a GPU or processor without its number of threads."""
    name, comma, threads = str(origin.get("machine")).rpartition(", ")
    return name if comma and threads.endswith("threads") else str(origin.get("machine"))
