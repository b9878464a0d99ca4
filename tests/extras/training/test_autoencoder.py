"""A codebook's start has a code for what is rare."""

import pytest
import torch
from torch.nn import functional as F

from kvbench.extras.training.autoencoder import find_codes


@pytest.mark.parametrize("sphere", [True, False])
def test_every_cluster_has_a_code_however_rare(sphere: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(12, 8, generator=rng) * torch.linspace(0.3, 3, 12)[:, None]
    if sphere:
        centres = F.normalize(centres, dim=1)
    sizes = [4000] + [3] * 11
    near = torch.cat([c.expand(n, -1) for c, n in zip(centres, sizes, strict=True)])
    vectors = near + 0.005 * torch.randn(near.shape, generator=rng)
    if sphere:
        vectors = F.normalize(vectors, dim=1)
    codes = find_codes(vectors, 24, rng, sphere=sphere)
    assert codes.shape == (24, 8)
    if sphere:
        torch.testing.assert_close(codes.norm(dim=1), torch.ones(24))
    assert (torch.cdist(centres, codes).amin(1) < 0.03).all()


def test_codes_are_the_means_of_what_they_stand_for() -> None:
    vectors = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 4.0]])
    codes = find_codes(vectors, 2, torch.Generator().manual_seed(0))
    expected = torch.tensor([[0.0, 1.0], [10.0, 2.0]])
    torch.testing.assert_close(codes[codes[:, 0].argsort()], expected)
