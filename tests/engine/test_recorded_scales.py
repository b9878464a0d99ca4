"""Lengths of rows that a recording takes from `capacity`, against those that the method leaves."""

from dataclasses import dataclass

import pytest

from benchmarks.support.tape import Tape
from kvbench.core.segments import Segment
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.hook_results import WrongTensor
from tests.support.engine import open_cache, run, small, tokens_of


@dataclass
class Claiming(H2O):
    """Keeps what fits into the budget and says another capacity."""

    said: int = 0

    def capacity(self, layer: int, segment: Segment) -> int:
        return self.said


@pytest.mark.parametrize("said", [7, 8, 9])
def test_rows_of_another_length_than_capacity_are_refused(said: int) -> None:
    """A head has 1, 5 and 14 tokens after the three cached scales, and 8 of them fit."""
    spec = small()
    cache, inputs = open_cache(Claiming(said=said), spec, "8", record=Tape()), tokens_of(spec, 2)
    if said == 8:
        run(cache, inputs)
        return
    told = f"method Claiming: layer 0, segment 2: keep left 8 slots in row 0 and capacity says {said}; "
    with pytest.raises(WrongTensor, match=f"^{told}let capacity return None"):
        run(cache, inputs)
