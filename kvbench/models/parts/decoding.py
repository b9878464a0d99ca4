"""Arithmetic of decoding: dtypes of a family's official code, and latents decoded to 8-bit pixels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.core.devices import tf32
from kvbench.models.parts.autoencoder import ImageTokenizer, NetworkConfig

DecoderDtype = Literal["auto", "float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "truncate"]

HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PIXELS_PER_CALL = 2**20
"""Maximum pixels decoded in one call unless one image has more, enough to fill a GPU: a megapixel takes gigabytes."""


@dataclass(frozen=True)
class Decoding:
    """Arithmetic by which the official code of a model family decodes latents on a GPU.

    Attributes:
        on_gpu: arithmetic of `decoder_dtype=auto` on a GPU; `tf32` is float32 with convolutions in TF32.
        half: layers that are cast to 16 bits, `how` of `ImageTokenizer.cast_decoder`.
        products: whether `tf32` includes matrix products.
        half_pixels: whether truncated pixel values are computed in the decoder's dtype, else in float32.
    """

    on_gpu: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    half: Literal["decoder", "autocast", "cast"] = "decoder"
    products: bool = False
    half_pixels: bool = False

    def resolve(self, chosen: DecoderDtype, device: torch.device | str) -> str:
        """Return the arithmetic of a `decoder_dtype` on a device: a dtype or `tf32`."""
        if chosen != "auto":
            return chosen
        return self.on_gpu if torch.device(device).type == "cuda" else "float32"

    def describe(self, chosen: DecoderDtype, device: torch.device | str) -> str:
        """Return the resolved arithmetic as a run's identity records it: after `half`, if layers are cast otherwise."""
        arithmetic = self.resolve(chosen, device)
        named = arithmetic in HALF_DTYPES and self.half != "decoder"
        return f"{self.half} {arithmetic}" if named else arithmetic

    def prepare(self, tokenizer: ImageTokenizer, arithmetic: str) -> None:
        """Cast a tokenizer on its device for an arithmetic that `resolve` returned."""
        if arithmetic in HALF_DTYPES:
            tokenizer.cast_decoder(HALF_DTYPES[arithmetic], self.half)
        elif arithmetic == "tf32":  # tensor cores read channels last
            tokenizer.cast_decoder(torch.float32, "decoder")

    def decode(
        self, tokenizer: ImageTokenizer, latents: Tensor, patch: int, arithmetic: str, rounding: Rounding
    ) -> Tensor:
        """Decode latents [B, C, h, w] by a prepared tokenizer to pixels uint8 [B, h patch, w patch, 3] on the CPU.

        A call of the tokenizer decodes at most `PIXELS_PER_CALL` pixels, or one image. TF32 is set for its calls alone.
        """
        batch = max(1, PIXELS_PER_CALL // (latents[0, 0].numel() * patch**2))
        uses_tf32 = arithmetic == "tf32"
        with tf32(convolutions=uses_tf32, products=uses_tf32 and self.products):
            images = (
                round_pixels(tokenizer.decode(x), rounding, self.half_pixels) for x in latents.split(batch)
            )
            return torch.cat([image.permute(0, 2, 3, 1).cpu() for image in images])


def round_pixels(images: Tensor, rounding: Rounding, half_pixels: bool) -> Tensor:
    """Map images [B, 3, H, W] to pixels uint8 of the same shape; values are clamped to [-1, 1].

    Values are rounded half to even in float32, or truncated. With `half_pixels`, truncated values are computed in the
    dtype of the images: in 16 bits the official (x + 1) / 2 * 255 of Infinity and VAR. Its division is exact, so that
    one product has the same bits.
    """
    if rounding == "nearest" or not half_pixels:
        images = images.float()
    pixels = (images.clamp(-1, 1) + 1) * 127.5
    return (pixels.round() if rounding == "nearest" else pixels).to(torch.uint8)


def count_decoding_bytes(config: NetworkConfig, images: int, cells: int, size: int = 4) -> int:
    """Return the peak bytes of `Decoding.decode` on a GPU for images of `cells` cells and values of `size` bytes."""
    widths = config.decoder_widths
    batch = min(images, max(1, PIXELS_PER_CALL // (cells * config.patch**2)))
    elements = []
    for level, (width, before) in enumerate(zip(widths, (*widths[1:], widths[-1]), strict=True)):
        positions = batch * cells * 4 ** (len(widths) - 1 - level)
        # A block's input, its norm, and its first output; each side doubles around a convolution.
        elements += [positions * (2 * before + width), positions * width * (1 + 2 * 4) if level else 0]
    return size * max(elements)
