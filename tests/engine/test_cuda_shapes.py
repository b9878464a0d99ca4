"""Generations on a GPU that is not there: tensors without numbers tell whether devices mix or the host must wait.

Triton kernels are replaced by checks of what they are given. Real sizes but two layers.
"""

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.core.budget import Budget
from kvbench.engine import cache as cache_module
from kvbench.engine import padding as padded
from kvbench.engine import schedule as schedule_module
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import build_schedule
from kvbench.kernels.layout import Layout, Past, arrange_rows
from kvbench.kernels.triton.launch import align_rows
from kvbench.methods.base import Method, Observer
from kvbench.models.base import FiniteCheck, TextFeatures
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.var.tokenizer import VQVAE
from kvbench.models.var.transformer import VAR
from kvbench.runs import calibrate as calibration
from tests.support.fake_device import CUDA, faked
from tests.support.methods import methods_for
from tests.support.places import ROOT

pytest.importorskip("triton")

METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
QUICK = ("hackpp", "headkv", "heatkv", "pricekv", "snapkv")
"""Methods of each way of choosing; `make test` leaves out the others."""
MODELS = ("infinity_2b", "infinity_8b", "var_d30", "var_d36")
WORDS = (3, 5)


def mark_others_slow(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


class FakeNoise:
    """Numbers on the CPU, as real ones are."""

    def draw(self, count: int) -> Tensor:
        return torch.empty(len(WORDS), count)


class FakeText:
    """Features on the device."""

    def __init__(self, width: int) -> None:
        self._width = width

    def encode(self, prompts: list[str]) -> TextFeatures:
        return TextFeatures(torch.empty(sum(WORDS), self._width, device=CUDA), WORDS)


def on_cuda(*tensors: Tensor) -> None:
    assert all(tensor.device == CUDA for tensor in tensors)


def in_layout(layout: Layout, past: Tensor) -> None:
    on_cuda(layout.offsets, layout.lengths, layout.order)
    assert (layout.offsets.dtype, layout.lengths.dtype) == (torch.int64, torch.int32)
    assert past.shape[1] == layout.capacity
    assert past.is_contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, **_: object
) -> tuple[Tensor, Tensor]:
    keys, values, layout = past
    on_cuda(q, k, v, keys, values)
    in_layout(layout, keys)
    assert q.dtype == k.dtype == v.dtype == keys.dtype == values.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert len(keys) * len(layout.counts) == q.shape[:2].numel() == k.shape[:2].numel()
    for x in (q, k, v):
        assert align_rows(x)[0] is x  # not copied
    if q.stride(1) < q.stride(2):
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    else:
        out = q.new_empty(q.shape)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def past_attention(
    q: Tensor,
    past: Past,
    scale: float,
    *,
    state: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    assert state is not None
    out, lse = attention(q, q, q, past, scale)
    assert (out.shape, out.dtype, out.stride()) == (state[0].shape, state[0].dtype, state[0].stride())
    assert (lse.shape, lse.dtype, lse.stride()) == (state[1].shape, state[1].dtype, state[1].stride())
    return state


def merge_pair(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    on_cuda(out, lse, more, more_lse)
    assert (out.shape, lse.shape) == (more.shape, more_lse.shape)
    assert lse.is_contiguous()
    assert more_lse.is_contiguous()


def mass(
    q: Tensor,
    k: Tensor,
    past: Past,
    scale: float,
    *,
    power: int = 1,
    lse: Tensor | None,
    tokens: Tensor | None,
) -> Tensor:
    keys, _, layout = past
    on_cuda(q, k, keys)
    in_layout(layout, keys)
    assert tokens is None
    assert lse is None or (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert lse is None or lse.is_contiguous()
    return q.new_empty(len(keys), len(layout.counts), layout.longest + k.shape[2], dtype=torch.float32)


def rebuild(
    stored: tuple[Tensor, ...], current: tuple[Tensor, ...], source: Tensor, out: tuple[Tensor, ...]
) -> None:
    on_cuda(*stored, *current, source, *out)
    assert source.dtype == torch.int32
    for storage, present, moved in zip(stored, current, out, strict=True):
        assert align_rows(present)[0] is present
        assert moved.shape == (storage.shape[0], len(source), storage.shape[2])
        assert len({x.untyped_storage()._cdata for x in (storage, present)}) == 2


def modulate(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    on_cuda(x, factor, shift)
    assert factor.stride(-1) == shift.stride(-1) == 1
    assert factor.shape == shift.shape == (x.shape[0], 1, x.shape[2])
    return x.new_empty(x.shape, dtype=dtype)


def norm_rope(
    qkv: Tensor, lengths: Tensor, rotation: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    on_cuda(qkv, lengths, *([] if rotation is None else [rotation]))
    _, tokens, _, heads, channels = qkv.shape
    assert qkv.is_contiguous()
    assert (lengths.shape, lengths.dtype) == ((2, heads), torch.float32)
    assert lengths.is_contiguous()
    if rotation is not None:
        assert (rotation.shape, rotation.dtype) == ((tokens, channels // 2), torch.complex64)
        assert rotation.is_contiguous()
    return tuple(qkv.permute(2, 0, 3, 1, 4))


def in_half(model: Any) -> None:
    """Blocks' parameters in fewer bits, as `load` leaves them."""
    exact = ("scale_mul_1H11", "ada_gss") if model.name.startswith("var") else ()
    for block in model._transformer.layers:
        for owner in block.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                dtype = torch.float32 if name in exact else model.compute_dtype(CUDA)
                owner._parameters[name] = nn.Parameter(parameter.to(dtype))


def loaded(name: str, configuration: Any) -> Any:
    """A model of two layers, loaded."""
    overrides = [f"model={name}", "model.transformer.depth=2"]
    overrides += ["model.transformer.block_chunks=1"] if name.startswith("infinity") else []
    model = configuration.built(configuration.composed(overrides)["model"])
    with torch.device(CUDA):
        if name.startswith("var"):
            model._transformer, model._tokenizer = VAR(model.transformer), VQVAE(model.tokenizer)
        else:
            model._transformer, model._tokenizer = Infinity(model.transformer), BSQ(model.tokenizer)
            model._text = FakeText(model.transformer.text_width)
    in_half(model)
    model._device = CUDA
    return model


def prepared(name: str, model: Any, configuration: Any) -> Method:
    method = configuration.built(configuration.composed([f"method={name}", f"model={model.name}"])["method"])
    needs = method.needs()
    artifact = needs.make_stand_in(model.spec) if isinstance(needs, Observer) else None
    method.prepare(model.spec, Budget.parse(1 if name == "full" else 0.2, model.spec), artifact)
    return method


def keeping_all(
    layout: Layout, keep: Tensor | None, start: int, length: int, free_slots: int
) -> tuple[Layout, Tensor]:
    """In place of the real plan, which counts on the host what is kept."""
    rows = len(layout.counts)
    assert keep is None or (keep.shape, keep.dtype) == ((rows, layout.longest + length), torch.bool)
    assert keep is None or keep.device == CUDA
    counts = [layout.longest + length] * rows
    positions = torch.empty(rows, counts[0], dtype=torch.int64, device=CUDA)
    after = arrange_rows(positions, counts, free_slots)
    return after, torch.empty(after.capacity, dtype=torch.int32, device=CUDA)


@pytest.fixture
def configuration() -> Any:
    return importlib.import_module("benchmarks.support.build")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stands in for what needs numbers; how often each waits for the device."""
    kernels = {
        "ragged_attention": attention, "past_attention": past_attention,
        "attention_mass": mass, "modulate": modulate, "qk_norm_rope": norm_rope,
    }  # fmt: skip
    for name, fake in kernels.items():
        monkeypatch.setattr(f"kvbench.kernels.triton.{name}.{name}_triton", fake)
    monkeypatch.setattr("kvbench.kernels.triton.compact.rebuild_triton", rebuild)
    monkeypatch.setattr("kvbench.kernels.triton.softmax.merge_pair_triton", merge_pair)
    device = SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    waits = {"text": 0, "finite": 0}

    def pad(text: TextFeatures, words: int) -> tuple[Tensor, Tensor]:
        waits["text"] += 1
        values = text.values.new_zeros(len(text.lengths), words, text.values.shape[1])
        return values, torch.empty(values.shape[:2], dtype=torch.bool, device=CUDA)

    def conclude(check: FiniteCheck) -> None:
        on_cuda(*check._worst)
        assert {worst.shape[1:] for worst in check._worst} == {(1,)}
        waits["finite"] += 1

    monkeypatch.setattr(TextFeatures, "pad", pad)
    monkeypatch.setattr(FiniteCheck, "conclude", conclude)
    monkeypatch.setattr(Tensor, "pin_memory", lambda numbers: numbers)
    return waits


def generated(model: Any, method: Method) -> None:
    cache = KVCache(model.spec, method, dtype=model.compute_dtype(CUDA), device=CUDA)
    prompts = ["1 a", "2 b"]
    images = model.generate(prompts, cache, FakeNoise())
    assert (images.shape[0], images.dtype, images.device.type) == (2, torch.uint8, "cpu")


@pytest.mark.parametrize("method", ["full", "heatkv"])
@pytest.mark.parametrize("name", MODELS)
def test_a_generation_waits_for_nothing_but_its_checks(
    name: str, method: str, configuration: Any, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded(name, configuration)
    chosen = prepared(method, model, configuration)
    schedule = build_schedule(model.spec, chosen)
    monkeypatch.setattr(
        cache_module,
        "build_schedule",
        lambda *_: {at: faked(change) for at, change in schedule.items()},
    )
    with mode:
        generated(model, chosen)
    assert gpu == {"text": int(name.startswith("infinity")), "finite": 1}


def answer_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `if x.any():` take its other branch, since a tensor without numbers has no answer."""
    find_any, as_bool = Tensor.any, Tensor.__bool__
    answers: dict[int, Tensor] = {}  # holds them, so that no later tensor has an id of theirs

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        found = find_any(x, *args, **options)
        return answers.setdefault(id(found), found)

    monkeypatch.setattr(Tensor, "any", noted)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: id(x) not in answers and as_bool(x))


@pytest.mark.parametrize("name", mark_others_slow(methods_for("next-scale")))
def test_methods_look_at_a_gpu(name: str, configuration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "source_table", keeping_all)
    monkeypatch.setattr(
        schedule_module, "are_equal", lambda *_: False
    )  # waits too, before anything is generated
    answer_no(monkeypatch)  # AMS-KV asks whether layers are undecided, and waits
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded("infinity_2b", configuration)
    chosen = prepared(name, model, configuration)
    monkeypatch.setattr(chosen, "strict", False)
    with mode:
        generated(model, chosen)


@pytest.mark.slow
def test_calibrations_look_at_a_gpu(configuration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "source_table", keeping_all)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded("infinity_2b", configuration)
    composed = (configuration.composed([f"method={name}"])["method"] for name in METHODS)
    needs = [configuration.built(settings).needs() for settings in composed]
    watching = calibration._Watching([need for need in needs if isinstance(need, Observer)])
    watching.prepare(model.spec, Budget.parse(1, model.spec))
    with mode:
        generated(model, watching)


@pytest.mark.parametrize("name", mark_others_slow(methods_for("next-token")))
def test_padded_prompts_lie_on_a_gpu(name: str, configuration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_no(monkeypatch)
    monkeypatch.setattr(
        "kvbench.kernels.triton.attention_mass.attention_mass_triton",
        lambda *given, tokens, **settings: mass(*given, **settings, tokens=on_cuda(tokens)),
    )
    overrides = ["model=janus_pro_1b", "model.transformer.depth=2", "model.prompt_tokens=20"]
    model = configuration.built(configuration.composed(overrides)["model"])
    chosen, spec = prepared(name, model, configuration), model.spec
    monkeypatch.setattr(chosen, "strict", False)
    schedule = build_schedule(spec, chosen) if chosen.static else {}
    monkeypatch.setattr(
        cache_module,
        "build_schedule",
        lambda *_: {at: faked(change) for at, change in schedule.items()},
    )
    for module in (schedule_module, padded):
        monkeypatch.setattr(module, "source_table", keeping_all)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = KVCache(spec, chosen, dtype=torch.bfloat16, device=CUDA)
        cache.reset(4, [0, 7, 0, 7])
        for segment in spec.segments[:3]:
            cache.begin(segment)
            shape = (3, 4, spec.heads, segment.length, spec.head_dim)
            for layer in range(spec.layers):
                q, k, v = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
                out = cache.attend(layer, q, k, v, lambda q=q: q)
                assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, CUDA)


def test_the_plain_loop_looks_at_a_gpu(configuration: Any) -> None:
    plain = importlib.import_module("benchmarks.support.plain_loop")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = plain.plain_loop(loaded("infinity_2b", configuration))
    with mode:
        images = model.generate(["a", "b"], plain.PlainCache(), FakeNoise())
    assert images.shape == (2, 1024, 1024, 3)
