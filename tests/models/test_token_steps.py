"""Steps of a generation that repeat one recording: the same tokens as one by one, whatever the method keeps."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.segments import next_token_image
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.noise import Kind, make_noise
from kvbench.models.parts import text_sampling as sampling_module
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.token_loop import ImageHead, TextHead, draw_tokens
from tests.support.engine import open_cache
from tests.support.steps import KERNEL, decode

CONFIG = LlamaGenConfig(
    depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=64, grid=(4, 4), classes=5
)
SAMPLING = LlamaGenSampling(cfg=2.0, top_k=0, top_p=0.9)


@lru_cache
def transformer() -> LlamaGen:
    torch.manual_seed(0)
    return LlamaGen(CONFIG).eval()


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one-token kernel of recorded steps."""
    pytest.importorskip("triton")
    monkeypatch.setattr(KERNEL, decode)


def open_image_cache(
    method: Method, record: GraphRecorder | None = None, chunk: int | None = None
) -> KVCache:
    spec = CONFIG.describe("small", CONFIG.segments(CONFIG.condition, chunk), SAMPLING.branches)
    return open_cache(method, spec, 1 if isinstance(method, Full) else 8, record=record)


def draw(
    cache: KVCache,
    labels: tuple[int, ...] = (1, 4),
    sampling: LlamaGenSampling = SAMPLING,
    forbidden: Callable[[int], Tensor] | None = None,
    kind: Kind = "stream",
) -> Tensor:
    with torch.inference_mode():
        condition = transformer().cls_embedding(torch.tensor(labels), guided=True)
    noise, segments = make_noise(kind, sum(labels), range(len(labels)), "cpu"), cache.spec.segments
    head = ImageHead(sampling, forbidden)
    return draw_tokens(transformer(), condition, segments, cache, noise, head).tokens


@pytest.mark.parametrize(
    "method",
    [Full(), HeadKV(sinks=1), H2O(sinks=1), SnapKV(sinks=1)],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize(("chunk", "kind"), [(None, "stream"), (4, "counter")])
def test_recorded_steps_draw_alike(method: Method, chunk: int | None, kind: Kind) -> None:
    plain, recorded = open_image_cache(method, None, chunk), open_image_cache(method, tape := Tape(), chunk)
    steps = sum(plain.spec.lengths[1:])
    for generation, labels in enumerate(((1, 4), (0, 2))):
        assert torch.equal(draw(recorded, labels, kind=kind), draw(plain, labels, kind=kind))
        if not isinstance(method, Full):  # which grows in place
            assert recorded.ledger == plain.ledger
        # The first step of all is run as it is, the second one recorded; all others repeat it.
        assert (tape.recorded, tape.repeated) == (1, (generation + 1) * steps - 1)


EVEN = torch.arange(CONFIG.vocabulary) % 2 == 0
RECORDED: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any], int | None, int]] = {
    "a smaller batch": (((1, 4, 2), (3,), (0, 2, 1), (4,)), {}, None, 2),
    "guidance that ends": (((1, 4),), {"sampling": replace(SAMPLING, cfg_interval=10)}, None, 2),
    "forbidden codes": (((1, 4),), {"forbidden": lambda number: EVEN if number % 3 else ~EVEN}, None, 1),
    "segments of a token": (((1, 4),), {}, 1, 1),
}
"""Classes of batches, settings of the draw, tokens of a segment, and recordings."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_step_does_not_read_has_a_recording_of_its_own(name: str) -> None:
    batches, more, chunk, count = RECORDED[name]
    plain, recorded = open_image_cache(Full(), None, chunk), open_image_cache(Full(), tape := Tape(), chunk)
    for labels in batches:
        found = draw(recorded, labels, **more)
        assert torch.equal(found, draw(plain, labels, **more))
        if "forbidden" in more:
            assert (found % 2 == (torch.arange(found.shape[1]) % 3 > 0)).all()
    assert tape.recorded == count


@pytest.mark.parametrize(
    ("method", "temperature", "kind"),
    [(Full(), 8.0, "stream"), (H2O(sinks=1), 8.0, "counter"), (HardKV(sinks=1), 0.0, "stream")],
    ids=["full", "h2o", "hardkv"],
)
def test_recorded_steps_write_the_same_texts(
    method: Method, temperature: float, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of unequal length; the padded prompt comes at once and is never recorded."""
    # As on a GPU.
    monkeypatch.setattr(sampling_module, "_count_candidates", lambda logits, *_: logits.shape[-1])
    config = Qwen3Config(
        depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=30, tied=True
    )
    torch.manual_seed(1)
    network = TextDecoder(config).eval()
    spec = config.describe("text", next_token_image(5, 25, 8), 1)
    tape, budget = Tape(), 1 if isinstance(method, Full) else 14
    caches = [open_cache(method, spec, budget, record=record) for record in (None, tape)]
    texts = []
    for seed in range(3):
        for cache in caches:
            with torch.inference_mode():
                prompts = network.embed(torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8 + seed, 9, 1]]))
            noise, head = make_noise(kind, seed, range(2), "cpu"), TextHead(TextSampling(temperature), [2], 0)
            written = draw_tokens(network, prompts, spec.segments, cache, noise, head, padding=[2, 0])
            texts.append(written.rows())
        assert texts[-1] == texts[-2]
    assert tape.recorded == 1
    if temperature:
        assert texts[1] != texts[3] != texts[5]
