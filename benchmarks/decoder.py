"""Difference between images decoded in bfloat16 and in float32 from the same latents.

PSNR of 8-bit pixels, in dB, and the share of channel values that differ. Images are generated with the full cache on a
CPU.

python -m benchmarks decoder [--models infinity_tiny,llamagen_tiny,var_tiny] [--prompts 8]
"""

import argparse

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model, prepare_method
from benchmarks.support.fake_gpu import list_prompts
from benchmarks.support.table import Table
from kvbench.engine.cache import KVCache
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.autoencoder import decode_pixels

OPTIONS = {
    "models": Option("infinity_tiny,llamagen_tiny,var_tiny", "models of conf/model, separated by commas"),
    "prompts": 8,
}


def main(options: argparse.Namespace) -> None:
    """Print a row per model."""
    print(f"bfloat16 against float32, {options.prompts} images each")
    table = Table({"mean dB": ".1f", "worst dB": ".1f", "differ": ".3f", "by at most": "d"}, "model")
    for name in options.models.split(","):
        single, half = (pixels.double() for pixels in decode_both(name, options.prompts))
        difference = (single - half).abs()
        decibels = 10 * (255**2 / difference.square().flatten(1).mean(1)).log10()
        share = (difference > 0).double().mean()
        table.add(name, float(decibels.mean()), float(decibels.min()), float(share), int(difference.max()))


@torch.inference_mode()
def decode_both(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Return pixels uint8 [B, H, W, 3] of the same latents, decoded in float32 and in bfloat16."""
    model = build_model(name)
    model.load("cpu")
    method = prepare_method(model.spec, 1, ["method=full"])
    cache = KVCache(model.spec, method, dtype=torch.float32)
    latents = model._draw(list_prompts(model, count), cache, PromptNoise(0, range(count)))
    images = []
    for change in (lambda: None, model._tokenizer.decode_in_half):
        change()
        decode, patch = model._tokenizer.decode, model.tokenizer.networks.patch
        images.append(decode_pixels(decode, latents, patch, truncate=model.truncate))
    return images[0], images[1]
