"""Random numbers by counter (Philox 4x32-10: Salmon, Moraes, Dror and Shaw, SC 2011) and variables made of them.

A number is a function of a key, which belongs to a prompt, and of a counter: step, purpose, and the code that uses the
number. So any program computes it where it is used, in any order, without state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Constants of Philox 4x32, as in Random123."""
PIECE = 2**14
"""Blocks of four numbers that are computed at a time, so that they stay in a processor's cache."""
DRAW, CODES, BITS, MIXTURE, CANDIDATES = range(5)
"""Purposes: third word of the counter, so that no two kinds of draws share a number."""
BELOW_ONE = 1 - 2**-24


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter under its key.

    Args:
        counter: four tensors of words in [0, 2^32), int64, of shapes that broadcast.
        key: two more.

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
    """Return a number for each code of each token of a step, int64 [prompts, tokens, codes] in [0, 2^32).

    Args:
        keys: int64 [prompts].
        step: int64 [1], below 2^32.
        purpose: what the numbers are for.
        tokens: tokens of a prompt in this step.
        codes: numbers of a token; a token's blocks of four numbers are its own.
    """
    blocks, first = -(-codes // 4), 0
    numbers = torch.empty(len(keys), tokens * blocks, 4, dtype=torch.int64, device=keys.device)
    for piece in numbers.split(max(1, PIECE // len(keys)), 1):
        block = torch.arange(first, first + piece.shape[1], device=keys.device)[None]
        torch.stack(_count(keys, step, purpose, block), -1, out=piece)
        first += piece.shape[1]
    return numbers.view(len(keys), tokens, 4 * blocks)[..., :codes]


def draw_candidates(keys: Tensor, step: Tensor, codes: Tensor) -> Tensor:
    """Return the numbers of some codes [prompts, candidates], int64 of that shape in [0, 2^32).

    A code's number does not depend on its place among the candidates.
    """
    words = torch.stack(_count(keys, step, CANDIDATES, codes // 4), -1)
    return words.gather(-1, (codes % 4)[..., None]).squeeze(-1)


def make_uniform(numbers: Tensor) -> Tensor:
    """Return uniform variables float32 in (0, 1) of integers in [0, 2^32), small ones with full relative precision."""
    return numbers.float().mul_(2**-32).add_(2**-33).clamp_(max=BELOW_ONE)


def make_exponential(numbers: Tensor) -> Tensor:
    """Return Exp(1) variables float32 of integers in [0, 2^32).

    The smallest of a row decides a draw, so they come from the small uniforms, -log(1 - u), which have 32 bits. Two of
    184 000 equally likely codes then tie with probability 4e-5; with 24 bits it would be 1 %.
    """
    return make_uniform(numbers).neg_().log1p_().neg_()


def _count(keys: Tensor, step: Tensor, purpose: int, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of each block [prompts or 1, n]."""
    third = torch.full_like(step, purpose)
    return philox((block, step, third, torch.zeros_like(step)), (keys[:, None] & WORD, keys[:, None] >> 32))
