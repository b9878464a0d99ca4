"""Rows of unequal length by torch's variable-length attention, replaced by a slow function that checks its inputs."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.cuda_branches import attend_slowly
from kvbench.kernels import varlen_attention as varlen
from kvbench.kernels.attention_paths import LIBRARIES
from kvbench.kernels.layout import Past, arrange_rows, empty_layout, list_free_slots
from kvbench.kernels.varlen_attention import Library, tabulate_rows, varlen_attention
from tests.support.fake_device import CUDA, faked
from tests.support.ragged_rows import CASES, check, make


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "find_varlen", lambda: attend_slowly)


@given(**CASES, library=st.sampled_from(sorted(LIBRARIES.values())))
@settings(max_examples=60, deadline=None)
def test_rows_come_as_sequences(library: Library, **given: Any) -> None:
    case = make(**{**given, "device": "cpu", "dtype": torch.float32})
    found = varlen_attention(case.q, case.stored, 0.3, library)
    assert found[1].is_contiguous()
    check(found, case._replace(k=case.k[:, :, :0], v=case.v[:, :, :0]), 0.3)


@pytest.mark.parametrize("batch", [1, 3])
def test_free_slots_lie_between_rows(batch: int) -> None:
    """What they hold is not read."""
    case = make(batch, [5, 0, 9, 5], 1, 6, 16, free_slots=3, device="cpu")
    for stored in case.stored[:2]:
        stored[:, list_free_slots(case.layout, 0, 3).flatten()] = torch.nan
    found = varlen_attention(case.q, case.stored, 0.3, "flash")
    check(found, case._replace(k=case.k[:, :, :0], v=case.v[:, :, :0]), 0.3)


def test_cudnn_plans_for_powers_of_two() -> None:
    for longest, told in ((1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)):
        layout = arrange_rows(torch.zeros(1, longest, dtype=torch.int64), [longest])
        past = Past(torch.empty(1, longest, 8), torch.empty(1, longest, 8), layout)
        assert (tabulate_rows(past, 1, "cudnn").max_k, tabulate_rows(past, 1, "fa3").max_k) == (told, longest)


def test_of_no_slots_no_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "find_varlen", lambda: pytest.fail("called"))
    nothing = torch.empty(1, 0, 16)
    past = Past(nothing, nothing, empty_layout(2, "cpu"))
    out, lse = varlen_attention(torch.randn(1, 2, 3, 16), past, 1.0, "fa3")
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("library", sorted(LIBRARIES.values()))
def test_the_installed_torch_takes_the_arguments(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own description of its operation; `flash` and `fa3` are told not to divide keys, cuDNN is not."""
    monkeypatch.undo()
    attend = varlen.find_varlen()
    if attend is None:
        pytest.skip("this torch has no variable-length attention with lengths")
    taken = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(attend).bind(*args, **kwargs)
        taken.append(kwargs)
        return attend(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen._cudnn_rejection_reasons", lambda *_: [])
    monkeypatch.setattr(varlen, "find_varlen", lambda: watch)
    case = make(2, [3, 0, 4], 2, 5, 64, dtype=torch.bfloat16, device="cpu")
    with FakeTensorMode():
        q, past = faked(case.q), Past(*map(faked, case.stored[:2]), case.layout._replace(
            **{name: faked(getattr(case.layout, name)) for name in ("offsets", "lengths", "order", "places")}
        ))  # fmt: skip
        out, lse = varlen_attention(q, past, 0.3, library)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, CUDA)
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == (q.shape[:3], torch.float32, True)
    assert [one.get("num_splits") for one in taken] == [None if library == "cudnn" else 1]
    assert "block_table" not in taken[0]
