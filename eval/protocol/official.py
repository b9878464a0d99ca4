"""Handover to a benchmark's own program: images are laid out for it, later the results that it wrote are read."""

from collections.abc import Callable
from pathlib import Path

from kvbench.eval.protocol.base import SkipEvaluation


def require_results(
    path: Path, command: str, setting: str, *, wanted: bool, export: Callable[[], None]
) -> None:
    """Check that a program's results are there; unless they are wanted yet, lay the images out for it.

    Args:
        path: file or folder of the results.
        command: how to run the program, for the reader.
        setting: key that asks for the results, `eval.<name>.<field>`.
        wanted: value of that key.
        export: function that lays the images out.

    Raises:
        SkipEvaluation: the results are not wanted yet; the reason says what to run.
        FileNotFoundError: they are wanted and not there.
    """
    if not wanted:
        export()
        raise SkipEvaluation(f"images exported; {command}; then set {setting}=true")
    if not path.exists():
        key = setting.rpartition(".")[2]
        raise FileNotFoundError(f"{path} is not there yet; with {key}=false first, {command}")
