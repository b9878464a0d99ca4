"""Difference between images decoded in 16 bits or truncated and images decoded in float32, of the same latents.

PSNR of 8-bit pixels, in dB, and the share of channel values that differ. Images are generated with the full cache on a
CPU. `Decoding.half` of the model's family says which layers are in 16 bits: with `autocast` norms stay in float32.

python -m benchmarks decoder [--models infinity_tiny,llamagen_tiny,var_tiny] [--prompts 8]
"""

import argparse
from copy import deepcopy

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model, prepare_method
from benchmarks.support.fake_gpu import list_prompts
from benchmarks.support.table import Table
from kvbench.engine.cache import KVCache
from kvbench.models.noise import PromptNoise

WAYS = {
    "bfloat16": ("bfloat16", "nearest"),
    "float16": ("float16", "nearest"),
    "truncated": ("float32", "truncate"),
}
"""Arithmetic and rounding of each row; they are compared with `float32` and `nearest`."""
OPTIONS = {
    "models": Option("infinity_tiny,llamagen_tiny,var_tiny", "models of conf/model, separated by commas"),
    "prompts": 8,
}


def main(options: argparse.Namespace) -> None:
    """Print a row per model and way of decoding."""
    print(f"against float32 rounded half to even, {options.prompts} images each")
    columns = {"decoding": "s", "mean dB": ".1f", "worst dB": ".1f", "differ": ".3f", "by at most": "d"}
    table = Table(columns, "model")
    for name in options.models.split(","):
        exact, ways = decode_all(name, options.prompts)
        for way, pixels in ways.items():
            difference = (exact.double() - pixels.double()).abs()
            decibels = 10 * (255**2 / difference.square().flatten(1).mean(1)).log10()
            share = float((difference > 0).double().mean())
            table.add(name, way, float(decibels.mean()), float(decibels.min()), share, int(difference.max()))


@torch.inference_mode()
def decode_all(name: str, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return pixels uint8 [B, H, W, 3] of the same latents: in float32, and of each of `WAYS`."""
    model = build_model(name)
    model.load("cpu")
    method = prepare_method(model.spec, 1, ["method=full"])
    cache = KVCache(model.spec, method, dtype=torch.float32)
    latents = model._draw(list_prompts(model, count), cache, PromptNoise(0, range(count)))

    def decode(arithmetic: str, rounding: str) -> Tensor:
        tokenizer, decoding = deepcopy(model._tokenizer), model.decoding
        decoding.prepare(tokenizer, arithmetic)
        pixels: Tensor = decoding.decode(
            tokenizer, latents, model.tokenizer.networks.patch, arithmetic, rounding
        )
        return pixels

    return decode("float32", "nearest"), {way: decode(*given) for way, given in WAYS.items()}
