"""Base class of image models: a transformer that draws latents and a tokenizer that decodes them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvbench.core.files import hash_content
from kvbench.models.autoencoder import NetworkConfig, count_decoding_bytes, decode_pixels
from kvbench.models.base import Cache, Calls, Model
from kvbench.models.noise import Noise
from kvbench.models.weights import Clean, Source, fill

N = TypeVar("N", bound=nn.Module)
T = TypeVar("T", bound=nn.Module)


class TokenizerConfig(Protocol):
    """Shape of an image tokenizer."""

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        ...


@dataclass
class ImageModel(Model, Generic[N, T]):
    """Settings of an image model; `load` builds and fills its networks.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the transformer.
        tokenizer: shape of the image tokenizer.
        sampling: guidance, temperature and truncation.
        sources: where the weights of each part come from.
        weights: `files`, or `random` numbers in the model's shape (and a hash in place of what reads prompts), for
            timing and tests.
    """

    name: str
    transformer: Any
    tokenizer: TokenizerConfig
    sampling: Any
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"

    truncate: ClassVar[bool] = False  # round pixels down instead of half to even

    @property
    @abstractmethod
    def cells(self) -> int:
        """Latent cells of an image, h w."""

    @abstractmethod
    def _build(self) -> tuple[N, T]:
        """Build transformer and tokenizer on the meta device."""

    @abstractmethod
    def _fill(self) -> list[str]:
        """Fill the networks and return the SHA-256 of each source; `_fill_parts` does for one file a network."""

    def _read_text(self, device: torch.device | str) -> tuple[Any, list[str]]:
        """Return what encodes prompts, None for classes, and the SHA-256 of its file if it has one."""
        return None, []

    @abstractmethod
    def _draw(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Draw the latents of a batch, float32 [B, channels, h, w]."""

    @abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """Decode latents [some, channels, h, w] to images [some, 3, h patch, w patch] in [-1, 1]."""

    @property
    def parameters(self) -> int:
        """Parameters of transformer and tokenizer, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    def decoding_bytes(self, prompts: int) -> int:
        """Return the peak bytes of decoding on a GPU beside weights."""
        return count_decoding_bytes(self.tokenizer.networks, prompts, self.cells)

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler can time."""
        return {
            "text": [] if self._text is None else [(self._text, "encode")],
            "transformer": self._passes,
            "decode": [(self._tokenizer, "decode")],
        }

    @property
    @abstractmethod
    def _passes(self) -> list[tuple[object, str]]:
        """Calls of the transformer."""

    def load(self, device: torch.device | str) -> None:
        """Build the networks and fill them: float32 on a CPU; on a GPU the blocks are in `half`.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
        """
        self._transformer, self._tokenizer = self._build()
        digests = self._fill()
        self._text, read = self._read_text(device)
        self._place(device)
        self._tokenizer.to(device)
        self._device = device
        self.weights_sha256 = hash_content("".join([*digests, *read]))

    def _place(self, device: torch.device | str) -> None:
        """Move the transformer to the device and cast its blocks."""
        self._transformer.to(device, self.compute_dtype(device))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch, decoded in float32.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt that the model cannot read.
        """
        with torch.inference_mode():
            latents = self._draw(prompts, cache, noise)
            cache.release()
            return decode_pixels(self._decode, latents, self.tokenizer.networks.patch, truncate=self.truncate)

    def _fill_parts(self, **cleans: Clean) -> list[str]:
        """Fill transformer and tokenizer, each from the source named; return their SHA-256."""
        networks = (self._transformer, self._tokenizer)
        return [
            fill(network, self._source(part), clean)
            for network, (part, clean) in zip(networks, cleans.items(), strict=True)
        ]

    def _source(self, part: str) -> Source | None:
        return None if self.weights == "random" else self.sources[part]
