"""CriticalKV against kvpress."""

import pytest
import torch

from kvbench.methods.critical import choose_critical
from kvbench.methods.shared.grouped import choose_among_heads
from tests.support.evict_goldens import close_score, list_cases, load_case, mark


@pytest.mark.parametrize("case", list_cases("critical"))
def test_critical_of_kvpress(case: int) -> None:
    p, g = load_case("critical", case)
    score, norms = g["score"].flatten(0, 1), g["value_norm"].flatten(0, 1)
    count = torch.full((len(score),), p["n_kept"])
    kept = choose_critical(score, norms, count, p["first"], epsilon=p["eps"])
    assert torch.equal(kept, mark(g["critical_kept"].flatten(0, 1), p["N"]))
    second = g["critical_score"].flatten(0, 1)
    close_score(((score + p["eps"]) * norms)[second < 1e30], second[second < 1e30])
    if p["B"] == 1:
        even = choose_among_heads(score, p["n_kept"], p["Hk"], p["alpha"])
        assert torch.equal(even, g["ada_keep"][0])
        safe = torch.tensor(int(p["alpha"] * p["n_kept"]))
        kept = choose_critical(score, norms, even.sum(1), p["first"], epsilon=p["eps"], safe=safe)
        assert torch.equal(kept, g["critical_ada_keep"][0])
