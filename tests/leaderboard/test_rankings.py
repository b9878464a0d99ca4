"""Rankings: what may share one, how rows are counted and merged, and that the order of datasets is no matter."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from kvbench.core.files import hash_values
from kvbench.leaderboard.datasets import Dataset, Entry, Found
from kvbench.leaderboard.rankings import Ranking, rank_runs, subtract
from kvbench.leaderboard.verifications import Checked, Verification
from kvbench.runs.record.results import Evaluated, Results
from tests.support.datasets import describe_reference, describe_run, make_dataset, read_leaderboard

METHODS = ("heatkv", "random", "snapkv")


def rank(*datasets: Dataset, known: dict[str, Verification] | None = None) -> list[Ranking]:
    outcomes = known or {}
    pairs = [(one, [outcomes[str(one.folder)]] if str(one.folder) in outcomes else []) for one in datasets]
    return rank_runs(pairs).get("psnr", [])


def verify_all(dataset: Dataset, status: str = "verified") -> Verification:
    runs = {path: Checked(status, 3) for path in dataset.entries}  # type: ignore[arg-type]
    return Verification("Eve", "2026-06-01", 7, "an EPYC", runs)


def draw_dataset(name: str, rng: random.Random) -> Dataset:
    """A dataset of runs with random settings; two seeds, prompt sets and copies of references occur."""
    seed, texts, copy = rng.randrange(2), rng.choice(("scenes", "coco")), rng.randrange(2)
    runs = [
        describe_run(
            rng.choice(METHODS),
            rng.uniform(20, 30),
            budget=rng.choice((0.1, 0.2)),
            seed=seed,
            sinks=rng.randrange(2),
            run=f"run-{rng.randrange(10**9)}",
        )
        for _ in range(rng.randrange(1, 6))
    ]
    reference = describe_reference(seed)
    entries: list[tuple[Results, object, object]] = [(run, texts, run.run) for run in runs]
    return make_dataset(name, [*entries, (reference, texts, copy)])


@pytest.mark.parametrize("salt", range(20))
def test_rows_of_a_ranking_have_one_reference_prompts_seed_and_budget(salt: int) -> None:
    rng = random.Random(salt)
    datasets = [draw_dataset(str(number), rng) for number in range(5)]
    rankings = rank(*datasets)
    shown: Counter[str] = Counter()
    for ranking in rankings:
        shared = set()
        for row in ranking.rows:
            for copy in row.copies:
                run = copy.entry.results
                reference = copy.dataset.entries[f"infinity_tiny/{run.reference}"]
                config = run.config["seed"], run.config["sinks"], run.memory.budget
                shared.add((run.reference, reference.samples, copy.entry.drawn, *config))
                shown[f"{copy.dataset.folder} {run.run}"] += 1
        assert len(shared) == 1
    runs = [(one, entry.results) for one in datasets for entry in one.entries.values()]
    assert shown == Counter(f"{one.folder} {run.run}" for one, run in runs if run.reference)
    assert len({tuple(ranking.fields.items()) for ranking in rankings}) == len(rankings)
    rng.shuffle(datasets)
    assert rank(*datasets) == rankings


def test_ranks_follow_values_and_say_how_many_rows_a_method_has() -> None:
    worths = [("heatkv", 26.0), ("heatkv", 29.0), ("random", 26.0), ("heatkv", 20.0)]
    runs = [describe_run(method, worth, run=f"r{number}") for number, (method, worth) in enumerate(worths)]
    entries: list[tuple[Results, object, object]] = [(run, "t", run.run) for run in runs]
    [ranking] = rank(make_dataset("a", [*entries, (describe_reference(), "t", 0)]))
    found = [(row.rank, row.copies[0].entry.results.run, row.place, row.rows) for row in ranking.rows]
    assert found == [(1, "r1", 1, 3), (2, "r0", 2, 3), (2, "r2", 1, 1), (4, "r3", 3, 3)]
    assert ranking.has_baseline


def test_a_run_in_two_datasets_is_one_row_unless_its_numbers_differ() -> None:
    run, full = describe_run("heatkv", 26.0), (describe_reference(), "t", 0)
    other = replace(run, metrics={"psnr": replace(run.metrics["psnr"], value=27.0)})
    first, second = make_dataset("a", [(run, "t", 1), full]), make_dataset("b", [(run, "t", 1), full])
    [ranking] = rank(second, first)
    [row] = ranking.rows
    assert [copy.dataset.folder.name for copy in row.copies] == ["a", "b"]
    assert (row.rows, row.rank) == (1, 1)
    [ranking] = rank(first, make_dataset("c", [(other, "t", 1), full]))
    assert [row.rows for row in ranking.rows] == [2, 2]
    [ranking] = rank(first, make_dataset("d", [(run, "t", "other samples"), full]))
    assert [row.rows for row in ranking.rows] == [2, 2]


def test_references_with_other_samples_share_a_ranking_only_if_each_is_verified() -> None:
    def make(name: str, method: str, copy: object) -> Dataset:
        return make_dataset(
            name, [(describe_run(method, 26.0), "t", method), (describe_reference(), "t", copy)]
        )

    cpu, gpu = make("cpu", "heatkv", "rounded so"), make("gpu", "random", "rounded otherwise")
    assert len(rank(cpu, gpu)) == 2
    assert rank(cpu, gpu)[1].reasons == ("samples of the reference",)
    assert len(rank(cpu, gpu, known={"cpu": verify_all(cpu)})) == 2
    assert len(rank(cpu, gpu, known={"cpu": verify_all(cpu), "gpu": verify_all(gpu, "differs")})) == 2
    [ranking] = rank(cpu, gpu, known={"cpu": verify_all(cpu), "gpu": verify_all(gpu)})
    assert len(ranking.rows) == 2
    assert len(rank(cpu, make("again", "snapkv", "rounded so"), known={"cpu": verify_all(cpu)})) == 1


def test_an_outcome_that_differs_cancels_the_verification_of_the_same_bytes() -> None:
    def make(name: str, method: str, copy: object) -> Dataset:
        return make_dataset(
            name, [(describe_run(method, 26.0), "t", method), (describe_reference(), "t", copy)]
        )

    cpu, gpu, again = make("cpu", "heatkv", 0), make("gpu", "random", 1), make("again", "snapkv", 1)
    known = {"cpu": verify_all(cpu), "gpu": verify_all(gpu)}
    assert len(rank(cpu, gpu, again, known=known)) == 1
    assert len(rank(cpu, gpu, again, known={**known, "again": verify_all(again, "differs")})) == 2


SEPARATING: list[tuple[dict[str, object], str]] = [
    ({"protect": {"sinks": 3}}, "protect.sinks 3, not 1"),
    ({"noise": "counter"}, "noise counter, not stream"),
    ({"cache_dtype": "int4"}, "storage int4 "),
    ({"model": {"name": "infinity_tiny", "weights": "random"}}, ""),
    ({"prompts": {"path": "other.txt"}}, "prompts other, not scenes"),
]


@pytest.mark.parametrize(("settings", "reason"), SEPARATING)
def test_each_setting_that_runs_must_share_separates_rankings(
    settings: dict[str, object], reason: str
) -> None:
    usual = describe_run("heatkv", 26.0)
    assert_apart(usual, replace(usual, run="other", config={**usual.config, **settings}), reason)


def assert_apart(usual: Results, other: Results, reason: str) -> None:
    """Check that a run is not in the ranking of two others, for a reason; models are apart without one."""
    entries: list[tuple[Results, object, object]] = [
        (run, "t", run.run) for run in (usual, replace(usual, run="twin"), other, describe_reference())
    ]
    first, second = rank(make_dataset("a", entries))
    assert (len(first.rows), len(second.rows)) == (2, 1)
    assert len(second.reasons) == (1 if reason else 0)
    assert " ".join(second.reasons).startswith(reason)


def test_other_prompts_and_another_reference_with_the_same_samples_separate_rankings() -> None:
    usual, full = describe_run("heatkv", 26.0), describe_reference()
    twin, other = replace(usual, run="twin"), replace(usual, run="other", reference="full-1-1")
    runs: list[tuple[Results, object, object]] = [(one, "t", one.run) for one in (usual, twin)]
    texts = (replace(usual, run="other"), "other texts", "other")
    for entries, reason in (
        ([*runs, texts, (full, "t", 0)], "texts of the prompts"),
        (
            [*runs, (other, "t", "other"), (full, "t", 0), (replace(full, run="full-1-1"), "t", 0)],
            "reference",
        ),
    ):
        first, second = rank(make_dataset("a", entries))
        assert (len(first.rows), len(second.rows), second.reasons) == (2, 1, (reason,))


def test_fields_of_results_separate_rankings() -> None:
    usual = describe_run("heatkv", 26.0)
    provenance = {**(usual.provenance or {}), "weights_sha256": "beef"}
    other_weights = replace(usual, run="other", provenance=provenance)
    assert_apart(usual, other_weights, "weights")
    assert_apart(usual, replace(usual, run="other", n=5), "samples 5, not 4")
    metric = replace(usual.metrics["psnr"], protocol="float")
    assert_apart(usual, replace(usual, run="other", metrics={"psnr": metric}), "protocol psnr float")


@pytest.mark.parametrize(
    ("field", "reason"), [("better", "better lower, not higher"), ("unit", "unit m, not dB")]
)
def test_a_dataset_reverses_no_ranking_of_others(field: str, reason: str) -> None:
    usual = describe_run("heatkv", 26.0)
    metric = replace(usual.metrics["psnr"], **{field: "lower" if field == "better" else "m"})
    changed = replace(usual, run="other", metrics={"psnr": metric})
    assert_apart(usual, changed, reason)
    entries: list[tuple[Results, object, object]] = [(run, "t", run.run) for run in (usual, changed)]
    found = Found((make_dataset("a", [*entries, (describe_reference(), "t", 0)]),), ())
    assert [one["title"] for one in read_leaderboard(found)["metrics"]] == [
        "psnr" if field == "better" else "psnr \N{UPWARDS ARROW}"
    ]


def test_weights_are_named_though_a_setting_differs_too() -> None:
    usual = describe_run("heatkv", 26.0)
    more = {"provenance": {**(usual.provenance or {}), "weights_sha256": "beef"}}
    other = describe_run("heatkv", 27.0, sinks=2, **more)  # type: ignore[arg-type]
    twin = replace(usual, run="twin")
    entries: list[tuple[Results, object, object]] = [
        (run, "t", run.run) for run in (usual, twin, other, describe_reference())
    ]
    assert rank(make_dataset("a", entries))[1].reasons == ("sinks 2, not 1", "weights")


def test_a_full_cache_in_few_bits_is_ranked() -> None:
    codes = describe_run("full", 0.0, run="full-int2")
    codes = replace(
        codes,
        reference="full-1-0",
        metrics=describe_run("heatkv", 26.0).metrics,
        config={**codes.config, "cache_dtype": "int2"},
    )
    full = (describe_reference(), "t", 0)
    [ranking] = rank(make_dataset("a", [(codes, "t", 1), full]))
    assert [row.copies[0].entry.results.run for row in ranking.rows] == ["full-int2"]
    wide = replace(codes, config={**codes.config, "cache_dtype": "bfloat16"})
    assert rank(make_dataset("a", [(wide, "t", 1), full])) == []


def test_a_row_says_if_its_value_is_of_other_samples_than_the_run() -> None:
    run = describe_run("heatkv", 26.0)
    run = replace(
        run, metrics={"psnr": replace(run.metrics["psnr"], n=3, reason="1 image is equal to its reference")}
    )
    found = Found((make_dataset("a", [(run, "t", 1), (describe_reference(), "t", 0)]),), ())
    [metric] = read_leaderboard(found)["metrics"]
    [row] = metric["rankings"][0]["rows"]
    assert row["counted"] == "of 3, not 4: 1 image is equal to its reference"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 1}, "seed 1, not 0"),
        ({"sinks": 2}, "sinks 2, not 1"),
        ({"budget": 0.2}, "budget 20 % of the full cache's tokens, not 10 % of the full cache's tokens"),
    ],
)
def test_a_heading_says_what_keeps_rankings_apart(change: dict[str, int], reason: str) -> None:
    usual = [describe_run(method, 26.0) for method in METHODS]
    changed = describe_run("heatkv", 27.0, **change)  # type: ignore[arg-type]
    entries: list[tuple[Results, object, object]] = [(run, "t", run.run) for run in (*usual, changed)]
    references = [(describe_reference(seed), "t", seed) for seed in (0, 1)]
    first, second = rank(make_dataset("a", [*entries, *references]))
    assert (len(first.rows), first.nearest) == (3, None)
    assert (second.nearest, second.reasons) == (1, (reason,))
    assert not second.has_baseline


def test_bounds_and_the_full_cache_are_not_ranked() -> None:
    bound = describe_run("full, seed 1", 30.0, budget=1.0)
    assert rank(make_dataset("a", [(bound, "t", 1), (describe_reference(), "t", 0)])) == []


def give_rows(run: Results, values: list[float | None]) -> Entry:
    rows = {index: {"prompt": f"p{index}", "psnr": value} for index, value in enumerate(values)}
    return Entry(f"infinity_tiny/{run.run}", run, "t", hash_values(values), rows)


def test_differences_are_paired_by_prompt() -> None:
    theirs = give_rows(describe_run("heatkv", 25.0), [20.0, 25.0, 30.0])
    ours = give_rows(describe_run("random", 23.0), [18.0, 23.0, 28.0])
    score = subtract(ours, theirs, "psnr")
    assert score is not None
    assert score.value == pytest.approx(-2)
    assert score.ci95 == pytest.approx((-2, -2))  # values differ by ten, differences do not
    assert subtract(give_rows(describe_run("random", 24.0), [18.0, 23.0, 28.0]), theirs, "psnr") is None
    assert subtract(give_rows(describe_run("random", 24.0), []), theirs, "psnr") is None


def test_an_evaluator_counts_by_its_settings_and_files_not_by_its_key_or_batch() -> None:
    def make(key: str, settings: dict[str, object], inputs: dict[str, str]) -> Results:
        entry = Evaluated({"_target_": "a.Psnr", **settings}, "ok", "uint8", inputs=inputs)
        return describe_run("heatkv", 26.0, run=f"r{next(numbers)}", evaluated={key: entry})

    numbers = itertools.count()
    alike = [make("psnr", {"batch": 1, "crop": 0}, {}), make("mine", {"batch": 8, "crop": 0}, {})]
    others = [make("psnr", {"batch": 8, "crop": 1}, {}), make("psnr", {"crop": 0}, {"revision": "1"})]
    entries: list[tuple[Results, object, object]] = [(run, "t", run.run) for run in (*alike, *others)]
    rankings = rank(make_dataset("a", [*entries, (describe_reference(), "t", 0)]))
    assert [len(ranking.rows) for ranking in rankings] == [2, 1, 1]
    assert rankings[1].reasons == ("settings, code or files of the metric",)


SPACE = {"_target_": "a.Clip", "path": "weights/a.pt"}


@pytest.mark.parametrize(
    ("ours", "theirs", "inputs", "count"),
    [
        ({"space": SPACE}, {"space": {**SPACE, "path": "weights/b.pt"}}, {}, 2),
        ({"space": SPACE}, {"space": {**SPACE, "_target_": "a.Dino"}}, {}, 2),
        ({"_target_": "a.Psnr"}, {"_target_": "b.Psnr"}, {}, 2),
        ({"space": SPACE}, {"space": {**SPACE, "batch": 4}}, {}, 1),
        ({"space": {**SPACE, "sha256": "5a"}}, {"space": {**SPACE, "sha256": "5a", "path": "b"}}, {}, 1),
        ({"space": {**SPACE, "sha256": "5a"}}, {"space": {**SPACE, "sha256": "6b"}}, {}, 2),
        ({"statistics": "mine/a.npz"}, {"statistics": "b.npz"}, {"statistics": "5a"}, 1),
        ({"statistics": "mine/a.npz"}, {"statistics": "b.npz"}, {}, 2),
    ],
)
def test_networks_and_files_of_an_evaluator_separate_rankings(
    ours: dict[str, object], theirs: dict[str, object], inputs: dict[str, str], count: int
) -> None:
    runs = [
        describe_run(
            "heatkv", 26.0, run=f"r{number}", evaluated={"psnr": Evaluated(one, "ok", "uint8", inputs=inputs)}
        )
        for number, one in enumerate((ours, theirs))
    ]
    entries: list[tuple[Results, object, object]] = [(run, "t", run.run) for run in runs]
    assert len(rank(make_dataset("a", [*entries, (describe_reference(), "t", 0)]))) == count
