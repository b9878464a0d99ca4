"""Checks of what Triton kernels are given, in place of launches: tensors without numbers on a simulated GPU."""

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench.kernels.triton as programs
from kvbench.engine.layer import LayerStore
from kvbench.kernels.layout import Past
from kvbench.kernels.triton import qk_norm_rope
from kvbench.kernels.triton.launch import align_rows
from tests.support.fake_device import CUDA

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
