"""Sampling of a language model's next token: temperature, top-k, top-p."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.devices import send
from kvbench.kernels.draw import draw_candidate
from kvbench.models.base import refuse
from kvbench.models.noise import CounterNoise, Noise

GOLDEN = -0x61C8864680B583EB
"""2^64 / golden ratio, made odd, as a signed integer: the increment of SplitMix64."""
MORE_CANDIDATES = 236
"""Candidates in addition to top_k on a GPU, for ties with the last; further ties are dropped."""


@dataclass(frozen=True)
class TextSampling:
    """Sampling of tokens; the defaults sample from the whole distribution.

    Attributes:
        temperature: divisor of logits; 0 takes the top-1 token.
        top_k: keep the k most probable tokens, and ties with the last of them; 0 keeps all.
        top_p: keep the fewest of these, in order of probability, whose total probability reaches top_p; among equals
            the highest id comes first. 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        refuse(
            "model.sampling",
            self,
            temperature=(self.temperature < 0, "not be negative (0 takes the most probable)"),
            top_k=(self.top_k < 0, "not be negative (0 turns it off)"),
            top_p=(not 0 < self.top_p <= 1, "be in (0, 1] (1 turns it off)"),
        )

    @property
    def numbers(self) -> int:
        """Random numbers that the sampling of a token takes per prompt."""
        return 0 if self.temperature == 0 else 2


def truncate(logits: Tensor, sampling: TextSampling) -> tuple[Tensor, Tensor]:
    """Return logits float32 [prompts, candidates] / temperature in descending order, and their tokens int64.

    Logits are -inf where top-k or top-p excludes a candidate. Ties are decided as by transformers with a stable sort.
    The input is float32 [prompts, vocabulary], the temperature not 0.
    """
    scaled, vocabulary = logits / sampling.temperature, logits.shape[-1]
    count = min(sampling.top_k, vocabulary) or vocabulary
    candidates, tokens = scaled.topk(count)
    if count < vocabulary:
        threshold = candidates[:, -1:]
        if (width := _count_candidates(scaled, threshold, count)) > count:
            candidates, tokens = scaled.topk(width)
            candidates = candidates.masked_fill(candidates < threshold, -math.inf)
    # topk returns ties in any order; here the token of highest id comes first.
    tokens, order = tokens.sort(descending=True)
    candidates, order = candidates.gather(-1, order).sort(descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    if sampling.top_p < 1:
        probabilities = candidates.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        candidates = candidates.masked_fill(before >= sampling.top_p, -math.inf)
    return candidates, tokens


def _count_candidates(logits: Tensor, threshold: Tensor, count: int) -> int:
    """Return how many largest logits contain every prompt's `count` largest and, on a CPU, all ties with the last."""
    if logits.is_cuda:  # a count of the ties would synchronise with the GPU
        return min(count + MORE_CANDIDATES, logits.shape[-1])
    return max(count, int((logits >= threshold).sum(-1).max()))


def draw_text_token(logits: Tensor, sampling: TextSampling, noise: Noise) -> Tensor:
    """Sample a token int64 [prompts] from logits float32 [prompts, vocabulary].

    The result is argmax p / q with q ~ Exp(1), where q depends on the token, not on its rank: runs whose logits differ
    slightly sample the same token nearly always. Temperature 0 takes no noise.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    candidates, tokens = truncate(logits, sampling)
    if isinstance(noise, CounterNoise):
        drawn = draw_candidate(candidates, tokens, noise.keys, noise.step)
        noise.advance()
        return drawn
    exponential = mix_exponential(tokens, send(noise.draw(sampling.numbers), logits.device))
    best = (candidates.softmax(-1) / exponential).argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)


def mix_exponential(tokens: Tensor, drawn: Tensor) -> Tensor:
    """Return Exp(1) variates float32 [prompts, candidates], one per token, from two random numbers per prompt.

    A random number per token of the vocabulary would take as long as a layer. Instead the bits of the two are mixed
    with the token's id (finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014).

    Args:
        tokens: int64 [prompts, candidates].
        drawn: random numbers float32 [prompts, 2], different at every position of every prompt.
    """
    bits = drawn.contiguous().view(torch.int64) + GOLDEN * (tokens + 1)
    bits = (bits ^ _shift(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift(bits, 27)) * -0x6B2FB644ECCEEE15
    bits = bits ^ _shift(bits, 31)
    uniform = (_shift(bits, 40).float() + 0.5) / 2**24
    return -uniform.clamp(max=1 - 2**-24).log()  # the sum rounds 2^24 - 1/2 to 2^24


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift int64 logically to the right."""
    return (bits >> by) & (2 ** (64 - by) - 1)
