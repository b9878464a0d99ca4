"""Dtype of the matrix products of trainings."""

import torch


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float32 for processors without AVX512, whose products in bfloat16 are ten times slower."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
    return torch.float32 if slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """Return a context for passes whose matrix products have the dtype of `choose_dtype`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=choose_dtype(device) is torch.bfloat16)
