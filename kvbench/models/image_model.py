"""Base class of image models: a transformer generates latents, a tokenizer decodes them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvbench.core.devices import release_unused, use_device
from kvbench.core.files import hash_content
from kvbench.models.base import Cache, Calls, LeastWork, Model
from kvbench.models.files.checkpoints import Clean
from kvbench.models.files.parameters import build_on_meta, fill
from kvbench.models.files.weights import Source, check_sources, locate_all, prepare
from kvbench.models.noise import Noise
from kvbench.models.parts.autoencoder import ImageTokenizer, NetworkConfig
from kvbench.models.parts.decoding import HALF_DTYPES, DecoderDtype, Decoding, Rounding, count_decoding_bytes
from kvbench.models.parts.least_work import count_decoding, count_products

N = TypeVar("N", bound=nn.Module)
T = TypeVar("T", bound=ImageTokenizer)


class TokenizerConfig(Protocol):
    """Shape of an image tokenizer."""

    @property
    def networks(self) -> NetworkConfig:
        """Shapes of the encoder and the decoder."""
        ...


@dataclass
class ImageModel(Model, Generic[N, T]):
    """Settings of an image model; `load` builds and fills its networks.

    Attributes:
        name: name as in `conf/model`.
        transformer: shape of the transformer.
        tokenizer: shape of the image tokenizer.
        sampling: guidance, temperature and truncation.
        sources: source of the weights of each part.
        weights: `files`, or `random` values (and a hash in place of the text encoder), for timing and tests.
        decoder_dtype: dtype in which latents are decoded; `auto` is float32 on a CPU and the arithmetic of the
            official code (`decoding`) on a GPU.
        rounding: rounding of pixel values to 8 bits: half to even (`nearest`) or down (`truncate`).
    """

    name: str
    transformer: Any
    tokenizer: TokenizerConfig
    sampling: Any
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"
    decoder_dtype: DecoderDtype = "auto"
    rounding: Rounding = "nearest"

    networks: ClassVar[tuple[Callable[[Any], Any], Callable[[Any], Any]]]  # make transformer and tokenizer
    decoding: ClassVar[Decoding] = Decoding()

    @property
    @abstractmethod
    def cells(self) -> int:
        """Number of latent cells of an image, h w."""

    @property
    @abstractmethod
    def _cleans(self) -> dict[str, Clean]:
        """Conversions by source: of `transformer` and `tokenizer`, or of one source with the tensors of both."""

    def _read_text(self, device: torch.device | str) -> tuple[Any, str]:
        """Return the encoder of prompts, None for classes, and the SHA-256 of its file, empty if it has no file."""
        return None, ""

    @abstractmethod
    def _draw(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Generate the latents of a batch, float32 [B, channels, h, w]."""

    @property
    def parameters(self) -> int:
        """Parameters of transformer and tokenizer, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    @property
    def least_work(self) -> LeastWork:
        """Work of transformer and decoder, counted on the meta device."""
        transformer, tokenizer = self._build()
        return count_products(transformer)._replace(
            decoder=sum(p.numel() for p in tokenizer.decoder.parameters()),
            decoding=count_decoding(tokenizer.decoder, self.tokenizer.networks, self.cells),
            arithmetic=self.decoding.resolve(self.decoder_dtype, "cuda"),
        )

    def decoding_bytes(self, prompts: int) -> int:
        """Return the peak bytes of decoding on a GPU without weights."""
        size = 2 if self.decoding.resolve(self.decoder_dtype, "cuda") in HALF_DTYPES else 4
        return count_decoding_bytes(self.tokenizer.networks, prompts, self.cells, size)

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
        """Build and fill the networks, in float32 on a CPU, with blocks in `half` on a GPU.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
        """
        locate_all(list(self.list_sources().values()))
        self.check_files()
        use_device(device)
        self._transformer, self._tokenizer = self._build()
        digest = self._fill(device)
        self._prepare_networks(device)
        self._text, text_digest = self._read_text(device)
        release_unused(device)
        self.weights_sha256 = hash_content(digest + text_digest)

    def _prepare_networks(self, device: torch.device | str) -> None:
        """Prepare filled networks for generations on their device."""
        self._device = device
        self.decoding.prepare(self._tokenizer, self.decoding.resolve(self.decoder_dtype, device))

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the arithmetic in which latents are decoded on a device, as `decoder_dtype`."""
        return {"decoder_dtype": self.decoding.describe(self.decoder_dtype, device)}

    def _find_dtype(self, name: str, device: torch.device | str) -> torch.dtype:
        """Return the dtype of a parameter of the transformer."""
        return self.compute_dtype(device)

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch."""
        with torch.inference_mode():
            latents = self._draw(prompts, cache, noise)
            cache.release()
            return self.decode(latents)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, channels, h, w] to pixels uint8 [B, H, W, 3] on the CPU."""
        arithmetic = self.decoding.resolve(self.decoder_dtype, self._device)
        patch = self.tokenizer.networks.patch
        return self.decoding.decode(self._tokenizer, latents, patch, arithmetic, self.rounding)

    def _build(self) -> tuple[N, T]:
        """Build transformer and tokenizer on the meta device."""
        transformer, tokenizer = self.networks
        return build_on_meta(lambda: transformer(self.transformer)), build_on_meta(
            lambda: tokenizer(self.tokenizer)
        )

    def _fill(self, device: torch.device | str) -> str:
        """Fill the networks, parameter by parameter on the device, and return the joined SHA-256 of all sources."""
        networks: list[nn.Module] = [self._transformer, self._tokenizer]
        prefixes = ["transformer.", "tokenizer."]
        if len(self._cleans) == 1:
            networks = [nn.ModuleDict({"transformer": self._transformer, "tokenizer": self._tokenizer})]
            prefixes = [""]

        def place(prefix: str, name: str, tensor: Tensor) -> Tensor:
            part, _, leaf = f"{prefix}{name}".partition(".")
            dtype = self._find_dtype(leaf, device) if part == "transformer" else torch.float32
            return tensor.to(device).to(dtype)  # cast on the device, so that 16-bit files are sent in 16 bits

        parts = zip(networks, prefixes, self._cleans.items(), strict=True)
        return "".join(
            fill(network, self._source(part), clean, partial(place, prefix))
            for network, prefix, (part, clean) in parts
        )

    def list_sources(self) -> Mapping[str, Source]:
        """Return the source of each part's weights; empty for random weights."""
        return self.sources if self.weights == "files" else {}

    def prepare(self) -> None:
        """Download, convert and copy to the node's disk the files that `load` reads."""
        sources = self.list_sources()
        locate_all(list(sources.values()))
        for part, source in sources.items():
            prepare(source, self._cleans.get(part))

    def _check_sources(self, *others: str) -> None:
        check_sources(self.weights, self.sources, *self._cleans, *others)

    def _source(self, part: str) -> Source | None:
        return None if self.weights == "random" else self.sources[part]
