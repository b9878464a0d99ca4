"""Metrics of texts that are read, by hand and compared, and their drift over positions beside loops over tokens."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.eval.files.kinds import READINGS
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.intervals import bootstrap
from kvbench.eval.registry import build_metrics, read_metrics
from kvbench.eval.text.drift import find_worst, trace_drift
from kvbench.eval.text.forced import Kl, Perplexity, SameTop1
from kvbench.eval.text.retrieval import Retrieved
from kvbench.forced.record import COLUMNS, ScoredText
from tests.support.image_sets import make_readings, only, reason
from tests.support.run_folders import GIVEN, HOSTILE, TEXT, WORDS, make_reading


def write_run(folder: Path, seed: int, scale: float, lengths: Sequence[int] = (40,) * 12) -> ReadingSet:
    """Readings of random numbers; runs of all seeds have the same texts."""
    rng, texts = np.random.default_rng(seed), []
    for length in lengths:
        numbers = rng.gamma(1, scale, (3, length)).astype(np.float32)
        likeliest, full = rng.integers(0, 2, (2, length)).astype(np.int32)
        texts.append(ScoredText(np.arange(length, dtype=np.int32), likeliest, full, *numbers))
    return make_readings(folder, texts)


def test_a_difference_has_an_interval(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed, scale) for seed, scale in ((1, 0.2), (2, 0.1))]
    for run in runs:
        for metric in build_metrics(read_metrics("forced")):
            only(metric, run).save(run.folder / "metrics")
    found = compare_runs(runs[0].folder, runs[1].folder)
    for name in ("kl", "kl_p95", "kl_p99", "same_top1", "perplexity", "nll_change"):
        low, high = found[name].interval
        assert low < found[name].value < high
        assert found[name].value > 0 or not name.startswith("kl")


def test_texts_of_unequal_length_count_alike(tmp_path: Path) -> None:
    readings = write_run(tmp_path, 0, 0.3, (2, 5, 3))
    columns = [
        (one.kl, one.likeliest == one.likeliest_full, one.nll, one.nll_full) for _, one in readings.readings()
    ]
    means = [[sum(map(float, column)) / len(column) for column in text] for text in columns]
    kl, same, nll, full = (sum(column) / 3 for column in zip(*means, strict=True))
    found = {
        name: score.value
        for metric in (Kl(), SameTop1(), Perplexity())
        for name, score in only(metric, readings).scores.items()
    }
    everything = np.concatenate([text[0] for text in columns]).astype(float)
    expected = {
        **{f"kl_p{share}": np.quantile(everything, share / 100) for share in (95, 99)},
        "kl": kl,
        "same_top1": same,
        "perplexity": math.exp(nll),
        "nll_change": nll - full,
        "perplexity_full": math.exp(full),
    }
    assert found == pytest.approx(expected, rel=1e-6)


ANSWER = [4, 8, 2]
READ = [
    # likeliest under the method, under the full cache, depth, gap
    ([4, 8, 2], [4, 8, 2], 10, 900), ([4, 8, 3], [4, 8, 2], 19, 800), ([1, 8, 2], [4, 8, 2], 20, 700),
    ([4, 8, 2], [4, 8, 1], 100, 127), ([4, 8, 2], [4, 8, 2], 80, 128),
]  # fmt: skip


def save_readings(folder: Path, meta: bool = True) -> ReadingSet:
    texts, numbers = [], np.zeros(3, np.float32)
    for ours, full, _, _ in READ:
        columns = (np.array(row, np.int32) for row in (ANSWER, ours, full))
        texts.append(ScoredText(*columns, numbers, numbers, numbers))
    places = [{"depth": depth, "gap": gap, "answer": "482"} for *_, depth, gap in READ]
    return make_readings(folder, texts, places if meta else None)


def test_an_answer_counts_if_all_its_tokens_are_the_likeliest(tmp_path: Path) -> None:
    result = only(Retrieved(), save_readings(tmp_path))
    values = {name: score.value for name, score in result.scores.items()}
    assert values == {
        "retrieved": pytest.approx(3 / 5), "retrieved_full": pytest.approx(4 / 5),
        "retrieved/depth_0_20": 0.5, "retrieved/depth_20_40": 0, "retrieved/depth_80_100": 1,
        "retrieved/gap_0_128": 1, "retrieved/gap_128_256": 1, "retrieved/gap_512_1024": pytest.approx(1 / 3),
    }  # fmt: skip
    assert result.scores["retrieved/gap_512_1024"].n == 3
    assert result.samples["gap"] == [900, 800, 700, 127, 128]
    assert set(values) <= set(Retrieved().metrics)


def test_texts_without_a_place_are_skipped(tmp_path: Path) -> None:
    readings = save_readings(tmp_path, meta=False)
    assert "prompts=passkey and planted_facts" in reason(Retrieved(), "skipped", readings)


SCORED = "".join(WORDS[token] for token in TEXT)


def draw(rng: np.random.Generator, count: int, groups: tuple[int, ...] = ()) -> ScoredText:
    """A text of random tokens and divergences, which are binary fractions, so that sums are exact."""
    tokens, likeliest, full = rng.integers(3, size=(3, count)).astype(np.int32)
    kl = (rng.integers(100, size=count) / 64).astype(np.float32)
    return ScoredText(tokens, likeliest, full, kl, kl, kl, {}, groups)


def load(folder: Path, **more: object) -> ScoredText:
    path = folder / "one.safetensors"
    path.write_bytes(READINGS.encode(make_reading((0, 0.5, 0, 3, 0, 1, 0, 2), {1: 3}, **more)))
    return ScoredText.read(path)


@pytest.mark.parametrize(("lengths", "width"), [((40, 33, 40), 3), ((16, 3), 1), ((17,), 2)])
def test_bins_have_equal_tokens_and_average_texts(lengths: tuple[int, ...], width: int) -> None:
    rng = np.random.default_rng(0)
    texts = [draw(rng, length) for length in lengths]
    names = [f"text {number % 2}" for number in range(len(texts))]
    drift = trace_drift(texts, names)
    longest = max(lengths)
    assert drift.unit == "tokens"
    assert drift.edges == (*range(0, longest, width), longest)
    for number, start in enumerate(range(0, longest, width)):
        spans = [range(start, min(start + width, len(text.kl))) for text in texts]
        known = [each for each in zip(texts, spans, names, strict=True) if each[1]]
        kl = [sum(float(text.kl[i]) for i in span) / len(span) for text, span, _ in known]
        same = [np.mean(text.likeliest[span] == text.likeliest_full[span]) for text, span, _ in known]
        for band, means, most in ((drift.kl[number], kl, np.inf), (drift.same_top1[number], same, 1)):
            assert band.mean == pytest.approx(sum(means) / len(means), abs=1e-12)
            interval = bootstrap(means, [name for *_, name in known])
            ends = (None, None) if interval is None else (max(0, interval.low), min(most, interval.high))
            assert (band.low, band.high) == (pytest.approx(ends[0]), pytest.approx(ends[1]))
    joined = sorted(float(value) for text in texts for value in text.kl)
    assert drift.tail["largest"] == joined[-1]
    assert drift.tail["median"] == pytest.approx(
        (joined[(len(joined) - 1) // 2] + joined[len(joined) // 2]) / 2
    )


@pytest.mark.parametrize(("groups", "unit"), [((4, 4, 4), "row"), ((1, 4, 7), "scale")])
def test_bins_of_images_are_rows_or_scales(groups: tuple[int, ...], unit: str) -> None:
    image = draw(np.random.default_rng(0), 12, groups)
    drift = trace_drift([image], ["one"])
    ends = np.cumsum(groups)
    assert (drift.unit, drift.edges) == (unit, (0, *ends))
    parts = np.split(image.kl.astype(np.float64), ends[:-1])
    assert [band.mean for band in drift.kl] == [pytest.approx(part.mean()) for part in parts]
    [place] = find_worst([(0, "", image)], 1)
    group = int(np.searchsorted(ends, place.position, side="right"))
    assert place.before == f"{unit} {group + 1} "


def test_the_worst_places_are_shown_with_their_text(tmp_path: Path) -> None:
    one = load(tmp_path)
    prompt = GIVEN + SCORED
    places = find_worst([(4, prompt, one), (2, prompt, one)], 3)
    assert [(place.sample, place.position, place.kl) for place in places] == [(2, 3, 3), (4, 3, 3), (2, 7, 2)]
    assert places[0].before == GIVEN + "a hen and"
    assert (places[0].token, places[0].likeliest_full, places[0].likeliest) == ("a", "a", "#9")
    assert places[2].token == HOSTILE
    long = "x" * 100 + SCORED
    assert find_worst([(0, long, one)], 1)[0].before == "x" * (60 - len("a hen and")) + "a hen and"
    assert find_worst([(0, "another text", one)], 1)[0].before == "a hen and"


def test_parts_of_characters_are_found_in_the_prompt(tmp_path: Path) -> None:
    broken = {**WORDS, 2: "\N{REPLACEMENT CHARACTER}", 3: "\N{REPLACEMENT CHARACTER}"}
    one = load(tmp_path, words=broken)
    text = f"a{chr(0x20AC)}a{chr(0xE9)}\na{HOSTILE}"
    assert one.find_before(f"{text} Then: {text}") == f"{text} Then: "


def test_stripped_files_lack_the_hidden_states_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    path.write_bytes(READINGS.encode(make_reading([0.0] * 8, states=torch.zeros(8, 576), groups=(4, 4))))
    whole, theirs = path.read_bytes(), ScoredText.read(path)
    path.write_bytes(theirs.encode())
    assert (b'"states"' in whole, b'"states"' in path.read_bytes()) == (True, False)
    ours = ScoredText.read(path)
    assert all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in COLUMNS)
    assert (ours.words, ours.groups) == (theirs.words, (4, 4)) == (WORDS, (4, 4))
