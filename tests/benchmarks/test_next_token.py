"""Benchmarks of next-token models: the official loop is LlamaGen's, heads keep their class, layouts are told apart."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from kvbench.models.llamagen.sampling import LlamaGenSampling
from tests.support.places import ROOT
from tests.support.reference_llamagen import golden, meta, transformer


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_the_official_loop_draws_the_official_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, model, expected = module("llamagen_loop", monkeypatch), transformer("c2i"), golden("c2i")
    sampling = LlamaGenSampling(cfg=meta()["runs"]["c2i.greedy"]["cfg_scale"], top_k=1)
    condition = model.cls_embedding(expected["cond"].long(), guided=True)
    tokens = loop.OfficialLoop(model, sampling).generate(condition)
    assert torch.equal(tokens, expected["greedy.tokens"])


def test_they_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.weights=random", "model.transformer.depth=1", "model.transformer.grid=[4,4]"]
    for name, given, told in (
        ("llamagen_loop", ["--batch", "1", "--repeats", "1", "--methods", "linear_ar", "--budget", "22", "--slope",
          "--threads", "1"],
         "us for every token before it"),
        ("head_classes", ["--prompts", "2", "--group-at", "15"], "same later"),
        ("kernels", ["--model", "llamagen_tiny", "--batch", "1", "--quick", "--repeats", "1"], "several/one"),
        ("layouts", ["--batch", "1", "--repeats", "1", "--threads", "1"], "the engine's choice"),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", [name, *given, *([] if name in ("kernels", "layouts") else small)])
        module(name, monkeypatch).main()
        assert told in capsys.readouterr().out


SMALL_TEXTS = [
    "--batch", "2", "--tokens", "20", "--threads", "1", "--repeats", "1", "--budget", "0.5",
    "model.transformer.depth=2", "model.prompt_tokens=5", "model.chunk=4",
    "method.window=2", "method.queries=2", "method.p=0.5",
]  # fmt: skip


def test_texts_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = module("generate_loop", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["generate_loop", *SMALL_TEXTS, "--slope"])
    loop.main()
    text = capsys.readouterr().out
    lines = {line[:16].strip(): line[16:].split() for line in text.splitlines()}
    assert lines["full"][3:] == ["20", "1.000"]
    assert 0.3 < float(lines["hard_kv 0.5"][4]) <= 0.5
    assert "us for every token before it" in text


def test_equal_tokens_are_counted_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    expected = torch.tensor([[1, 2, 0, 4], [1, 2, 3, 0]])
    assert module("generate_loop", monkeypatch).count_equal(found, expected) == 2


def test_a_step_s_time_is_that_of_its_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = module("llamagen_loop", monkeypatch)
    model = module("build", monkeypatch).built(loop.composed(["model=llamagen_tiny"])["model"])
    cache, clock = loop.prepare_cache(model, "full", "1"), [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        for segment in model.spec.segments:
            cache.begin(segment)
            clock[0] += segment.length * (1 + segment.start)  # so many seconds a step

    cache.reset(2)
    points = loop.measure_slope(cache, model, run, 3)
    for (middle, seconds), segment in zip(points.tolist(), model.spec.segments[1:], strict=True):
        assert middle == segment.start + segment.length / 2
        assert seconds == pytest.approx(1 + segment.start)


def test_rows_have_the_lengths_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = module("layouts", monkeypatch)
    counts = layouts.draw_lengths(320, 0.3, 49, 97, 4)
    assert counts.count(49) == 96
    assert sorted(set(counts)) == [49, 65, 81, 97]
    layout = layouts.make_layout(counts, "cpu")
    assert sorted(layout.counts) == sorted(counts)
    assert (layout.positions >= 0).sum(1).tolist() == list(layout.counts)


def test_classes_are_those_that_headkv_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = module("head_classes", monkeypatch)
    model = module("build", monkeypatch).built(
        classes.composed(["model=llamagen_tiny", "model.weights=random", "model.transformer.depth=2"])[
            "model"
        ]
    )
    model.load("cpu")
    prompts = ["a red ring", "two blue circles"]
    noted = classes.Classes(sinks=1, group_at=60, thresholds=(0.3, 0.5))
    whole = classes.Budget.parse(1, model.spec)
    noted.prepare(model.spec, whole)
    model.generate(
        prompts, classes.KVCache(model.spec, noted, dtype=torch.float32), classes.PromptNoise(0, range(2))
    )
    found = noted.gather()
    assert found.shape == (13, 2, 2, 4, 6)  # lines from the third on that are cached
    for index, threshold in enumerate(noted.thresholds):
        method = classes.HeadKV(sinks=1, group_at=60, threshold=threshold)
        method.prepare(model.spec, whole)
        cache = classes.KVCache(model.spec, method, dtype=torch.float32)
        model.generate(prompts, cache, classes.PromptNoise(0, range(2)))
        assert torch.equal(torch.stack(method._local), found[0][:, index])
