"""Text encoders: Flan-T5 for the official models, a small encoder of a closed vocabulary for the embedded ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.files import hash_content
from kvbench.models.base import TextFeatures, refuse
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import bound_tensors, build_on_meta, fill
from kvbench.models.files.weights import Source, prepare
from kvbench.models.parts.layers import init_linear


class TextEncoder(Protocol):
    """Interface of text encoders."""

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Return the features of every prompt; an empty prompt has at least its end token."""
        ...


class T5Encoder:
    """Flan-T5 encoder of the transformers library, with float32 features of tokens without padding.

    Args:
        folder: folder of the encoder's files, configuration and tokenizer included.
        device: device of the encoder.
        dtype: dtype of weights and computation.
        longest: maximum tokens of a prompt, its end included; further tokens are dropped.

    Raises:
        OSError: the folder lacks the network.
        ValueError: the folder lacks the tokenizer.
        ImportError: the `text` extra is not installed.
    """

    def __init__(
        self, folder: str, device: torch.device | str, dtype: torch.dtype = torch.float16, longest: int = 512
    ) -> None:
        from transformers import AutoTokenizer, T5EncoderModel

        self._tokenizer = AutoTokenizer.from_pretrained(
            folder, legacy=True, model_max_length=longest, local_files_only=True
        )
        with bound_tensors():  # the folder's config.json gives the shape
            self._model = T5EncoderModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.eval().to(device)
        for parameter in self._model.parameters():
            if not parameter.is_cuda:  # it may be mapped from the file and would change with the file
                parameter.data = parameter.data.clone()
        self._device = device

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Return the last hidden states of every prompt, of its end token too."""
        rows = [
            self._model(
                self._tokenizer(text, truncation=True, return_tensors="pt").input_ids.to(self._device)
            )
            .last_hidden_state[0]
            .float()
            for text in prompts
        ]
        return TextFeatures(torch.cat(rows), tuple(len(row) for row in rows))


class HashedText:
    """Stand-in for a text encoder without weights: random features seeded by each word's hash, and an end token.

    Args:
        width: channels of a word.
        device: device of the features.
        longest: maximum words of a prompt, its end included; further words are dropped. None for no limit.
    """

    def __init__(self, width: int, device: torch.device | str, longest: int | None = None) -> None:
        self._width, self._device, self._longest = width, device, longest

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Return features of unit variance for every prompt."""
        last = None if self._longest is None else self._longest - 1
        words = [[*prompt.split()[:last], ""] for prompt in prompts]
        seeds = [int(hash_content(word)[:14], 16) for row in words for word in row]
        rows = [torch.randn(self._width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return TextFeatures(torch.stack(rows).to(self._device), tuple(map(len, words)))


@dataclass(frozen=True)
class VocabularyConfig:
    """Shape of the closed-vocabulary encoder: words (word 0 is padding), longest prompt, channels, layers, heads."""

    words: int
    longest: int
    width: int
    layers: int = 2
    heads: int = 4


def check_heads(model: object, heads: int, width: int) -> None:
    """Check that `text_heads` of a model divide the channels of its closed-vocabulary encoder.

    Raises:
        ValueError: they do not.
    """
    wrong = heads < 1 or width % heads > 0
    refuse("model", model, text_heads=(wrong, f"divide model.transformer.text_width={width}"))


class _TextBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask[:, None, None], -1e9).softmax(-1).to(v.dtype)
        x = x + self.proj((weights @ v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VocabularyEncoder(nn.Module):
    """Small pre-norm transformer over words, trained together with the image transformer.

    Args:
        config: shape of the encoder.
        tokenize: maps a prompt to ids of words, for `encode`; raises ValueError for an unknown word.
    """

    def __init__(self, config: VocabularyConfig, tokenize: Callable[[str], list[int]] | None = None) -> None:
        super().__init__()
        self.config, self._tokenize = config, tokenize
        self.word = nn.Embedding(config.words, config.width)
        self.place = nn.Embedding(config.longest, config.width)
        self.text_blocks = nn.ModuleList(_TextBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids of words int64 [B, words], 0 for padding, to features [B, words, width]."""
        mask = tokens > 0
        x = self.word(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.text_blocks:
            x = block(x, mask)
        return self.norm(x)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Return packed features of captions of the closed grammar.

        Raises:
            ValueError: a prompt has an unknown word or too many words.
        """
        assert self._tokenize is not None
        rows = [self._tokenize(prompt) for prompt in prompts]
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        features = self(tokens.to(self.word.weight.device)).float()
        return TextFeatures(features[tokens.to(features.device) > 0], tuple(len(row) for row in rows))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise weights for training: unit-variance layers, branches that start at zero."""
        init_linear(self, generator)
        self.word.weight.normal_(0, 1.0, generator=generator)
        self.place.weight.normal_(0, 0.5, generator=generator)
        for block in self.text_blocks:
            assert isinstance(block, _TextBlock)
            block.proj.weight.zero_()
            block.fc2.weight.zero_()


def load_t5(
    source: Source, device: torch.device | str, half: torch.dtype = torch.float16, longest: int = 512
) -> tuple[TextEncoder, str]:
    """Load a `T5Encoder`, in `half` on a GPU and float32 on a CPU, and return it with the SHA-256 of its files.

    Raises:
        WeightsError: the files are missing or not Flan-T5, or the `text` extra is not installed.
    """
    files = prepare(source)
    dtype = half if torch.device(device).type == "cuda" else torch.float32
    try:
        encoder = T5Encoder(str(files.path), device, dtype, longest)
    except ImportError:
        raise WeightsError("model.text=t5: install the `text` extra, which reads Flan-T5") from None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(
            f"{source.key}: no Flan-T5 with its tokenizer in {files.path} ({reason}); copy it again"
        ) from None
    files.check_unchanged()
    return encoder, files.sha256


def load_vocabulary(
    source: Source | None,
    config: VocabularyConfig,
    tokenize: Callable[[str], list[int]],
    device: torch.device | str,
) -> tuple[TextEncoder, str]:
    """Load a closed-vocabulary encoder, random without a source, and return it with its weights' SHA-256.

    Raises:
        WeightsError: a checkpoint is missing, unreadable or does not fit.
    """
    encoder = build_on_meta(lambda: VocabularyEncoder(config, tokenize))
    digest = fill(encoder, source, lambda raw: dict(raw))  # type: ignore[arg-type]
    return encoder.to(device), digest
