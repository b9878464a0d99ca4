"""Head classes printed in the HACK++ paper, for comparison with a calibration."""

from importlib.resources import files
from typing import NamedTuple

import torch
import yaml
from torch import Tensor


class Printed(NamedTuple):
    """Published head classes of one model.

    Attributes:
        alpha: share of contextual heads.
        contextual: bool [L, H]; None where no map is printed.
        none: layers without a contextual head, as far as they are named.
    """

    alpha: float
    contextual: Tensor | None
    none: tuple[int, ...]


def load_printed() -> dict[str, Printed]:
    """Return what is printed, by model (`kvbench/assets/head_classes.yaml`)."""
    text = (files("kvbench") / "assets" / "head_classes.yaml").read_text(encoding="utf-8")
    return {
        model: Printed(
            node["alpha"],
            _read_map(node["layers"], node["heads"]) if "layers" in node else None,
            tuple(node.get("none", ())),
        )
        for model, node in yaml.safe_load(text).items()
    }


def measure_agreement(found: Tensor, printed: Printed) -> float:
    """Return the share of heads, or of the layers named where no map is printed, whose class is the printed one.

    Args:
        found: bool [L, H], which heads are contextual.
        printed: what is printed of the same model.

    Raises:
        ValueError: another number of layers or heads.
    """
    if printed.contextual is None:
        return float((~found[list(printed.none)].any(1)).double().mean())
    if found.shape != printed.contextual.shape:
        shapes = (" x ".join(map(str, classes.shape)) for classes in (found, printed.contextual))
        raise ValueError("{} heads were calibrated, {} are printed".format(*shapes))
    return float((found == printed.contextual).double().mean())


def _read_map(text: str, heads: int) -> Tensor:
    rows = [[int(bit) for bit in f"{int(number, 16):0{heads}b}"] for number in text.split()]
    return torch.tensor(rows, dtype=torch.bool)
