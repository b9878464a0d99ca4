"""Sampling of codes, candidates and bits on a GPU; random numbers are computed where they are used."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.philox import BELOW_ONE, BITS, CANDIDATES, CODES, MIXTURE
from kvbench.kernels.triton.launch import cdiv, count_warps, kernel, next_power_of_2

LANES = tl.constexpr(4)
BOUND = tl.constexpr(BELOW_ONE)
WHOLE, PIECE = 16384, 8192
"""Maximum codes that a program holds in registers as a whole, and the size of its pieces of more codes."""
BIT_BLOCK = 1024
"""Bits that one program samples."""


@triton.jit
def count_words(keys, step, prompt, block, PURPOSE: tl.constexpr):
    """Return the four words of each block of a prompt, as `kvbench.kernels.philox` counts."""
    key = tl.load(keys + prompt)
    block = block.to(tl.uint32)
    zero = block ^ block
    return tl.philox_impl(
        block, zero + tl.load(step).to(tl.uint32), zero + PURPOSE, zero,
        zero + (key & 0xFFFFFFFF).to(tl.uint32), zero + (key >> 32).to(tl.uint32),
    )  # fmt: skip


@triton.jit
def choose_word(words, lane):
    """Return the word of each lane, of words that broadcast with lanes."""
    first, second, third, fourth = words
    return tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))


@triton.jit
def spread_words(words):
    """Return four words of blocks, each [n], as one tensor [n, 4]."""
    first, second, third, fourth = words
    lane = tl.arange(0, LANES)[None, :]
    return choose_word((first[:, None], second[:, None], third[:, None], fourth[:, None]), lane)


@triton.jit
def make_uniform(words):
    """Return uniform variables in (0, 1), small ones with full relative precision."""
    return tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, BOUND)


@triton.jit
def make_exponential(words):
    """Return Exp(1) variables; the series of -log(1 - u) keeps the precision of small ones."""
    u = make_uniform(words)
    series = 1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6)))
    return tl.where(u < 0.0625, u * (1 + u * (0.5 + u * series)), -tl.log(1 - u))


@triton.jit
def load_codes(
    logits, start, temperature, top,
    CODES_: tl.constexpr, BLOCK: tl.constexpr, TRUNCATE: tl.constexpr, COOL_FIRST: tl.constexpr,
):  # fmt: skip
    """Load the logits of a row's codes from `start` on, [BLOCK / 4, 4], over the temperature.

    Returns:
        Codes, logits (-inf where truncated), and the rank of each logit as an unsigned integer, by which top-k chooses.
    """
    code = start + tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    value = tl.load(logits + code, mask=code < CODES_, other=float("-inf")).to(tl.float32)
    cooled = value
    rank = code.to(tl.uint32)
    if TRUNCATE:
        cooled = tl.div_rn(value, temperature + tl.zeros_like(value))
        ranked = cooled if COOL_FIRST else value
        bits = tl.where(ranked == 0, 0.0, ranked).to(tl.uint32, bitcast=True)  # zeros of both signs are equal
        rank = tl.where(bits < 0x80000000, bits | 0x80000000, bits ^ 0xFFFFFFFF)
        cooled = tl.where(rank >= top, cooled, float("-inf"))
    return code, cooled, rank


@kernel()
def codes_kernel(
    logits, keys, step, out, tokens: tl.int32, top_k: tl.int32, temperature,
    PURPOSE: tl.constexpr, CODES_: tl.constexpr, BLOCK: tl.constexpr,
    TRUNCATE: tl.constexpr, COOL_FIRST: tl.constexpr,
):  # fmt: skip
    """Draw the code of one token; with `TRUNCATE` of the `top_k` likeliest, ties with the last of them included."""
    row = tl.program_id(0).to(tl.int64)
    prompt, token = row // tokens, row % tokens
    logits += row * CODES_
    top = tl.zeros((), tl.uint32)
    if TRUNCATE:
        bit = top + 0x80000000
        for _ in range(32):  # the largest rank that `top_k` codes reach, bit by bit
            higher = top | bit
            count = tl.zeros((), tl.int32)
            for start in range(0, CODES_, BLOCK):
                _code, _value, rank = load_codes(
                    logits, start, temperature, top, CODES_, BLOCK, TRUNCATE, COOL_FIRST
                )
                count += tl.sum((rank >= higher).to(tl.int32))
            top = tl.where(count >= top_k, higher, top)
            bit = bit >> 1
    largest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, CODES_, BLOCK):
        _code, value, _rank = load_codes(logits, start, temperature, top, CODES_, BLOCK, TRUNCATE, COOL_FIRST)
        largest = tl.maximum(largest, tl.max(value))
    best, winner = tl.full((), -1.0, tl.float32), tl.full((), CODES_ - 1, tl.int32)
    for start in range(0, CODES_, BLOCK):
        code, value, _rank = load_codes(logits, start, temperature, top, CODES_, BLOCK, TRUNCATE, COOL_FIRST)
        block = token * ((CODES_ + LANES - 1) // LANES) + start // LANES + tl.arange(0, BLOCK // LANES)
        words = spread_words(count_words(keys, step, prompt, block, PURPOSE))
        score = tl.div_rn(tl.exp(value - largest), make_exponential(words))
        score = tl.where(code < CODES_, score, -2.0)
        high = tl.max(score)
        place = tl.min(tl.where(score == high, code, CODES_ - 1))
        winner = tl.where(high > best, place, winner)
        best = tl.maximum(best, high)
    tl.store(out + row, winner.to(tl.int64))


@kernel()
def candidate_kernel(
    logits, codes, keys, step, out, count: tl.int32, PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one of each prompt's candidate codes."""
    prompt = tl.program_id(0).to(tl.int64)
    logits += prompt * count
    codes += prompt * count
    largest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(logits + place, mask=place < count, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(value))
    best, winner = tl.full((), -1.0, tl.float32), tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        value = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        code = tl.load(codes + place, mask=inside, other=0)
        words = count_words(keys, step, prompt, code // LANES, PURPOSE)
        number = choose_word(words, code % LANES)
        score = tl.where(inside, tl.div_rn(tl.exp(value - largest), make_exponential(number)), -2.0)
        high = tl.max(score)
        first = tl.min(tl.where(score == high, place, count - 1))
        winner = tl.where(high > best, first, winner)
        best = tl.maximum(best, high)
    tl.store(out + prompt, tl.load(codes + winner))


@kernel()
def bits_kernel(
    logits, keys, step, out, tokens: tl.int32, rare,
    PURPOSE: tl.constexpr, BITS_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw bits of a prompt; a value whose probability is at most `rare` is never drawn."""
    prompt = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (BITS_ + LANES - 1) // LANES  # groups of LANES bits of a token
    block = tl.program_id(0) * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)
    words = spread_words(count_words(keys, step, prompt, block, PURPOSE))
    bit = (block % blocks)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    token = (block // blocks)[:, None]
    inside = (bit < BITS_) & (token < tokens)
    place = (prompt * tokens + token) * BITS_ + bit
    zero = tl.load(logits + 2 * place, mask=inside, other=0.0).to(tl.float32)
    one = tl.load(logits + 2 * place + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(zero, one)
    zero, one = tl.exp(zero - largest), tl.exp(one - largest)
    p = tl.div_rn(one, zero + one)
    p = tl.where(p <= rare, 0.0, tl.where(tl.div_rn(zero, zero + one) <= rare, 1.0, p))
    tl.store(out + place, (make_uniform(words) < p).to(tl.uint8), mask=inside)


@triton.jit
def load_mixed(
    logits, keys, step, prompt, token, start, weight, temperature,
    PURPOSE: tl.constexpr, CODES_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return codes [BLOCK / 4, 4] of a token from `start` on, and their weighted logits with Gumbel noise."""
    block = start // LANES + tl.arange(0, BLOCK // LANES)
    code = block[:, None] * LANES + tl.arange(0, LANES)[None, :]
    block += token * ((CODES_ + LANES - 1) // LANES)
    words = spread_words(count_words(keys, step, prompt, block, PURPOSE))
    value = tl.load(logits + code, mask=code < CODES_, other=float("-inf")).to(tl.float32)
    return code, tl.div_rn(
        weight * value - tl.log(make_exponential(words)), temperature + tl.zeros_like(value)
    )


@kernel()
def mix_kernel(
    logits, keys, step, out, tokens: tl.int32, weight, temperature,
    PURPOSE: tl.constexpr, CODES_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the Gumbel softmax over the codes of one token."""
    row = tl.program_id(0).to(tl.int64)
    prompt, token = row // tokens, (row % tokens).to(tl.int32)
    logits += row * CODES_
    out += row * CODES_
    largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, CODES_, BLOCK):
        _code, mixed = load_mixed(
            logits, keys, step, prompt, token, start, weight, temperature, PURPOSE, CODES_, BLOCK
        )
        high = tl.maximum(largest, tl.max(mixed))
        # Until a code is allowed, all differences would be NaN.
        shift = tl.where(high == float("-inf"), 0.0, high)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(mixed - shift))
        largest = high
    for start in range(0, CODES_, BLOCK):
        code, mixed = load_mixed(
            logits, keys, step, prompt, token, start, weight, temperature, PURPOSE, CODES_, BLOCK
        )
        tl.store(
            out + code, tl.div_rn(tl.exp(mixed - largest), total + tl.zeros_like(mixed)), mask=code < CODES_
        )


def draw_codes_triton(
    logits: Tensor, keys: Tensor, step: Tensor, temperature: float, top_k: int, temperature_first: bool
) -> Tensor:
    """Run `kvbench.kernels.draw.draw_codes` on a GPU."""
    prompts, tokens, codes = logits.shape
    out, block = torch.empty(prompts, tokens, dtype=torch.int64, device=logits.device), choose_block(codes)
    truncate = top_k > 0 or temperature != 1
    codes_kernel[(prompts * tokens,)](
        logits.contiguous(), keys, step, out, tokens, min(top_k, codes) or codes, float(temperature),
        CODES, codes, block, truncate, temperature_first, num_warps=count_warps(block, 16),
    )  # fmt: skip
    return out


def draw_candidate_triton(logits: Tensor, codes: Tensor, keys: Tensor, step: Tensor) -> Tensor:
    """Run `kvbench.kernels.draw.draw_candidate` on a GPU."""
    out, block = torch.empty_like(codes[:, 0]), min(1024, max(16, next_power_of_2(logits.shape[1])))
    candidate_kernel[(len(logits),)](
        logits.contiguous(), codes.contiguous(), keys, step, out, logits.shape[1], CANDIDATES, block,
        num_warps=count_warps(block, 16),
    )  # fmt: skip
    return out


def draw_bits_triton(logits: Tensor, keys: Tensor, step: Tensor, rare: float) -> Tensor:
    """Sample bits bool [B, t, C] from logits [B, t, C, 2], never a value of probability at most `rare`, below 1/2."""
    prompts, tokens, bits, _ = logits.shape
    out = torch.empty(prompts, tokens, bits, dtype=torch.uint8, device=logits.device)
    programs = cdiv(tokens * cdiv(bits, 4) * 4, BIT_BLOCK)
    bits_kernel[(programs, prompts)](
        logits.contiguous(), keys, step, out, tokens, rare, BITS, bits, BIT_BLOCK, num_warps=4,
    )  # fmt: skip
    return out.view(torch.bool)


def gumbel_softmax_triton(
    logits: Tensor, keys: Tensor, step: Tensor, weight: float, temperature: float
) -> Tensor:
    """Compute `kvbench.kernels.draw.gumbel_softmax` on a GPU."""
    prompts, tokens, codes = logits.shape
    out, block = torch.empty(logits.shape, device=logits.device), choose_block(codes)
    mix_kernel[(prompts * tokens,)](
        logits.contiguous(), keys, step, out, tokens, float(weight), float(temperature),
        MIXTURE, codes, block, num_warps=count_warps(block, 16),
    )  # fmt: skip
    return out


def choose_block(codes: int) -> int:
    """Return the block size in codes, a power of two."""
    return max(16, next_power_of_2(codes)) if codes <= WHOLE else PIECE
