"""Search for the largest batch that fits."""

import pytest

from kvbench.profile.bench import find_largest


@pytest.mark.parametrize("known", [0, 1, 6, 8])
@pytest.mark.parametrize("limit", [0, 1, 8, 9, 37, 63, 64, 4095, 5000])
def test_largest_batch_is_found(known: int, limit: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    if known <= limit:
        assert find_largest(fits, known, limit=4500) == min(limit, 4500)
        assert len(set(tried)) == len(tried) <= 26
