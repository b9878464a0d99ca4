"""Benchmark of next-token models: the official loop draws LlamaGen's tokens."""

import pytest
import torch

from benchmarks import llamagen_loop as loop
from kvbench.models.llamagen.sampling import LlamaGenSampling
from tests.support.reference_llamagen import golden, meta, transformer


def test_the_official_loop_draws_the_official_tokens() -> None:
    model, expected = transformer("c2i"), golden("c2i")
    sampling = LlamaGenSampling(cfg=meta()["runs"]["c2i.greedy"]["cfg_scale"], top_k=1)
    condition = model.cls_embedding(expected["cond"].long(), guided=True)
    tokens = loop.OfficialLoop(model, sampling).generate(condition)
    assert torch.equal(tokens, expected["greedy.tokens"])


@pytest.mark.nightly
def test_the_compiled_loop_draws_the_eager_loop_s_tokens_into_the_same_buffers() -> None:
    model, expected = transformer("c2i"), golden("c2i")
    condition = model.cls_embedding(expected["cond"].long(), guided=True)
    greedy = LlamaGenSampling(cfg=meta()["runs"]["c2i.greedy"]["cfg_scale"], top_k=1)
    compiled = loop.CompiledLoop(model, greedy)
    assert torch.equal(compiled.generate(condition), expected["greedy.tokens"])
    buffers = [buffer.data_ptr() for pair in compiled._cache for buffer in pair]
    drawn = LlamaGenSampling(cfg=2.0, top_k=0)
    compiled.sampling = drawn  # a second batch, after another one's keys
    found, wanted = (
        run.generate(condition) for run in map(reseed, (compiled, loop.OfficialLoop(model, drawn)))
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, expected["greedy.tokens"])
    assert buffers == [buffer.data_ptr() for pair in compiled._cache for buffer in pair]


def reseed(run: loop.OfficialLoop) -> loop.OfficialLoop:
    """The loop, with torch's numbers from the start: it draws them while it runs."""
    torch.manual_seed(5)
    return run


def test_a_step_s_time_is_that_of_its_segment() -> None:
    model = loop.build_model("llamagen_tiny")
    cache, clock = loop.prepare_cache(model, "full", "1"), [0.0]

    def run() -> None:
        for segment in model.spec.segments:
            cache.begin(segment)
            clock[0] += segment.length * (1 + segment.start)  # 1 + start seconds a step

    cache.reset(2)
    points = loop.measure_slope(cache, model, run, 3, lambda: clock[0])
    for (middle, seconds), segment in zip(points.tolist(), model.spec.segments[1:], strict=True):
        assert middle == segment.start + segment.length / 2
        assert seconds == pytest.approx(1 + segment.start)
