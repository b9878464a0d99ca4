"""Agreement of a calibration with the contextual heads that HACK++ prints (arXiv:2606.08302, Fig. 15).

python -m benchmarks printed_classes var_d30 runs/var_d30/calibration-0123456789.safetensors ...
Compares calibrations of `method=hack` or `method=hackpp` and skips others. In the paper, classes from one sample and
from fifty agree on 96 % of VAR-d30's heads; below 95 % the calibration measures something else, and the exit status is
1. The paper prints no map of Infinity-2B, only the layers without a contextual head: those layers are compared.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.support.arguments import Option
from kvbench.methods.hack.classes import find_contextual

MIN_AGREEMENT = 0.95
"""Required share of heads with the printed class."""
CLASSES = Path(__file__).parent / "support" / "head_classes.yaml"


class Printed(NamedTuple):
    """Published head classes of one model.

    Attributes:
        alpha: share of contextual heads.
        contextual: bool [L, H]; None if no map is printed.
        none: layers without a contextual head, as far as they are named.
    """

    alpha: float
    contextual: Tensor | None
    none: tuple[int, ...]


def load_printed() -> dict[str, Printed]:
    """Return the printed classes by model (`head_classes.yaml`)."""
    return {
        model: Printed(
            node["alpha"],
            _read_map(node["layers"], node["heads"]) if "layers" in node else None,
            tuple(node.get("none", ())),
        )
        for model, node in yaml.safe_load(CLASSES.read_text(encoding="utf-8")).items()
    }


def _read_map(text: str, heads: int) -> Tensor:
    rows = [[int(bit) for bit in f"{int(number, 16):0{heads}b}"] for number in text.split()]
    return torch.tensor(rows, dtype=torch.bool)


def measure_agreement(contextual: Tensor, printed: Printed) -> float:
    """Return the share of heads [L, H], or of named layers if no map is printed, with the printed class."""
    if printed.contextual is None:
        return float((~contextual[list(printed.none)].any(1)).double().mean())
    if contextual.shape != printed.contextual.shape:
        shapes = (" x ".join(map(str, classes.shape)) for classes in (contextual, printed.contextual))
        raise ValueError("{} heads were calibrated, {} are printed".format(*shapes))
    return float((contextual == printed.contextual).double().mean())


OPTIONS = {
    "model": Option(None, choices=list(load_printed()), positional=True),
    "calibrations": Option([], "files to compare", positional=True, type=Path),
}


def main(options: argparse.Namespace) -> int:
    """Print the agreement of every calibration; return 1 if there is none or one is too low."""
    printed, shares = load_printed()[options.model], []
    compared = "layers without a contextual head" if printed.contextual is None else "heads"
    for path in options.calibrations:
        tensors = load_file(path)
        if "sigma" not in tensors:
            continue
        shares.append(measure_agreement(find_contextual(tensors["sigma"], printed.alpha), printed))
        print(f"{path}: {shares[-1]:.1%} of the {compared} as printed, alpha {printed.alpha:g}")
    if not shares:
        print(f"{options.model}: no calibration of method=hack or method=hackpp among these files")
    return int(not shares or min(shares) < MIN_AGREEMENT)
