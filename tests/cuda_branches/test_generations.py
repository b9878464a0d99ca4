"""Whole generations on CUDA branches, with interpreted Triton kernels, against a CPU."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.build import prepare_method
from benchmarks.support.cuda_branches import on_cuda_branches
from benchmarks.support.triton_launches import replace_launches
from kvbench.core.storage import StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.ledger import Ledger
from kvbench.kernels.attention_paths import Path
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from tests.support import reference_emu3, reference_janus, reference_lumina
from tests.support.engine import open_cache, run, small, tokens_of
from tests.support.marks import slow_except
from tests.support.methods import mark_by_kind, methods_for
from tests.support.scale_models import SPEC, Draw, infinity, var
from tests.support.small_models import SMALL_QWEN3, SMALL_TOKENIZER, load, ready, shrink
from tests.support.triton_device import needs_loops

pytestmark = needs_loops

LLAMAGEN = shrink("llamagen_b", *SMALL_TOKENIZER, heads=2, vocabulary=128, grid=[3, 4], classes=10)
WRITER = (*SMALL_QWEN3, "model.max_tokens=24")
TOKENS = {
    "llamagen": (LLAMAGEN, "3"),
    "janus": (reference_janus.SMALL, "a red circle"),
    "lumina": (reference_lumina.SMALL, "a red circle"),
    "emu3": (reference_emu3.SMALL, "a red circle"),
    "qwen3": (WRITER, "a red circle"),
}
"""Next-token models: overrides and a prompt."""
FAMILIES = tuple(TOKENS)
TOKENS["fewer tokens"] = ((*LLAMAGEN, "model.transformer.grid=[3,3]", "model.tokenizer.widths=[32]"), "3")
"""For methods, whose caches see nothing of the decoder: LlamaGen with three rows of three tokens."""
FITTING = {"scale_groups": ("method.condensed=1", "method.local=1")}
"""Settings of methods that want more than four scales."""


def list_counts(ledger: Ledger) -> dict[str, Any]:
    """The ledger without what depends on where attention is computed: storage that exists twice, copies in flight."""
    ledger.read_unprotected(heads=1)
    told = dict(vars(ledger))
    return {key: value for key, value in told.items() if key not in ("transient_bytes", "rebuild_bytes")}


@lru_cache
def model(family: str) -> Any:
    return load(*TOKENS[family][0])


def generate(family: str, name: str) -> tuple[Any, Ledger]:
    """What a next-token model makes of its prompt under a method of `conf/method`, and the ledger."""
    one, (overrides, prompt) = model(family), TOKENS[family]
    method = ready(name, one.spec, "1" if name == "full" else "0.6", overrides)
    cache = KVCache(one.spec, method, dtype=torch.float32, rotation=one.key_rotation())
    return one.generate([prompt], cache, PromptNoise(0, (0,))), cache.ledger


def draw_scales(draw: Draw, name: str) -> tuple[Tensor, Ledger]:
    """What a small next-scale model draws under a method, and the ledger."""
    overrides = ["model=infinity_tiny", f"method={name}", *FITTING.get(name, ())]
    cache = KVCache(SPEC, prepare_method(SPEC, "0.6", overrides), dtype=torch.float32)
    return draw(cache, 1, 3), cache.ledger


def check_texts_or_images(family: str, name: str, path: Path = "kernel") -> None:
    expected, ledger = generate(family, name)
    with on_cuda_branches(path):
        found, told = generate(family, name)
    if isinstance(expected, Tensor):
        assert (found.int() - expected.int()).abs().max() <= 1
    else:
        assert found == expected
    assert list_counts(told) == list_counts(ledger)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "path"), [*product(FAMILIES, ("kernel",)), ("qwen3", "parts")])
def test_every_next_token_family(family: str, path: Path) -> None:
    check_texts_or_images(family, "h2o", path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hard_kv", "hard_kv/rkv_calibrated"])
def test_hard_kv_on_texts(name: str) -> None:
    check_texts_or_images("qwen3", name)


def test_programs_are_interpreted() -> None:
    """So that what follows compares two ways, and not one with itself."""
    launched: Counter[str] = Counter()
    with replace_launches(lambda name, *_, **__: launched.update([name])), on_cuda_branches():
        run(open_cache(StreamingLLM(sinks=1), small(), 0.6), tokens_of(small(), 2, seed=5))
    assert {"attention_kernel", "copy_kernel"} <= launched.keys(), launched


@pytest.mark.parametrize("name", mark_by_kind(methods_for("next-token")))
def test_methods_of_next_token_models(name: str) -> None:
    check_texts_or_images("fewer tokens", name)


def check_scales(model: Callable[[], Draw], name: str, path: Path = "kernel") -> None:
    draw = model()
    expected, ledger = draw_scales(draw, name)
    with on_cuda_branches(path):
        found, told = draw_scales(draw, name)
    torch.testing.assert_close(found, expected)
    assert list_counts(told) == list_counts(ledger)


@pytest.mark.parametrize(
    ("model", "path"),
    slow_except((infinity, "kernel").__eq__, product((infinity, var), ("kernel", "parts", "varlen_cudnn"))),
)
def test_every_next_scale_family(model: Callable[[], Draw], path: Path) -> None:
    check_scales(model, "heatkv", path)


@pytest.mark.parametrize("name", mark_by_kind(methods_for("next-scale")))
def test_methods_of_next_scale_models(name: str) -> None:
    check_scales(infinity, name)


@pytest.mark.parametrize(
    "packing",
    slow_except(
        Packing(8, StorageConfig()).__eq__,
        [
            *(Packing(bits, StorageConfig()) for bits in (8, 4, 3, 2)),
            Packing(4, StorageConfig("token")),
            Packing(2, StorageConfig(residual=4)),
            Packing(8, StorageConfig("token"), fp8=True),
            Packing(3, StorageConfig("fp8", "rotated")),
            Packing(4, StorageConfig("rotated", "rotated", before_rotation=False, value_bits=2)),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "method",
    [H2O(), *(pytest.param(one, marks=pytest.mark.nightly) for one in (Full(), StreamingLLM(sinks=1)))],
    ids=["H2O", "Full", "StreamingLLM"],
)
def test_every_form_of_storage(packing: Packing, method: Method) -> None:
    """Codes are read in place; on a CPU they are decoded first."""
    spec = small(layers=2, heads=2, sides=(1, 2, 3, 4))
    inputs = tokens_of(spec, 2, seed=5)

    def attend() -> tuple[list[Tensor], Ledger]:
        cache = open_cache(method, spec, 1 if isinstance(method, Full) else 0.6, packing=packing)
        return run(cache, inputs), cache.ledger

    expected, ledger = attend()
    with on_cuda_branches():
        found, told = attend()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert list_counts(told) == list_counts(ledger)
