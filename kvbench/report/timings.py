"""Times and memory of `task=profile`, read from its files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.engine.memory import MIB, PAPER_BYTES

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a stored value, by the dtype of the cache."""


@dataclass(frozen=True)
class Timing:
    """One cache at one batch size, from a file of `task=profile` (`kvbench.profile.task` lists its contents).

    Attributes:
        profile: contents of the file.
        row: entry of its `rows` for the cache and batch size.
    """

    profile: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Name of the model, `model.name`."""
        return str(self.profile["model"])

    @property
    def model_label(self) -> str:
        """Name of the model; random weights take the same time."""
        return self.model

    @property
    def method(self) -> str:
        """Name of the method; `full` for the full cache that was timed alternately with a method."""
        return "full" if self._is_reference else str(self.profile["method"])

    @property
    def allowed(self) -> tuple[float, str]:
        """Key of equal budgets, as `Memory.allowed` of a run."""
        budget = self.profile["budget"]
        return round(float(budget["fraction"]), 6), str(budget["unit"])

    @property
    def is_ok(self) -> bool:
        """Whether the batch fitted in memory and was timed."""
        return bool(self.row["status"] == "ok")

    @property
    def _is_reference(self) -> bool:
        return self.row["cache"] == "full" != self.profile["method"]

    def find_setting(self, key: str) -> object:
        """Return a setting that identifies rows, see `kvbench.report.papers.published.find_setting`."""
        budget = self.profile["budget"]
        if key == "method":
            return self.method
        if key == "budget":
            share = 1.0 if self._is_reference else budget["fraction"]
            return share if budget["unit"] == "tokens" else f"{share:.4g} bytes"
        if key == "latency.batch":
            return self.row["batch"]
        if key == "cuda_graph":
            return self.profile["provenance"]["cuda_graph"] == "on"
        node: Any = {} if key.startswith("method.") and self._is_reference else self.profile["config"]
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def decoding(self) -> float | None:
        """Seconds in which a batch's tokens become pixels or texts; None if the model times no such call."""
        seconds = self.row["phases"]["seconds"].get("decode")
        return None if seconds is None else float(seconds)

    @property
    def generation(self) -> float:
        """Seconds of a batch without decoding to pixels or text."""
        return float(self.row["latency"]["median"]) - (self.decoding or 0.0)

    @property
    def reserved_gb(self) -> float | None:
        """GB that the allocator reserved at the peak; None on a CPU."""
        allocator = self.row["allocator"]
        return None if allocator is None else float(allocator["reserved_bytes"]) / 1e9

    @property
    def paper_mib(self) -> float | None:
        """MiB of the cache as HeatKV and AMS-KV count them (`kvbench.engine.memory`); None in low-bit storage."""
        item = ITEM_BYTES.get(self.profile["cache_dtype"])
        # A stored token has two values of `item` bytes in each channel, and PAPER_BYTES as papers count.
        return None if item is None else self.row["kv"]["peak_bytes"] / (2 * item) * PAPER_BYTES / MIB


def name_device(profile: Mapping[str, Any]) -> str:
    """Return the name of a profile's GPU, or of its processor with the number of threads."""
    machine = profile["provenance"]
    return str(machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads")


def read_timings(paths: Sequence[Path]) -> list[Timing]:
    """Return every row of files of `task=profile`, in order.

    Raises:
        ConfigError: a file is missing, or is not a file of `task=profile`.
    """
    timings: list[Timing] = []
    for path in dict.fromkeys(paths):
        try:
            contents = parse_json(read_text(path))
            timings += [Timing(contents, row) for row in contents["rows"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: not a file of task=profile ({error}); delete the sweep's folder and start it again"
            ) from None
    return timings
