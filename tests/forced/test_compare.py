"""Divergence, log-probability and likeliest token of predictions, beside their definitions in NumPy."""

from itertools import product

import numpy as np
import torch

from kvbench.forced.compare import BLOCK, compare_logits, compare_states, pack_bits, unpack_bits


def random_logits(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=rng) * 3, torch.randn(*shape, generator=rng) * 3


def probabilities(logits: torch.Tensor) -> np.ndarray:
    powers = np.exp(logits.double().numpy())
    return powers / powers.sum(-1, keepdims=True)


def test_distributions_are_compared_by_their_definitions() -> None:
    ours, full = random_logits(5, 11)
    tokens = torch.tensor([3, 0, 10, 7, 7])
    p, q = probabilities(ours), probabilities(full)
    masked = [
        torch.cat((x, torch.full((5, 1), -torch.inf)), 1) for x in (ours, full)
    ]  # a token that cannot come
    for found in (compare_logits(ours, full, tokens), compare_logits(*masked, tokens)):
        np.testing.assert_allclose(found["kl"], (q * np.log(q / p)).sum(-1), rtol=1e-5)
        np.testing.assert_allclose(found["nll"], -np.log(p[range(5), tokens]), rtol=1e-5)
        np.testing.assert_allclose(found["nll_full"], -np.log(q[range(5), tokens]), rtol=1e-5)
        assert found["likeliest"].tolist() == p.argmax(-1).tolist()
        assert found["likeliest_full"].tolist() == q.argmax(-1).tolist()


def test_bits_count_as_the_joint_distribution_of_their_tokens() -> None:
    ours, full = random_logits(6, 3, 2)
    bits = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]])
    classes = torch.tensor(list(product((0, 1), repeat=3)))

    def join(logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the 8 tokens of 3 independent bits."""
        each = logits.log_softmax(-1)
        return torch.stack([each[:, [0, 1, 2], row].sum(-1) for row in classes], -1)

    numbers = (bits * torch.tensor([4, 2, 1])).sum(-1)
    joint = compare_logits(join(ours), join(full), numbers)
    found = compare_logits(ours, full, bits.bool())
    for name in ("kl", "nll", "nll_full"):
        torch.testing.assert_close(found[name], joint[name])
    same = found["likeliest"] == found["likeliest_full"]
    assert torch.equal(same, joint["likeliest"] == joint["likeliest_full"])


def test_bits_are_packed_without_loss() -> None:
    bits = torch.randint(2, (7, 48), generator=torch.Generator().manual_seed(0)).bool()
    packed = pack_bits(bits)
    assert packed.dtype == torch.int64
    assert packed.max() >= 2**32
    assert torch.equal(unpack_bits(packed, 48), bits)


def test_states_are_compared_in_blocks_with_the_numbers_of_their_tokens() -> None:
    count = BLOCK + 3
    states, full = random_logits(count, 4)
    asked: list[int] = []

    def find_logits(x: torch.Tensor, number: int) -> torch.Tensor:
        asked.append(number)
        return x + number

    found = compare_states(states, full, torch.zeros(count).long(), find_logits)
    assert asked == [0, 0, BLOCK, BLOCK]
    tensors = {name: torch.from_numpy(column) for name, column in found.items()}
    torch.testing.assert_close(tensors, compare_logits(states, full, torch.zeros(count).long()))
