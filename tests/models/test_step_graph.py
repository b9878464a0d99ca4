"""Steps that are recorded once per segment and repeated: the same tokens as one by one, whatever the method keeps."""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.graphs import GraphRecorder
from kvbench.core.segments import next_token_image
from kvbench.engine import plain
from kvbench.engine.cache import KVCache
from kvbench.kernels.decode_attention import DecodeRows, prepare_rows
from kvbench.kernels.layout import Past
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.image_loop import draw_image_tokens
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.noise import PromptNoise
from kvbench.models.qwen3.loop import draw_text_tokens
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3, Qwen3Config
from tests.support.engine import open_cache

CONFIG = LlamaGenConfig(
    depth=3, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=64, grid=(6, 6), classes=5
)
SAMPLING = LlamaGenSampling(cfg=2.0, top_k=0, top_p=0.9)


@lru_cache
def transformer() -> LlamaGen:
    torch.manual_seed(0)
    return LlamaGen(CONFIG).eval()


def decode(q: Tensor, k: Tensor, v: Tensor, past: Past, filled: Tensor, scale: float) -> Tensor:
    """The kernel in torch: only the device knows how many free slots are filled."""
    keys, values, layout = past
    slots = layout.offsets + layout.lengths + filled
    place = torch.arange(layout.longest + layout.free_slots)
    seen = place <= (layout.lengths + filled)[:, None]
    every = (layout.offsets[:, None] + place).clamp_(max=layout.capacity - 1).flatten()
    parts = []
    for storage, new in ((keys, k), (values, v)):
        storage.index_copy_(1, slots, new[:, :, 0])
        parts.append(storage.index_select(1, every).unflatten(1, seen.shape))
    scores = (q @ parts[0].mT * scale).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ parts[1]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token as on a GPU, but for who computes them."""
    pytest.importorskip("triton")

    def as_on_cuda(past: Past, filled: Tensor) -> DecodeRows:
        return prepare_rows(past, "kernel" if past.layout.longest else None, filled)

    monkeypatch.setattr("kvbench.kernels.triton.decode_attention.decode_attention_triton", decode)
    monkeypatch.setattr(plain, "prepare_rows", as_on_cuda)


def draw(
    method: Method, record: GraphRecorder | None = None, chunk: int | None = None
) -> tuple[Tensor, KVCache]:
    spec = CONFIG.describe("small", CONFIG.segments(CONFIG.condition, chunk), SAMPLING.branches)
    budget = 1 if isinstance(method, Full) else 18
    cache = open_cache(method, spec, budget, record=record)
    with torch.inference_mode():
        condition = transformer().cls_embedding(torch.tensor([1, 4]), guided=True)
    noise = PromptNoise(3, range(2))
    return draw_image_tokens(transformer(), condition, spec.segments, cache, noise, SAMPLING), cache


@pytest.mark.parametrize(
    "method",
    [Full(), HeadKV(sinks=1), H2O(sinks=1), SnapKV(sinks=1), StreamingLLM(sinks=1)],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize("chunk", [None, 9])
def test_recorded_steps_draw_alike(method: Method, chunk: int | None, request: pytest.FixtureRequest) -> None:
    plain, _ = draw(method, chunk=chunk)
    request.getfixturevalue("on_device")
    one_by_one, before = draw(method, chunk=chunk)
    tape = Tape()
    recorded, after = draw(method, tape, chunk)
    assert torch.equal(recorded, one_by_one)
    assert torch.equal(recorded, plain)
    assert after.ledger == before.ledger
    # Of a segment's steps all but the first and the last are repetitions of one record.
    lengths = after.spec.lengths[1:]
    assert tape.recorded == len(lengths)
    assert tape.repeated == sum(length - 2 for length in lengths)


@pytest.mark.usefixtures("on_device")
def test_recorded_steps_write_the_same_texts() -> None:
    """Prompts of unequal length, sampled; the padded prompt comes at once and is never recorded."""
    config = Qwen3Config(
        depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=30, tied=True
    )
    torch.manual_seed(1)
    network = Qwen3(config).eval()
    spec = config.describe("text", next_token_image(5, 25, 8), 1)
    texts = []
    for record in (None, tape := Tape()):
        cache = open_cache(H2O(sinks=1), spec, 14, record=record)
        with torch.inference_mode():
            prompts = network.embed(torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 1]]))
        noise, sampling = PromptNoise(3, range(2)), TextSampling(temperature=1.0)
        texts.append(
            draw_text_tokens(
                network, prompts, spec.segments, cache, noise, sampling, ends=[2], pad=0, padding=[2, 0]
            ).rows()
        )
    assert texts[0] == texts[1]
    assert tape.recorded > 0


def test_segments_too_short_to_record_run_as_they_are() -> None:
    plain, _ = draw(Full(), chunk=2)
    tape = Tape()
    recorded, _ = draw(Full(), tape, chunk=2)
    assert torch.equal(recorded, plain)
    assert tape.recorded == 0


@pytest.mark.usefixtures("on_device")
def test_the_model_runs_three_times_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [], transformer().forward
    monkeypatch.setattr(transformer(), "forward", lambda *given: calls.append(given) or forward(*given))
    draw(Full(), Tape())
    assert len(calls) == 1 + 3 * 6
