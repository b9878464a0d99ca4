"""Convolutional encoder and decoder that multi-scale tokenizers share (Infinity's bitwise one, VAR's VQ-VAE).

Module names equal the keys of Infinity's files (`encoder.down.0.block.0.norm1.norm.weight`). VAR's files lack the level
inside convolutions and norms (`norm1.weight`); `kvbench.models.files.weights` adds it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int]
DECODED = 2**20
"""Pixels that are decoded at a time, as many as fill a GPU: a megapixel takes gigabytes."""


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of an encoder and a decoder.

    Attributes:
        latents: channels of the latent.
        base: channels after the encoder's first convolution.
        encoder_widths: channels of each resolution level of the encoder, highest resolution first.
        decoder_widths: channels of each resolution level of the decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution.
        mixers: token-mixing blocks in the middle of encoder and decoder; they need a fixed `grid`.
        grid: latent (H, W), only with mixers.
        attention: where there is attention: nowhere, once in the `middle`, or there and after every block of the
            `lowest` resolution.
    """

    latents: int
    base: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    mixers: int = 0
    grid: Size = (0, 0)
    attention: Literal["none", "middle", "lowest"] = "none"

    @property
    def patch(self) -> int:
        """Pixels per latent cell and side."""
        return self.stem * 2 ** (len(self.encoder_widths) - 1)


class Conv(nn.Module):
    """A convolution under the name `conv`."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H, W]."""
        return self.conv(x)


class Norm(nn.Module):
    """Group norm under the name `norm`, then SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32 if channels % 32 == 0 else 24, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate [B, channels, H, W]; without gradients no second tensor is made."""
        return F.silu(self.norm(x), inplace=not torch.is_grad_enabled())


class ResBlock(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution where the channels change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = Norm(inputs), Conv(inputs, outputs)
        self.norm2, self.conv2 = Norm(outputs), Conv(outputs, outputs)
        if inputs != outputs:
            self.nin_shortcut = Conv(inputs, outputs, kernel=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H, W]."""
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """Residual attention of one head over all positions, scaled by 1/sqrt(channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to [B, channels, H, W]."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * x.shape[1] ** -0.5).softmax(-1)
        return x + self.proj_out((weights @ v).transpose(1, 2).reshape(x.shape))


class Mixer(nn.Module):
    """Residual MLP over positions, shared by all channels, then a residual 1x1 convolution."""

    def __init__(self, channels: int, positions: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels, eps=1e-6)
        self.spread = nn.Linear(positions, positions)
        self.gather = nn.Linear(positions, positions)
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to [B, channels, H, W]."""
        mixed = self.gather(F.silu(self.spread(self.norm(x).flatten(2)))).view_as(x)
        x = x + mixed
        return x + self.conv(F.silu(x))


class _Middle(nn.Module):
    def __init__(self, channels: int, config: NetworkConfig) -> None:
        super().__init__()
        self.block_1, self.block_2 = ResBlock(channels, channels), ResBlock(channels, channels)
        positions = config.grid[0] * config.grid[1]
        self.mixers = nn.ModuleList(Mixer(channels, positions) for _ in range(config.mixers))
        if config.attention != "none":
            self.attn_1 = Attention(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block_1(x)
        if hasattr(self, "attn_1"):
            x = self.attn_1(x)
        for mixer in self.mixers:
            x = mixer(x)
        return self.block_2(x)


class _Resample(nn.Module):
    """A layer that halves the resolution by a strided convolution (`down`) or doubles it (nearest neighbours first)."""

    def __init__(self, channels: int, *, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = Conv(channels, channels, stride=2, padding=0) if down else Conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0))


class _Level(nn.Module):
    """Blocks of one resolution, each followed by attention if there is any, then the way to the next resolution.

    The way is `downsample`, `upsample`, or None at the end.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, resample: str | None, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(inputs if i == 0 else outputs, outputs) for i in range(blocks))
        self.attn = nn.ModuleList(Attention(outputs) if attention else nn.Identity() for _ in range(blocks))
        self.resample = resample
        if resample is not None:
            self.add_module(resample, _Resample(outputs, down=resample == "downsample"))


def _make_levels(
    inputs: Sequence[int],
    outputs: Sequence[int],
    blocks: int,
    resample: Sequence[str | None],
    config: NetworkConfig,
) -> nn.ModuleList:
    attention = [False] * (len(outputs) - 1) + [config.attention == "lowest"]
    shapes = zip(inputs, outputs, resample, attention, strict=True)
    return nn.ModuleList(_Level(before, after, blocks, way, has) for before, after, way, has in shapes)


def _steps(levels: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of all levels in order: called one by one, the input of each is freed when it is done."""
    for level in levels:
        assert isinstance(level, _Level)
        for block, attention in zip(level.block, level.attn, strict=True):
            yield block
            yield attention
        if level.resample is not None:
            yield level.get_submodule(level.resample)


class Encoder(nn.Module):
    """The encoder: images [B, 3, H, W] in [-1, 1] become latents [B, latents, H/patch, W/patch]."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        widths = config.encoder_widths
        self.stem = config.stem
        self.conv_in = Conv(3 * config.stem**2, config.base)
        inputs, resample = (config.base, *widths[:-1]), [*["downsample"] * (len(widths) - 1), None]
        self.down = _make_levels(inputs, widths, config.blocks, resample, config)
        self.mid = _Middle(widths[-1], config)
        self.norm_out, self.conv_out = Norm(widths[-1]), Conv(widths[-1], config.latents)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to latents [B, latents, H/patch, W/patch]."""
        x = self.conv_in(F.pixel_unshuffle(images, self.stem))
        for step in _steps(self.down):
            x = step(x)
        return self.conv_out(self.norm_out(self.mid(x)))


class Decoder(nn.Module):
    """The decoder: latents [B, latents, h, w] become images [B, 3, h*patch, w*patch], not clamped."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        widths = config.decoder_widths
        self.stem = config.stem
        self.conv_in = Conv(config.latents, widths[-1])
        if config.mixers:
            self.place = nn.Parameter(torch.zeros(1, widths[-1], *config.grid))
        self.mid = _Middle(widths[-1], config)
        inputs, resample = (*widths[1:], widths[-1]), [None, *["upsample"] * (len(widths) - 1)]
        self.up = _make_levels(inputs, widths, config.blocks + 1, resample, config)
        self.norm_out, self.conv_out = Norm(widths[0]), Conv(widths[0], 3 * config.stem**2)

    def forward(self, latents: Tensor) -> Tensor:
        """Map latents [B, latents, h, w] to images [B, 3, h*patch, w*patch], not clamped, in the weights' dtype."""
        x = self.conv_in(latents.to(self.conv_in.conv.weight.dtype))
        if hasattr(self, "place"):
            x = x + self.place
        x = self.mid(x)
        for step in _steps(reversed(self.up)):
            x = step(x)
        return F.pixel_shuffle(self.conv_out(self.norm_out(x)), self.stem)


class ImageTokenizer(nn.Module):
    """Base class of image tokenizers.

    Attributes:
        decoder: the last part of `decode`.
    """

    decoder: Decoder

    def decode_in_half(self) -> None:
        """Have the decoder compute in bfloat16, its channels last; what comes before it stays in float32."""
        self.decoder.to(torch.bfloat16)
        self.decoder.to(memory_format=torch.channels_last)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, channels, h, w] to images [B, 3, h patch, w patch]."""


@torch.no_grad()
def close_branches(network: nn.Module) -> None:
    """Zero the last layer of every residual branch of a network's blocks and mixers, the state to train from."""
    for module in network.modules():
        if isinstance(module, ResBlock):
            module.conv2.conv.weight.zero_()
        elif isinstance(module, Mixer):
            module.gather.weight.zero_()


def resize(x: Tensor, size: Size, mode: str = "bilinear") -> Tensor:
    """Resize [B, channels, H, W] without antialiasing; what has the wanted size already is returned as it is."""
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode=mode, align_corners=False)


def decode_pixels(
    decode: Callable[[Tensor], Tensor], latents: Tensor, patch: int, *, truncate: bool = False
) -> Tensor:
    """Decode some images at a time, `DECODED` pixels or one image, and return their pixels on the CPU.

    Args:
        decode: maps latents [some, channels, h, w] to images [some, 3, h patch, w patch], which are clamped to [-1, 1].
        latents: [B, channels, h, w].
        patch: pixels per latent cell and side.
        truncate: round down.

    Returns:
        uint8 [B, h patch, w patch, 3], rounded half to even by default.
    """
    some = max(1, DECODED // (latents[0, 0].numel() * patch**2))
    return torch.cat([_to_pixels(decode(part), truncate) for part in latents.split(some)])


def count_decoding_bytes(config: NetworkConfig, images: int, cells: int, size: int = 4) -> int:
    """Return the bytes that `decode_pixels` holds at its worst instant on a GPU.

    Args:
        config: shape of the decoder.
        images: images to decode.
        cells: latent cells of one image, h w.
        size: bytes of a number of the decoder.
    """
    widths = config.decoder_widths
    together = min(images, max(1, DECODED // (cells * config.patch**2)))
    numbers = []
    for level, (width, before) in enumerate(zip(widths, (*widths[1:], widths[-1]), strict=True)):
        positions = together * cells * 4 ** (len(widths) - 1 - level)
        # A block's input, normalised too, and its first output; twice as large a side around a convolution.
        numbers += [positions * (2 * before + width), positions * width * (1 + 2 * 4) if level else 0]
    return size * max(numbers)


def _to_pixels(images: Tensor, truncate: bool) -> Tensor:
    pixels = (images.float().clamp(-1, 1) + 1) * 127.5
    return (pixels if truncate else pixels.round()).to(torch.uint8).permute(0, 2, 3, 1).cpu()
