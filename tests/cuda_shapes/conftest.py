"""A GPU that is not there: kernels check what they are given, and nothing waits."""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine import padding, schedule
from kvbench.engine.layer import LayerStore
from kvbench.kernels.layout import Layout, Past, arrange_rows
from kvbench.models.base import FiniteCheck, TextFeatures
from tests.support.fake_device import CUDA, Device

pytest.importorskip("triton")

import kvbench.kernels.triton as programs
from benchmarks.support.triton_launches import replace_launches
from kvbench.kernels.triton import qk_norm_rope
from kvbench.kernels.triton.launch import align_rows

STATES = ("partial", "partial_lse", "state", "lse", "more_lse", "mass")
DTYPES = {
    **dict.fromkeys(STATES, torch.float32),
    **dict.fromkeys(("offsets", "key_offsets", "value_offsets", "stride", "filled"), torch.int64),
    **dict.fromkeys(("lengths", "order", "source", "token"), torch.int32),
}
"""By names of arguments, which are contiguous."""
WHOLE = ("past_keys", "past_values", "new_keys", "new_values", "joint", "rotation", "q_weight", "k_weight", "weight",
         "bias", "positions", "key_table", "value_table")  # fmt: skip
"""Further arguments that are contiguous."""
ALIKE = ("q", "k", "v", "past_keys", "past_values")
"""Arguments of one dtype of 16 bits."""


def check(name: str, kernel: Any, *given: Any, **settings: Any) -> None:
    """Tensors lie on the device, in the dtypes and the order in which the kernel reads them."""
    named = dict(zip(kernel.arg_names, given, strict=False)) | settings
    at = {key: getattr(x, "base", x) for key, x in named.items()}  # tensors of descriptors
    at = {key: x for key, x in at.items() if isinstance(x, Tensor)}
    assert {x.device for x in at.values()} == {CUDA}, name
    for key, x in at.items():
        assert x.dtype == DTYPES.get(key, x.dtype), (name, key)
        assert x.is_contiguous() or key not in (*DTYPES, *WHOLE), (name, key)
    assert {at[key].dtype for key in ALIKE if key in at} in (set(), {torch.bfloat16}, {torch.float16}), name
    match at:
        case {"past_keys": past, "q": q} if "slots" in named:
            rows = len(at["offsets"])
            assert len(past) * rows == q.shape[:2].numel()
        case {"source": source, "keys": keys, "k": k, "new_keys": moved}:
            assert moved.shape == (len(keys), len(source), keys.shape[2])
            for stored, present in ((keys, k), (at["values"], at["v"])):
                assert stored.untyped_storage()._cdata != present.untyped_storage()._cdata
        case {"joint": joint, "rotation": rotation, "q_weight": weight}:
            assert rotation is joint or rotation.shape == (named["tokens"], named["DIM"] // 2, 2)
            assert rotation is joint or rotation.dtype == torch.float32
            assert named["NORM"] != "unit" or weight.dtype == torch.float32
        case {"weight": weight, "bias": bias, "x": x}:
            assert weight.shape == bias.shape == (x.shape[1],)
            assert weight.dtype == bias.dtype
        case {"factor": factor, "shift": shift, "x": x}:
            assert factor.shape == shift.shape == (len(x), 1, x.shape[2])
            assert factor.stride(2) == shift.stride(2) == 1
        case {"gate": gate, "x": x}:  # halves of one product
            assert (gate.shape, gate.dtype) == (x.shape, x.dtype)
            assert gate.stride() == x.stride() == (2 * gate.shape[1], 1)
        case {"stream": stream, "x": x, "h": h, "weight": weight}:
            assert stream.shape == x.shape == h.shape
            assert (stream.dtype, weight.shape) == (x.dtype, x.shape[-1:])
            assert h.dtype == x.dtype


def check_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is as large as its layout says, and what launches are given needs no copy."""

    def align_in_place(x: Tensor) -> tuple[Tensor, list[int]]:
        found = align_rows(x)
        assert found[0] is x
        return found

    def view_whole(store: LayerStore) -> Past:
        assert store.keys.shape[1] == store.values.shape[1] == store.layout.capacity
        return Past(store.keys, store.values, store.layout)

    def check_joint(launch: Callable[..., Any], joint: Tensor, *given: Any) -> Any:
        assert joint.is_contiguous()
        return launch(joint, *given)

    for module in pkgutil.iter_modules(programs.__path__):
        monkeypatch.setattr(f"{programs.__name__}.{module.name}.align_rows", align_in_place, raising=False)
    monkeypatch.setattr(LayerStore, "past", property(view_whole))
    for launch in (qk_norm_rope.qk_norm_rope_triton, qk_norm_rope.grouped_norm_rope_triton):
        monkeypatch.setattr(qk_norm_rope, launch.__name__, partial(check_joint, launch))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Stands in for what needs numbers; how often each waits for the device."""
    check_storage(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Device())
    waits = {"text": 0, "finite": 0}

    def pad(text: TextFeatures, words: int) -> tuple[Tensor, Tensor]:
        waits["text"] += 1
        values = text.values.new_zeros(len(text.lengths), words, text.values.shape[1])
        return values, torch.empty(values.shape[:2], dtype=torch.bool, device=CUDA)

    def conclude(finite: FiniteCheck) -> None:
        assert {(maximum.device, maximum.shape[1:]) for maximum in finite._maxima} == {(CUDA, (1,))}
        waits["finite"] += 1

    monkeypatch.setattr(TextFeatures, "pad", pad)
    monkeypatch.setattr(FiniteCheck, "conclude", conclude)
    monkeypatch.setattr(Tensor, "pin_memory", lambda numbers: numbers)
    monkeypatch.setattr(
        "kvbench.models.noise.MIN_THREADED", 1 << 62
    )  # a second thread has tensors with numbers
    with replace_launches(check):
        yield waits


def keeping_all(
    layout: Layout,
    keep: Tensor | None,
    positions: Tensor,
    length: int,
    free_slots: int,
    counts: Sequence[int] | None = None,
) -> tuple[Layout, Tensor]:
    """In place of the real plan, which counts on the host what is kept."""
    rows = len(layout.counts)
    assert keep is None or (keep.shape, keep.dtype) == ((rows, layout.longest + length), torch.bool)
    assert keep is None or keep.device == CUDA
    counts = [layout.longest + length] * rows if counts is None else [*counts]
    positions = torch.empty(rows, max(counts), dtype=torch.int64, device=CUDA)
    after = arrange_rows(positions, counts, free_slots)
    return after, torch.empty(after.capacity, dtype=torch.int32, device=CUDA)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to what methods that look at data ask of values: everything is kept, `if x.any():` is not taken.

    Tensors made from values hold none: a fake tensor of one value keeps it, and copies it to the device for real.
    """
    for module in (schedule, padding):
        monkeypatch.setattr(module, "source_table", keeping_all)
    monkeypatch.setattr(schedule, "are_equal", lambda *_: False)
    find_any, as_bool = Tensor.any, Tensor.__bool__
    answers: dict[int, Tensor] = {}  # holds them, so that no later tensor has an id of theirs

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        found = find_any(x, *args, **options)
        return answers.setdefault(id(found), found)

    make = torch.tensor

    def make_empty(data: Any, *, device: Any = "cpu", **how: Any) -> Tensor:
        known = make(data, **how)
        return torch.empty(known.shape, dtype=known.dtype, device=device)

    with torch.device("cpu"):
        make([])  # torch lists its constructors once, for good, where a device is first chosen so
    monkeypatch.setattr(torch, "tensor", make_empty)
    monkeypatch.setattr(Tensor, "any", noted)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: id(x) not in answers and as_bool(x))
