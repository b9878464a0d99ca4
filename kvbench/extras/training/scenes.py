"""Scenes for training: pixels, captions, classes and the reconstruction loss."""

import torch
from torch import Tensor

from kvbench.scenes import grammar


def draw_scenes(count: int, seed: int, processes: int) -> tuple[Tensor, list[str]]:
    """Draw scenes uint8 [count, 96, 96, 3] and their captions, independent of the number of processes."""
    pixels, captions = grammar.pool(count, seed, processes=processes)
    return torch.from_numpy(pixels), captions


def draw_classes(count: int, seed: int, processes: int) -> tuple[Tensor, Tensor]:
    """Draw scenes of one object uint8 [count, 96, 96, 3] and the numbers of their pairs of colour and shape."""
    pixels, captions = grammar.pool(
        count, seed, mix={"colors": 1.0}, pairs=grammar.PAIRS, processes=processes
    )
    numbers = {pair: number for number, pair in enumerate(grammar.PAIRS)}
    labels = [numbers[color, shape] for _, color, shape, *_ in map(str.split, captions)]
    return torch.from_numpy(pixels), torch.tensor(labels)


def to_signed(images: Tensor) -> Tensor:
    """Return uint8 images [B, H, W, 3] as float32 [B, 3, H, W] in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def reconstruction_loss(decoded: Tensor, images: Tensor) -> Tensor:
    """Return L1 + 4 MSE + 1/4 L1 of neighbours' differences for images [B, 3, H, W] in [-1, 1], a scalar."""
    error = decoded - images
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    return error.abs().mean() + 4 * error.square().mean() + 0.25 * edges
