"""Counter-based random numbers: Random123's known answers, a generator of plain integers, and statistics."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kvbench.kernels.philox import (
    BITS,
    CODES,
    DRAW,
    PIECE,
    draw_candidates,
    draw_integers,
    make_exponential,
    make_uniform,
    philox,
)
from tests.support.triton_device import DEVICE, HERE, needs_triton

MASK = 0xFFFFFFFF
KEYS = torch.tensor([0x299F31D0A4093822, 7, 2**63 - 1])
STEP = torch.tensor([5])

if HERE:
    import triton
    import triton.language as tl

    from kvbench.kernels.triton import draw as programs

    @triton.jit
    def _write(keys, step, words, uniform, exponential, purpose: tl.constexpr, blocks: tl.constexpr):
        prompt = tl.program_id(0)
        block = tl.arange(0, blocks)
        found = programs.spread_words(programs.count_words(keys, step, prompt, block, purpose))
        place = (prompt * blocks + block[:, None]) * 4 + tl.arange(0, 4)[None, :]
        tl.store(words + place, found.to(tl.int64))
        tl.store(uniform + place, programs.make_uniform(found))
        tl.store(exponential + place, programs.make_exponential(found))

    @triton.jit
    def _convert(words, exponential, count: tl.constexpr):
        place = tl.arange(0, count)
        word = tl.load(words + place).to(tl.uint32)
        tl.store(exponential + place, programs.make_exponential(word))


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al., Section 3.3 and its reference code, in integers of any size."""
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & MASK,
            (left >> 32) ^ counter[3] ^ key[1],
            left & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
"""philox4x32 10 of Random123's kat_vectors."""


@pytest.mark.parametrize(("counter", "key", "expected"), ANSWERS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox([torch.tensor([word]) for word in counter], [torch.tensor([word]) for word in key])
    assert [int(word) for word in found] == expected
    assert slow_philox(counter, key) == expected


def expect(key: int, step: int, purpose: int, block: int, code: int) -> int:
    return slow_philox([block, step, purpose, 0], [key & MASK, key >> 32])[code % 4]


@pytest.mark.parametrize(("tokens", "codes"), [(1, 9), (3, 4), (2, 6)])
def test_numbers_are_of_key_step_purpose_and_code(tokens: int, codes: int) -> None:
    found, blocks = draw_integers(KEYS, STEP, BITS, tokens, codes), -(-codes // 4)
    for (prompt, key), token, code in product(enumerate(KEYS.tolist()), range(tokens), range(codes)):
        assert found[prompt, token, code] == expect(key, 5, BITS, token * blocks + code // 4, code)


def test_pieces_are_the_whole() -> None:
    count = 4 * PIECE + 20
    alone = draw_integers(KEYS[:1], STEP, DRAW, 1, count)
    assert torch.equal(draw_integers(KEYS, STEP, DRAW, 1, count)[:1], alone)
    assert alone[0, 0, -1] == expect(int(KEYS[0]), 5, DRAW, (count - 1) // 4, count - 1)


def test_a_candidate_has_the_number_of_its_code() -> None:
    codes = torch.tensor([[8, 3, 0, 150_001], [1, 2, 3, 0], [8, 8, 8, 8]])
    found = draw_candidates(KEYS, STEP, codes)
    for (prompt, key), place in product(enumerate(KEYS.tolist()), range(4)):
        code = int(codes[prompt, place])
        assert found[prompt, place] == expect(key, 5, 4, code // 4, code)


EDGES = torch.tensor([0, 1, 2, 255, 2**20, 2**24 + 1, 2**28 - 1, 2**28, 2**31, 2**32 - 2**9, 2**32 - 1])


def exact_exponential(numbers: Tensor) -> Tensor:
    """-log(1 - u) in double precision, of the middles of 2^32 intervals of equal probability."""
    return -torch.log1p(-(numbers.double() + 0.5) / 2**32)


def test_variables_of_the_smallest_and_the_largest_integers() -> None:
    uniform = make_uniform(EDGES)
    assert uniform.min() > 0
    assert uniform.max() < 1
    torch.testing.assert_close(uniform.double(), (EDGES.double() + 0.5) / 2**32, rtol=2e-7, atol=0)
    small = EDGES[:-2]  # the last two are cut off at the largest number below 1
    found = make_exponential(EDGES)
    torch.testing.assert_close(found[:-2].double(), exact_exponential(small), rtol=1e-6, atol=0)
    assert found.isfinite().all()


@needs_triton
def test_a_program_has_the_same_integers() -> None:
    blocks = 64
    words = torch.empty(3, 4 * blocks, dtype=torch.int64, device=DEVICE)
    uniform, exponential = torch.empty(2, 3, 4 * blocks, device=DEVICE)
    _write[(3,)](KEYS.to(DEVICE), STEP.to(DEVICE), words, uniform, exponential, CODES, blocks)
    expected = draw_integers(KEYS, STEP, CODES, 1, 4 * blocks)[:, 0]
    assert torch.equal(words.cpu(), expected)
    assert torch.equal(uniform.cpu(), make_uniform(expected))
    torch.testing.assert_close(exponential.cpu(), make_exponential(expected), rtol=1e-6, atol=0)


@needs_triton
def test_a_program_has_the_same_variables_at_the_edges() -> None:
    numbers = torch.cat((EDGES[:-2], torch.arange(2**28 - 64, 2**28 + 64), torch.zeros(119).long()))
    found = torch.empty(256, device=DEVICE)
    _convert[(1,)](numbers.to(DEVICE), found, 256)
    torch.testing.assert_close(found.cpu().double(), exact_exponential(numbers), rtol=1e-6, atol=0)
