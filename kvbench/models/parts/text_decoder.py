"""Decoders of language models like Llama: shapes with scaled, partial or absent rotation, and the network."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.linear import linear
from kvbench.models.parts.decoder import Add, Decoder, DecoderConfig, add_nothing
from kvbench.models.parts.rotary import RopeScaling, compute_frequencies, make_rotations


@dataclass(frozen=True, kw_only=True)
class TextDecoderConfig(DecoderConfig):
    """Shape of a language model; heads x head_dim may differ from the width.

    Attributes:
        tied: whether the embedding also maps the stream to logits.
        rotary_dim: first channels of a head that rotate; None for all.
        rope_scaling: change of the rotary frequencies for longer sequences; None for no change.
        context: maximum tokens of a sequence; None for no limit.
    """

    tied: bool = False
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rotary = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary % 2 or not 0 < rotary <= self.head_dim:
            raise ValueError(
                f"model.transformer.rotary_dim={rotary}: must be even and at most head_dim={self.head_dim}"
            )

    @property
    def frequencies(self) -> Tensor:
        """Rotary frequency of each pair of channels, float32 [head_dim/2]; 0 for channels that do not rotate."""
        rotary = self.rotary_dim or self.head_dim
        rotated = compute_frequencies(rotary, self.rope_base)
        if self.rope_scaling is not None:
            rotated = self.rope_scaling.scale(rotated)
        return torch.cat((rotated, rotated.new_zeros((self.head_dim - rotary) // 2)))

    def rotations(self, length: int) -> Tensor:
        """Return the rotations of a sequence of `length` tokens, complex64 [length, head_dim/2]."""
        return make_rotations(torch.arange(length)[:, None] * self.frequencies)

    def describe(
        self, name: str, segments: tuple[Segment, ...], branches: int, *, equal_branches: bool = True
    ) -> ModelSpec:
        """Return the shapes for caches and methods; see `ModelSpec` for the arguments."""
        spec = super().describe(name, segments, branches, equal_branches=equal_branches)
        if self.rope_scaling is None and self.rotary_dim in (None, self.head_dim):
            return spec
        return replace(spec, rope_frequencies=tuple(self.frequencies.tolist()))


class TextDecoder(Decoder):
    """Network of a language model, whose head may be its embedding."""

    config: TextDecoderConfig

    def __init__(self, config: TextDecoderConfig, add: Add = add_nothing) -> None:
        super().__init__(config, add)
        if config.tied:
            del self.output

    def logits(self, x: Tensor) -> Tensor:
        """Map residual streams [..., width] to logits float32 [..., vocabulary]."""
        head = self.tok_embeddings if self.config.tied else self.output
        return linear(self.norm(x), head.weight, None).float()
