"""Attentions over parts of the keys, against softmax attention over all of them in double precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.attention_states import merge_states
from tests.support.triton_device import DEVICE, needs_loops

QUERIES, D = 3, 8


def state_of(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the chosen keys alone, [1, 1, QUERIES, D], and its log-sum-exp."""
    if not chosen.any():
        return torch.zeros(1, 1, QUERIES, D), torch.full((1, 1, QUERIES), -torch.inf)
    scores = q.double() @ k[chosen].double().T
    out = scores.softmax(-1) @ v[chosen].double()
    return out.float()[None, None], scores.logsumexp(-1).float()[None, None]


def states_of(seed: int, owners: list[int], sets: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """The states of `sets` parts, and attention over all keys with its log-sum-exp; `owners` says whose a key is."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=generator) for n in (QUERIES, len(owners), len(owners)))
    q *= D**-0.5
    belongs = torch.tensor(owners)
    every = state_of(q, k, v, torch.ones(len(owners), dtype=torch.bool))
    return [state_of(q, k, v, belongs == part) for part in range(sets)], *every


def merged(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return merge_states(torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states]))


@given(seed=st.integers(0, 999), owners=st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_any_partition_gives_full_attention(seed: int, owners: list[int]) -> None:
    """Parts without keys are among them, the last one always."""
    states, out, lse = states_of(seed, owners, 6)
    for order in (states, states[::-1]):
        found, sums = merged(order)
        torch.testing.assert_close(found, out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sums, lse, atol=1e-6, rtol=1e-6)
    first = merged([merged(states[:2]), *states[2:4]])
    found, _ = merged([first, merged(states[4:])])
    torch.testing.assert_close(found, out, atol=1e-6, rtol=1e-6)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    states, _, _ = states_of(0, [0], 3)
    out, lse = merged(states[1:])
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = merged([states[0], states[1]])
    assert torch.equal(out, states[0][0])
    assert torch.equal(lse, states[0][1])


@needs_loops
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_kernel_merges_alike() -> None:
    from kvbench.kernels.triton.softmax import merge_shares

    states, out, lse = states_of(1, [0, 0, 2, 1, 2, 2, 0], 4)
    outputs, sums = (torch.stack(parts).to(DEVICE) for parts in zip(*states, strict=True))
    found = torch.empty_like(outputs[0])
    torch.testing.assert_close(merge_shares(outputs, sums, found).cpu(), lse)
    torch.testing.assert_close(found.cpu(), out)
    nothing = merge_shares(outputs[3:], sums[3:], found)
    assert (nothing == -torch.inf).all()
    assert not found.any()
