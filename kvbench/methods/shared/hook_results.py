"""Checks of what the hooks of a method return."""

import torch
from torch import Tensor

from kvbench.core.config import UserError


class NotANumber(UserError, FloatingPointError):
    """Scores of a method contain NaN and cannot order tokens; the message names method, layer and segment."""


class WrongTensor(UserError, ValueError):
    """A hook of a method returned a wrong shape or dtype; the message names method, layer and segment."""


def require_tensor(
    hook: str, found: object, shape: torch.Size, layout: str, dtype: torch.dtype | None = None
) -> None:
    """Check shape and dtype (None: any floating-point dtype) of a hook's result; nothing is read from the device.

    The message contains the names of the dimensions, `layout`, such as `[rows, slots]`.

    Raises:
        WrongTensor: the result differs, or is not a tensor.
    """
    wanted = f"{layout} = {[*shape]}, {'floating-point' if dtype is None else str(dtype)[6:]}"
    if not isinstance(found, Tensor):
        raise WrongTensor(f"{hook} returned {type(found).__name__}; return a tensor {wanted}")
    if found.shape != shape or not (found.is_floating_point() if dtype is None else found.dtype == dtype):
        raise WrongTensor(f"{hook} returned {[*found.shape]}, {str(found.dtype)[6:]}; return {wanted}")
