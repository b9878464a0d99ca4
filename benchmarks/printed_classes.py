"""Agreement of a calibration with the contextual heads that HACK++ prints (arXiv:2606.08302, Fig. 15).

python -m benchmarks printed_classes var_d30 runs/var_d30/calibration-0123456789.safetensors ...
Takes calibrations of `method=hack` or `method=hackpp`; others are passed over. Classes of one and of fifty samples
agree on 96 % of VAR-d30's heads in the paper, so that less than 95 % means a statistic of something else: the exit
status is then 1. Of Infinity-2B no map is printed: the layers are compared that are said to have no contextual head.
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.support.arguments import Option
from kvbench.methods.hack.classes import find_contextual
from kvbench.methods.hack.printed import load_printed, measure_agreement

MIN_AGREEMENT = 0.95
"""Share of heads whose class must be the printed one."""


OPTIONS = {
    "model": Option(None, choices=list(load_printed()), positional=True),
    "calibrations": Option([], "files to compare", positional=True, type=Path),
}


def main(options: argparse.Namespace) -> int:
    """Print the agreement of every calibration; return 1 if there is none or one is too low."""
    own, shares = load_printed()[options.model], []
    compared = "layers without a contextual head" if own.contextual is None else "heads"
    for path in options.calibrations:
        tensors = load_file(path)
        if "sigma" not in tensors:
            continue
        found = find_contextual(tensors["sigma"], own.alpha)
        shares.append(measure_agreement(found, own))
        print(f"{path}: {shares[-1]:.1%} of the {compared} as printed, alpha {own.alpha:g}")
    if not shares:
        print(f"{options.model}: no calibration of method=hack or method=hackpp among these files")
    return int(not shares or min(shares) < MIN_AGREEMENT)
