"""Reference tensors of other authors' programs (`tests/golden/methods/README.md`)."""

from functools import lru_cache

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
