"""Janus-Pro's language model (arXiv:2501.17811) with an embedding and a head for image tokens."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.base import require_sizes
from kvbench.models.parts.decoder import Decoder, PromptedImageConfig


@dataclass(frozen=True, kw_only=True)
class JanusConfig(PromptedImageConfig):
    """Shape of a language model that generates images; `vocabulary` is the number of its text tokens.

    Image tokens are rotated by their position in the sequence, as text tokens are.

    Attributes:
        code_width: channels of an image token before it is projected to the stream.
        wide_logits: whether guidance, temperature and softmax use float32; the official code uses the weights' dtype.
    """

    codes: int = 16384
    code_width: int = 8
    wide_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("model.transformer", self, "code_width")
        self._check_cells("image")

    @property
    def choices(self) -> int:
        """Number of image tokens, the channels of the logits."""
        return self.codes


class Aligner(nn.Module):
    """MLP from embedded image tokens to the residual stream."""

    def __init__(self, config: JanusConfig) -> None:
        super().__init__()
        shapes = ((config.code_width, config.width), (config.width, config.width))
        self.layers = nn.ModuleDict({str(2 * i): nn.Linear(*shape) for i, shape in enumerate(shapes)})

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings [..., code_width] to [..., width]."""
        return self.layers["2"](F.gelu(self.layers["0"](x)))


class GenerationHead(nn.Module):
    """MLP from the residual stream to logits of image tokens."""

    def __init__(self, config: JanusConfig) -> None:
        super().__init__()
        self.output_mlp_projector = nn.Linear(config.width, config.width)
        self.vision_head = nn.Linear(config.width, config.codes)

    def forward(self, x: Tensor) -> Tensor:
        """Map streams [..., width] to logits [..., codes]."""
        return self.vision_head(F.gelu(self.output_mlp_projector(x)))


class Janus(Decoder):
    """Language model; `tok_embeddings` embeds the prompt, `embed` the image's tokens."""

    config: JanusConfig

    def __init__(self, config: JanusConfig) -> None:
        super().__init__(config)
        del self.output  # the head of text tokens
        self.gen_embed = nn.Embedding(config.codes, config.code_width)
        self.gen_aligner = Aligner(config)
        self.gen_head = GenerationHead(config)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed image tokens int64 [...] as [..., width]."""
        return self.gen_aligner(self.gen_embed(tokens))

    def logits(self, x: Tensor) -> Tensor:
        """Map residual streams [..., width] to logits [..., codes] in the weights' dtype or in float32."""
        logits = self.gen_head(self.norm(x))
        return logits.float() if self.config.wide_logits else logits
