"""Reconstruction by the shipped tokenizers: PSNR of unseen scenes, decoded from their first scales or from all tokens.

python -m benchmarks tokenizer [--model infinity_tiny | var_tiny | llamagen_tiny] [--scenes 256]
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from kvbench.core.segments import Segment
from kvbench.models import weights
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.var.model import VARModel
from kvbench.models.var.tokenizer import VQVAE
from kvbench.training.infinity.bits import straight_through_sums
from kvbench.training.scenes import draw_classes, draw_scenes, to_signed

SEED = 1
"""Of the scenes; training's is 0."""


def psnr(decoded: Tensor, images: Tensor) -> float:
    """Mean over images [B, 3, H, W] in [-1, 1], dB."""
    error = (decoded.clamp(-1, 1) - images).square().mean((1, 2, 3))
    return float((10 * torch.log10(4 / error)).mean())


def decode_scales(model: InfinityModel, images: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what is decoded of all scales up to each, with its name."""
    bsq = BSQ(model.tokenizer).eval()
    weights.load_into(bsq, model.sources["tokenizer"], weights.clean_tokenizer)
    sizes = [(s.height, s.width) for s in model.spec.segments]
    never = torch.zeros(len(images))
    sums, _ = straight_through_sums(
        bsq.encoder(images), sizes, bsq.amplitudes, never, torch.Generator().manual_seed(0)
    )
    for segment, summed in zip(model.spec.segments, sums, strict=True):
        yield _name_scale(segment), bsq.decoder(summed)


def decode_code_scales(model: VARModel, images: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what is decoded of all scales' codes up to each, with its name."""
    vq = VQVAE(model.tokenizer).eval()
    weights.load_into(vq, model.sources["tokenizer"], weights.clean_vqvae)
    segments = model.spec.segments
    latents = vq.latents(images)
    tokens, _ = vq.encode(latents, [(s.height, s.width) for s in segments])
    summed = torch.zeros_like(latents)
    for segment, part in zip(segments, tokens, strict=True):
        summed = vq.add(summed, vq.codes(part), segment.index, len(segments))
        yield _name_scale(segment), vq.decode(summed)
    used = len(torch.cat([part.flatten() for part in tokens]).unique())
    yield f"without codes; with them {used} of {model.tokenizer.codes} occur", vq.decode(latents)


def _name_scale(segment: Segment) -> str:
    share = f"{segment.height} x {segment.width}"
    return f"up to scale {segment.index} ({share:7s})"


def decode_tokens(model: LlamaGenModel, images: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what is decoded of all tokens, with a name that says how many codes occur."""
    vq = VQ(model.tokenizer).eval()
    weights.load_into(vq, model.sources["tokenizer"], weights.clean_vqgan)
    tokens = vq.encode(vq.latents(images))
    yield f"{len(tokens.unique())} of {model.tokenizer.codes} codes", vq.decode(vq.codes(tokens))


MODELS: dict[str, tuple[Any, Any]] = {
    "infinity_tiny": (draw_scenes, decode_scales),
    "var_tiny": (draw_classes, decode_code_scales),
    "llamagen_tiny": (draw_scenes, decode_tokens),
}
"""What draws a model's kind of scenes, and what decodes them."""


OPTIONS = {
    "model": Option("infinity_tiny", choices=MODELS),
    "scenes": Option(256, "number of scenes"),
}


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    """Print one line per scale, or one."""
    model = build_model(options.model)
    draw, decode = MODELS[options.model]
    images = to_signed(draw(options.scenes, SEED, 1)[0])
    for name, decoded in decode(model, images):
        print(f"{name}: {psnr(decoded, images):5.1f} dB")
