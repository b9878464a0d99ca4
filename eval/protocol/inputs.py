"""Inputs of a metric apart from samples and networks: digests of prompts' metadata and of reference files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.core.files import hash_values
from kvbench.eval.files.digests import digest_path
from kvbench.eval.files.samples import REWRITTEN_FROM
from kvbench.eval.protocol.base import Evaluator

DIGITS = 16
"""Number of hexadecimal digits of a digest."""

Inputs = Mapping[str, str | None]
"""Digest of each input of an evaluator by name, such as `prompts.answer` or `statistics`; None if it is unreadable."""


def hash_inputs(evaluator: Evaluator, metadata: Sequence[Mapping[str, object]], run: Path) -> Inputs:
    """Return the digests of an evaluator's inputs.

    Args:
        evaluator: the evaluator.
        metadata: metadata of the run's prompts, JSON values. Keys that no prompt has are left out.
        run: folder of the run.
    """
    inputs: dict[str, str | None] = {}
    if evaluator.meta_keys is None:
        inputs |= {"prompts": _hash(metadata)} if any(metadata) else {}
    for key in dict.fromkeys((*(evaluator.meta_keys or ()), REWRITTEN_FROM)):
        values = [meta.get(key) for meta in metadata]
        inputs |= {f"prompts.{key}": _hash(values)} if any(value is not None for value in values) else {}
    for name, path in evaluator.list_references(run).items():
        inputs[name] = _digest(path)
    return inputs


def find_changes(stored: Mapping[str, str], inputs: Inputs) -> list[str]:
    """Return the names of inputs that changed since a result was stored; unreadable inputs count as unchanged."""
    names = dict.fromkeys((*stored, *inputs))
    unreadable = {name for name, digest in inputs.items() if digest is None}
    return [name for name in names if name not in unreadable and stored.get(name) != inputs.get(name)]


def _hash(values: object) -> str:
    return hash_values(values)[:DIGITS]


def _digest(path: Path | None) -> str | None:
    try:
        return None if path is None else digest_path(path)[:DIGITS]
    except OSError:
        return None
