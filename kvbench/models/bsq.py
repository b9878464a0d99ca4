"""Infinity's multi-scale bitwise tokenizer (BSQ-VAE): encoder, residual sign quantiser, decoder.

One implementation for the official checkpoints and for the embedded model. Module names equal the official keys
(`encoder.down.0.block.0.norm1.norm.weight`, ...). Source: Infinity (arXiv:2412.04431), section 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int]


@dataclass(frozen=True)
class BSQConfig:
    """Shape of a tokenizer.

    Attributes:
        bits: channels d of the latent; each is one bit per scale.
        base: channels after the encoder's first convolution.
        encoder_widths: channels of each resolution level of the encoder, highest resolution first.
        decoder_widths: likewise of the decoder.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution (official: 1).
        mixers: token-mixing blocks in the middle of encoder and decoder (official: 0); they need a fixed `grid`.
        grid: latent (H, W), only with mixers.
        scales: scales with learned code amplitudes; 0 for the official fixed amplitude 1.
    """

    bits: int
    base: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    mixers: int = 0
    grid: Size = (0, 0)
    scales: int = 0

    @property
    def patch(self) -> int:
        """Pixels per latent cell and side."""
        return self.stem * 2 ** (len(self.encoder_widths) - 1)


class _Conv(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32 if channels % 32 == 0 else 24, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class _ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _Norm(inputs), _Conv(inputs, outputs)
        self.norm2, self.conv2 = _Norm(outputs), _Conv(outputs, outputs)
        if inputs != outputs:
            self.nin_shortcut = _Conv(inputs, outputs, kernel=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class _Mixer(nn.Module):
    """Residual MLP over positions, shared by all channels, then a residual 1x1 convolution."""

    def __init__(self, channels: int, positions: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels, eps=1e-6)
        self.spread = nn.Linear(positions, positions)
        self.gather = nn.Linear(positions, positions)
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.gather(F.silu(self.spread(self.norm(x).flatten(2)))).view_as(x)
        x = x + mixed
        return x + self.conv(F.silu(x))


class _Middle(nn.Module):
    def __init__(self, channels: int, config: BSQConfig) -> None:
        super().__init__()
        self.block_1, self.block_2 = _ResBlock(channels, channels), _ResBlock(channels, channels)
        positions = config.grid[0] * config.grid[1]
        self.mixers = nn.ModuleList(_Mixer(channels, positions) for _ in range(config.mixers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block_1(x)
        for mixer in self.mixers:
            x = mixer(x)
        return self.block_2(x)


class _Resample(nn.Module):
    """Halves the resolution by a strided convolution (`down`) or doubles it by nearest neighbours and one."""

    def __init__(self, channels: int, *, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = _Conv(channels, channels, stride=2, padding=0) if down else _Conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0))


class _Level(nn.Module):
    """Residual blocks of one resolution, then the way to the next one (`downsample` or `upsample`), if there is one."""

    def __init__(self, inputs: int, outputs: int, blocks: int, resample: str | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(_ResBlock(inputs if i == 0 else outputs, outputs) for i in range(blocks))
        if resample is not None:
            self.add_module(resample, _Resample(outputs, down=resample == "downsample"))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for name, module in self.named_children():
            if name != "block":
                x = module(x)
        return x


class Encoder(nn.Module):
    """Images [B, 3, H, W] in [-1, 1] to latents [B, d, H/patch, W/patch]."""

    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        widths = config.encoder_widths
        self.stem = config.stem
        self.conv_in = _Conv(3 * config.stem**2, config.base)
        last = len(widths) - 1
        self.down = nn.ModuleList(
            _Level(before, width, config.blocks, "downsample" if i < last else None)
            for i, (before, width) in enumerate(zip((config.base, *widths[:-1]), widths, strict=True))
        )
        self.mid = _Middle(widths[-1], config)
        self.norm_out, self.conv_out = _Norm(widths[-1]), _Conv(widths[-1], config.bits)

    def forward(self, images: Tensor) -> Tensor:
        """Encodes."""
        x = self.conv_in(F.pixel_unshuffle(images, self.stem))
        for level in self.down:
            x = level(x)
        return self.conv_out(self.norm_out(self.mid(x)))


class Decoder(nn.Module):
    """Latents [B, d, h, w] to images [B, 3, h*patch, w*patch], not clamped."""

    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        widths = config.decoder_widths
        self.stem = config.stem
        self.conv_in = _Conv(config.bits, widths[-1])
        if config.mixers:
            self.place = nn.Parameter(torch.zeros(1, widths[-1], *config.grid))
        self.mid = _Middle(widths[-1], config)
        self.up = nn.ModuleList(
            _Level(before, width, config.blocks + 1, "upsample" if i else None)
            for i, (width, before) in enumerate(zip(widths, (*widths[1:], widths[-1]), strict=True))
        )
        self.norm_out, self.conv_out = _Norm(widths[0]), _Conv(widths[0], 3 * config.stem**2)

    def forward(self, latents: Tensor) -> Tensor:
        """Decodes."""
        x = self.conv_in(latents)
        if hasattr(self, "place"):
            x = x + self.place
        x = self.mid(x)
        for level in reversed(self.up):
            x = level(x)
        return F.pixel_shuffle(self.conv_out(self.norm_out(x)), self.stem)


class BSQ(nn.Module):
    """The tokenizer: images to bits per scale and back."""

    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        if config.scales:
            self.amplitudes = nn.Parameter(1.8 * 0.84 ** torch.arange(config.scales))

    @torch.no_grad()
    def close_branches(self) -> None:
        """Zeroes the last layer of every residual branch, the state to train from."""
        for module in self.modules():
            if isinstance(module, _ResBlock):
                module.conv2.conv.weight.zero_()
            elif isinstance(module, _Mixer):
                module.gather.weight.zero_()

    def codes(self, bits: Tensor, scale: int) -> Tensor:
        """Bits (bool or int) of one scale to codes of magnitude amplitude/sqrt(d), float32, same shape."""
        amplitude = self.amplitudes[scale].float() if self.config.scales else 1.0
        return (bits.float() * 2 - 1) * (amplitude / self.config.bits**0.5)

    def add(self, summed: Tensor, bits: Tensor, scale: int) -> Tensor:
        """Adds a scale's codes to the running sum [B, d, H, W]; bits [B, h, w, d], resized bilinearly."""
        codes = self.codes(bits, scale).permute(0, 3, 1, 2)
        return summed + resize(codes, (summed.shape[2], summed.shape[3]))

    @torch.no_grad()
    def quantize(self, latents: Tensor, sizes: list[Size]) -> tuple[list[Tensor], Tensor]:
        """Residual sign quantisation of latents [B, d, H, W].

        Returns:
            Bits per scale, bool [B, h, w, d], and the sum of all codes float32 [B, d, H, W].
        """
        summed = torch.zeros_like(latents, dtype=torch.float32)
        bits: list[Tensor] = []
        for scale, size in enumerate(sizes):
            residual = F.interpolate(latents - summed, size, mode="area")
            bits.append((residual > 0).permute(0, 2, 3, 1))
            summed = self.add(summed, bits[-1], scale)
        return bits, summed

    def decode(self, summed: Tensor) -> Tensor:
        """Any prefix sum of codes [B, d, H, W] to an image [B, 3, .., ..] clamped to [-1, 1]."""
        return self.decoder(summed).clamp(-1, 1)


def resize(x: Tensor, size: Size) -> Tensor:
    """Bilinear resize without antialiasing, the identity when the size is the same already."""
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode="bilinear", align_corners=False)
