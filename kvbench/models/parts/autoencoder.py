"""Convolutional encoder and decoder of all image tokenizers.

Shapes: B images [B, 3, H, W], latents [B, latents, h, w], C channels of a layer. Module names equal the keys of
Infinity's files (`encoder.down.0.block.0.norm1.norm.weight`). Other files lack the level inside convolutions and norms
(`norm1.weight`); `kvbench.models.files.official_files` adds it.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.kernels.group_norm import group_norm
from kvbench.models.base import require_sizes

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """Widths and depths of an encoder and a decoder.

    Attributes:
        base: channels after the encoder's first convolution.
        encoder_widths: channels of each resolution level of the encoder, highest resolution first.
        decoder_widths: channels of each resolution level of the decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution.
        mixers: token-mixing blocks in the middle of encoder and decoder; they need a fixed `grid`.
        grid: latent (H, W), only with mixers.
    """

    base: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    mixers: int = 0
    grid: Size = (0, 0)

    def __post_init__(self) -> None:
        require_sizes("model.tokenizer", self, "base", "blocks", "stem")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(NetworkShape):
    """Shape of an encoder and a decoder.

    Attributes:
        latents: channels of the latent.
        attention: `none`, one layer in the `middle`, or also one after every block of the `lowest` resolution.
        code_channels: channels of the codes that scale and shift every norm of the decoder; 0 for plain norms.
    """

    latents: int
    attention: Literal["none", "middle", "lowest"] = "none"
    code_channels: int = 0

    @property
    def patch(self) -> int:
        """Pixels per latent cell along a side."""
        return self.stem * 2 ** (len(self.encoder_widths) - 1)


class Conv(nn.Module):
    """Convolution whose weights lie in the submodule `conv`, as in published files."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [B, inputs, H, W] to [B, outputs, H, W]."""
        return self.conv(x)


def make_group_norm(channels: int, *groups: int) -> nn.GroupNorm:
    """Return a group norm with the first of some numbers of groups that divides the channels.

    Raises:
        ValueError: none does.
    """
    fitting = [count for count in groups if channels % count == 0]
    if not fitting:
        numbers = " or ".join(map(str, groups))
        raise ValueError(
            f"model.tokenizer: a level with {channels} channels must have a multiple of {numbers}"
        )
    return nn.GroupNorm(fitting[0], channels, eps=1e-6)


class Norm(nn.Module):
    """Group norm in the submodule `norm`, followed by SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = make_group_norm(channels, 32, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate images [B, C, H, W]."""
        return normalise(self.norm, x, silu=True)


class SpatialNorm(nn.Module):
    """Group norm with a scale and a shift for each position, linear in its code (MoVQ, arXiv:2209.09002).

    Args:
        channels: C.
        codes: channels of a code.
        silu: whether SiLU follows.
    """

    def __init__(self, channels: int, codes: int, *, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
        self.norm = make_group_norm(channels, 32)
        self.scale, self.shift = (nn.Conv2d(codes, channels, 1) for _ in range(2))

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        """Normalise [B, C, H, W] under codes [B, codes, h, w]; H / h and W / w are integers."""
        height, width = codes.shape[2:]
        # Positions that share a code get axes of their own, over which scale and shift are broadcast.
        scale, shift = (layer(codes)[:, :, :, None, :, None] for layer in (self.scale, self.shift))
        cells = normalise(self.norm, x).unflatten(3, (width, -1)).unflatten(2, (height, -1))
        out = (cells * scale).add_(shift).flatten(4, 5).flatten(2, 3)
        return F.silu(out) if self.silu else out


def normalise(norm: nn.GroupNorm, x: Tensor, *, silu: bool = False) -> Tensor:
    """Apply a group norm and, with `silu`, SiLU to [B, C, H, W], as `kvbench.kernels.group_norm` does."""
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, silu=silu)


def _make_norm(channels: int, codes: int) -> nn.Module:
    return SpatialNorm(channels, codes) if codes else Norm(channels)


class ResBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the channels change."""

    def __init__(self, inputs: int, outputs: int, codes: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = _make_norm(inputs, codes), Conv(inputs, outputs)
        self.norm2, self.conv2 = _make_norm(outputs, codes), Conv(outputs, outputs)
        if inputs != outputs:
            self.nin_shortcut = Conv(inputs, outputs, kernel=1, padding=0)

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H, W]; `codes` are as in `ConvDecoder.forward`."""
        h = self.conv2(self.norm2(self.conv1(self.norm1(x, *codes)), *codes))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """Residual attention of one head over all positions, scaled by 1/sqrt(channels)."""

    def __init__(self, channels: int, codes: int = 0) -> None:
        super().__init__()
        self.norm = SpatialNorm(channels, codes, silu=False) if codes else make_group_norm(channels, 32)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C, H, W]; `codes` are as in `ConvDecoder.forward`."""
        normed = normalise(self.norm, x) if isinstance(self.norm, nn.GroupNorm) else self.norm(x, *codes)
        q, k, v = self.qkv(normed).flatten(2).transpose(1, 2).chunk(3, -1)
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
        """Map [B, C, H, W] to [B, C, H, W]."""
        mixed = self.gather(F.silu(self.spread(normalise(self.norm, x).flatten(2)))).view_as(x)
        x = x + mixed
        return x + self.conv(F.silu(x))


class _Middle(nn.Module):
    def __init__(self, channels: int, config: NetworkConfig) -> None:
        super().__init__()
        codes = config.code_channels
        self.block_1, self.block_2 = (ResBlock(channels, channels, codes) for _ in range(2))
        positions = config.grid[0] * config.grid[1]
        self.mixers = nn.ModuleList(Mixer(channels, positions) for _ in range(config.mixers))
        if config.attention != "none":
            self.attn_1 = Attention(channels, codes)

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        x = self.block_1(x, *codes)
        if hasattr(self, "attn_1"):
            x = self.attn_1(x, *codes)
        for mixer in self.mixers:
            x = mixer(x)
        return self.block_2(x, *codes)


class _Resample(nn.Module):
    """Strided convolution that halves the resolution (`down`), or upsampling and a convolution that double it."""

    def __init__(self, channels: int, *, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = Conv(channels, channels, stride=2, padding=0) if down else Conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0))


class _Level(nn.Module):
    """Blocks of one resolution, each with optional attention, then `downsample`, `upsample` or None as `resample`."""

    def __init__(
        self, inputs: int, outputs: int, blocks: int, resample: str | None, attention: bool, codes: int
    ) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * blocks]
        self.block = nn.ModuleList(ResBlock(width, outputs, codes) for width in widths[:-1])
        self.attn = nn.ModuleList(
            Attention(outputs, codes) if attention else nn.Identity() for _ in range(blocks)
        )
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
    return nn.ModuleList(
        _Level(before, after, blocks, step, attend, config.code_channels)
        for before, after, step, attend in shapes
    )


def _steps(levels: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of all levels in order, so that a loop `x = module(x)` frees each input."""
    for level in levels:
        assert isinstance(level, _Level)
        for block, attention in zip(level.block, level.attn, strict=True):
            yield block
            yield attention
        if level.resample is not None:
            yield level.get_submodule(level.resample)


class ConvEncoder(nn.Module):
    """Encoder of images in [-1, 1] to latents."""

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


class ConvDecoder(nn.Module):
    """Decoder of latents to images, which are not clamped."""

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
        self.norm_out = _make_norm(widths[0], config.code_channels)
        self.conv_out = Conv(widths[0], 3 * config.stem**2)

    def forward(self, latents: Tensor, *codes: Tensor) -> Tensor:
        """Map latents [B, latents, h, w] to images [B, 3, h*patch, w*patch] in the weights' dtype.

        With `code_channels` the second argument is the codes [B, code_channels, h, w].
        """
        dtype = self.conv_in.conv.weight.dtype
        x, codes = self.conv_in(latents.to(dtype)), tuple(code.to(dtype) for code in codes)
        if hasattr(self, "place"):
            x = x + self.place
        x = self.mid(x, *codes)
        for step in _steps(reversed(self.up)):
            x = step(x, *codes) if isinstance(step, ResBlock | Attention) else step(x)
        return F.pixel_shuffle(self.conv_out(self.norm_out(x, *codes)), self.stem)


class ImageTokenizer(nn.Module):
    """Base class of image tokenizers, whose `decode` ends with `decoder`."""

    decoder: ConvDecoder

    def cast_decoder(
        self, dtype: torch.dtype, how: Literal["decoder", "autocast", "cast"] = "decoder"
    ) -> None:
        """Cast layers to a dtype and to channels last.

        `how` selects the layers: `decoder` alone, norms included; all layers (`cast`); or, with the rounding of
        `torch.autocast`, the decoder and the convolution before it except norms, which stay in float32 (`autocast`).
        """
        before = self.get_submodule("post_quant_conv") if hasattr(self, "post_quant_conv") else nn.Identity()
        parts: list[nn.Module] = [self] if how == "cast" else [self.decoder]
        if how == "autocast":
            parts.append(before)
        for module in (module for part in parts for module in part.modules()):
            stays = how == "autocast" and isinstance(module, nn.GroupNorm)
            for name, parameter in module.named_parameters(recurse=False):
                layout = torch.channels_last if parameter.ndim == 4 else torch.preserve_format
                cast = parameter.to(parameter.dtype if stays else dtype, memory_format=layout)
                setattr(module, name, nn.Parameter(cast, requires_grad=parameter.requires_grad))

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, channels, h, w] to images [B, 3, h patch, w patch]."""


@torch.no_grad()
def close_branches(network: nn.Module) -> None:
    """Zero the last weights of each block and of each mixer's MLP over positions, for the start of training."""
    for module in network.modules():
        if isinstance(module, ResBlock):
            module.conv2.conv.weight.zero_()
        elif isinstance(module, Mixer):
            module.gather.weight.zero_()


def resize(x: Tensor, size: Size, mode: str = "bilinear") -> Tensor:
    """Resize [B, C, H, W] to `size` (H, W) without antialiasing; return x itself if it has that size."""
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode=mode, align_corners=False)
