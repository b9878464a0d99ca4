"""Stability of head rankings between calibrations (HeatKV Figure 6, Appendix C)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from kvbench.core.files import check_file
from kvbench.methods.heatkv.scores import rank_heads, scas
from kvbench.report.figures.draw import NOT_INSTALLED, can_draw
from kvbench.report.papers.published import PublishedTable, parse_number
from kvbench.report.tables import Row, print_line, publish

MASS_TENSOR = "mass"
"""Name of the tensor of calibrations whose rankings are compared (`kvbench.methods.heatkv.scores`)."""


def rank_deviation(masses: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return the standard deviation of S-CAS ranks over calibrations, averaged over heads, by source scale.

    It is float64 [K - 1], in ranks of 0 to L x H - 1, around each head's mean rank, with divisor R. `masses` are the
    `mass`, float64 [L, H, K, K], of R calibrations (`kvbench.methods.heatkv.scores`).

    Raises:
        ValueError: fewer than two calibrations, or of unequal shapes.
    """
    if len(masses) < 2 or len({mass.shape for mass in masses}) > 1:
        raise ValueError("stability of ranks needs two or more calibrations of one model")
    ranks = np.stack([rank_heads(scas(mass)[..., :-1].to(torch.float64)) for mass in masses])
    return ranks.std(axis=0).mean(axis=(1, 2))


def show_stability(
    console: Console, table: PublishedTable, artifacts: Sequence[Path], sinks: int, model: str, runs_dir: Path
) -> None:
    """Print the deviation of S-CAS ranks over calibrations; write report-<table>.md and <table>.png.

    Other kinds of calibration are ignored. The leading `sinks` scales are never pruned and have no ranking.
    """
    masses = _load_masses(artifacts)
    if len(masses) < 2:
        console.print(f"{table.name}: needs two or more calibrations, not {len(masses)}", highlight=False)
        return
    heads, deviation = masses[0].shape[0] * masses[0].shape[1], rank_deviation(masses)[sinks:]
    rows: list[Row] = [
        {
            "source scale": str(sinks + 1 + i),
            "deviation of a head's rank": f"{ranks:.3f}",
            f"% of {heads} heads": f"{100 * ranks / heads:.2f}",
        }
        for i, ranks in enumerate(deviation)
    ]
    [(published_label, [row])] = table.models.items()
    printed = str(row.cells["percent of heads"])
    bound = parse_number(printed.lstrip("< "))
    title = (
        f"{table.source}: {table.title}. Measured: {model}, {len(masses)} calibrations, worst "
        f"{100 * deviation.max() / heads:.2f} % of the heads; published: {published_label}, worst {printed} %"
    )
    publish(console, title, rows, 1, runs_dir / f"report-{table.name}.md")
    if not can_draw():
        print_line(console, NOT_INSTALLED, "")
        return
    from kvbench.report.figures import plots, styles  # take long to import

    name = f"{model}: S-CAS rankings over {len(masses)} calibrations"
    worst = None if bound is None else (bound, f"published worst case, {published_label}: {printed} %")
    figure = plots.draw_stability(deviation, heads, sinks + 1, name, worst)
    path = styles.save(figure, runs_dir / f"{table.name}.png")
    console.print(f"drawn: {path}", highlight=False, soft_wrap=True)


def _load_masses(paths: Sequence[Path]) -> list[Tensor]:
    masses = []
    for path in dict.fromkeys(paths):
        with safe_open(check_file(path), framework="pt") as file:
            if MASS_TENSOR in file.keys():  # noqa: SIM118 (not a dict)
                masses.append(file.get_tensor(MASS_TENSOR))
    return masses
