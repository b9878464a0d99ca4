"""Provenance of a run: code, versions of libraries, and machine."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache

import torch

from kvbench.core.checkout import ROOT, find_built_commit, run_git
from kvbench.core.extras import find_version
from kvbench.core.files import hash_content, read_bytes
from kvbench.core.plugins import find_plugins
from kvbench.kernels.attention_paths import describe_paths
from kvbench.kernels.batch_invariance import FLAGS, MATMUL, is_batch_invariant
from kvbench.runs.record.machine import describe_machine

LIBRARIES = ("kvbench", "torch", "numpy", "safetensors", "hydra-core", "pillow", "scipy")
NOT_INSTALLED = "not installed"
CODE = ("kvbench", "kernels", "eval", "conf", "run.py", "pyproject.toml")
"""Files and folders of a checkout that hold its code and configuration."""


def provenance(device: str, graph_obstacle: str | None) -> dict[str, object]:
    """Return the checkout, versions of libraries and plugins, and the machine, JSON values.

    `rebuild` is a shell command that rebuilds the environment. `load` is the load average of the last minute.
    """
    versions = {"python": platform.python_version()}
    for name in (*LIBRARIES, *(plugin.package for plugin in find_plugins())):
        versions[name] = find_version(name) or NOT_INSTALLED
    code = find_commit()
    return {
        "code": code,
        "versions": versions,
        "rebuild": describe_rebuild(code, versions),
        "device": device,
        "cuda_graph": "on" if graph_obstacle is None else f"off: {graph_obstacle}",
        "gpu": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
        "cpu": platform.processor() or platform.machine(),
        "machine": describe_machine(device),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_rebuild(code: Mapping[str, str] | None, versions: Mapping[str, str]) -> str:
    """Return a shell command that rebuilds the environment of a run, in a container if the commit is known."""
    if code is None:
        packages = [f"{k}=={v}" for k, v in versions.items() if k != "python" and v != NOT_INSTALLED]
        return f"python{versions['python'].rpartition('.')[0]} -m pip install {' '.join(packages)}"
    commit = code["commit"]
    line = f"git checkout {commit} && docker build --build-arg COMMIT={commit} --tag kvbench:{commit[:12]} ."
    changes = code["diff_sha256"]
    return f"{line}  # without the uncommitted changes" if changes else line


def describe_arithmetic(device: str, head_dim: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the settings that determine rounding on a device, JSON values; `dtype` is of keys and values."""
    return {
        "batch_invariant": is_batch_invariant(),
        "matmul": {flag: getattr(MATMUL, flag) for flag in FLAGS},
        "cudnn": {"version": torch.backends.cudnn.version(), "allow_tf32": torch.backends.cudnn.allow_tf32},
        "attention": describe_paths(head_dim, dtype, torch.device(device)),
    }


@cache
def find_commit() -> dict[str, str] | None:
    """Return the commit of the checkout and the hash of uncommitted changes to its code, as of the first call.

    Changed and new files of code and configuration count; notes, tests and documentation do not.
    """
    commit = run_git("rev-parse", "HEAD")
    changes = run_git("diff", "HEAD", "--", *CODE)
    added = run_git("ls-files", "--others", "--exclude-standard", "-z", "--", *CODE)
    if commit is None or changes is None or added is None:
        return {"commit": built, "diff_sha256": ""} if (built := find_built_commit()) else None
    contents = [name.encode() + read_bytes(ROOT / name) for name in added.split("\0") if name]
    return {
        "commit": commit.strip(),
        "diff_sha256": hash_content(changes, *contents) if changes or contents else "",
    }
