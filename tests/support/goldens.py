"""Reference tensors of other authors' programs (`tests/golden/methods/README.md`)."""

import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.places import GOLDENS


@lru_cache
def load_golden(*names: str) -> dict[str, Tensor]:
    """Tensors of some files together, integers as int64."""
    arrays = {k: v for name in names for k, v in np.load(GOLDENS / "methods" / f"{name}.npz").items()}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return {
        key: x if x.is_floating_point() or x.dtype == torch.bool else x.long() for key, x in tensors.items()
    }


@lru_cache
def _read_cases() -> dict[str, dict[str, dict[str, Any]]]:
    """Parameters of the cases of eviction and merging, by file and number."""
    return json.loads((GOLDENS / "methods" / "em_cases.json").read_text())


def list_cases(name: str) -> list[int]:
    """Numbers of the cases of a file."""
    return [int(number) for number in _read_cases()[name]]


def load_case(name: str, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Parameters and tensors of a case, integers as int64."""
    lead = f"case{number}."
    tensors = {k.removeprefix(lead): x for k, x in load_golden(f"em_{name}").items() if k.startswith(lead)}
    return _read_cases()[name][str(number)], tensors


def load_parameters(name: str) -> list[dict[str, Any]]:
    """Parameters of every case of a file."""
    return list(_read_cases()[name].values())


def mark(kept: Tensor, slots: int) -> Tensor:
    """bool [..., slots] of the slots [..., n] that stay."""
    return torch.zeros(*kept.shape[:-1], slots, dtype=torch.bool).scatter_(-1, kept, value=True)


def take(x: Tensor, kept: Tensor) -> Tensor:
    """x [rows, slots, D] of the slots [rows, n]."""
    return x.gather(1, kept[..., None].expand(*kept.shape, x.shape[-1]))


def close_score(found: Tensor, expected: Tensor) -> None:
    """Scores agree to 3e-5 of their size, and of a thousandth of the largest one."""
    scale = expected.abs() + 1e-3 * expected.abs().max()
    assert ((found - expected).abs() <= 3e-5 * scale).all()
