"""Counter-based random numbers (Philox 4x32-10: Salmon, Moraes, Dror and Shaw, SC 2011) and variables made of them.

A number is a function of a key, which belongs to a prompt, and of a counter: step, purpose, and the code that uses the
number. So any kernel computes it where it is used, in any order, without state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Key increments of Philox 4x32; Random123 has the same increments, `ROUNDS` and `MULTIPLIERS`."""
PIECE = 2**14
"""Blocks of four integers that are computed at a time, so that they stay in a processor's cache."""
DRAW, CODES, BITS, MIXTURE, CANDIDATES = range(5)
"""Purpose of a draw, the counter's third word: separate random streams."""
BELOW_ONE = 1 - 2**-24


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter under its key.

    Args:
        counter: four tensors of words in [0, 2^32), int64, of shapes that broadcast.
        key: two tensors of words, likewise.

    Returns:
        int64, words in [0, 2^32).
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(ROUNDS):
        # Products of 64 bits overflow the sign, which the masks remove.
        left, right = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, third = ((right >> 32) ^ second ^ low) & WORD, ((left >> 32) ^ fourth ^ high) & WORD
        second, fourth = right & WORD, left & WORD
        low, high = (low + WEYL[0]) & WORD, (high + WEYL[1]) & WORD
    return first, second, third, fourth


def draw_integers(keys: Tensor, step: Tensor, purpose: int, tokens: int, codes: int) -> Tensor:
    """Return a random integer per code and token of a step, int64 [prompts, tokens, codes] in [0, 2^32).

    Args:
        keys: int64 [prompts], keys of the prompts' streams.
        step: int64 [1], below 2^32.
        purpose: purpose of the draw, such as `CODES`.
        tokens: tokens of a prompt in this step.
        codes: integers per token; tokens do not share blocks of four integers.
    """
    blocks, first = -(-codes // 4), 0
    integers = torch.empty(len(keys), tokens * blocks, 4, dtype=torch.int64, device=keys.device)
    for piece in integers.split(max(1, PIECE // len(keys)), 1):
        block = torch.arange(first, first + piece.shape[1], device=keys.device)[None]
        torch.stack(_count(keys, step, purpose, block), -1, out=piece)
        first += piece.shape[1]
    return integers.view(len(keys), tokens, 4 * blocks)[..., :codes]


def draw_candidates(keys: Tensor, step: Tensor, codes: Tensor) -> Tensor:
    """Return random integers for `codes`, int64 [prompts, candidates] in [0, 2^32).

    A code's integer does not depend on its index among the candidates.
    """
    words = torch.stack(_count(keys, step, CANDIDATES, codes // 4), -1)
    return words.gather(-1, (codes % 4)[..., None]).squeeze(-1)


def make_uniform(integers: Tensor) -> Tensor:
    """Map integers in [0, 2^32) to uniform variables float32 in (0, 1), small ones with full relative precision."""
    return integers.float().mul_(2**-32).add_(2**-33).clamp_(max=BELOW_ONE)


def make_exponential(integers: Tensor) -> Tensor:
    """Map integers in [0, 2^32) to Exp(1) variables float32.

    The smallest variable of a row decides a draw, so it is -log(1 - u) of a small uniform u, which has 32 bits. Two of
    184 000 equally likely codes then tie with probability 4e-5; with 24 bits it would be 1 %.
    """
    return make_uniform(integers).neg_().log1p_().neg_()


def _count(keys: Tensor, step: Tensor, purpose: int, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of each block [prompts or 1, n]."""
    third = torch.full_like(step, purpose)
    return philox((block, step, third, torch.zeros_like(step)), (keys[:, None] & WORD, keys[:, None] >> 32))
