"""Paired differences: equal to plain arithmetic, narrower than unpaired ones, of the same samples; metrics' ranges."""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator

from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.crossed import cross_runs
from kvbench.eval.protocol.intervals import Replicates
from kvbench.eval.protocol.ranges import find_range
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score
from tests.support.image_sets import SCORED, run_folder

COUNT = SCORED
PSNR = {"psnr": MetricSpec("higher", "dB", digits=2)}


def compare(
    root: Path, ours: list[object], theirs: list[object], name: str = "psnr", ci: str = "bootstrap"
) -> dict[str, Metric]:
    metrics, scores = {name: PSNR["psnr"]}, {name: Score(None, ci=ci)}
    sides = {"ours": ours, "theirs": theirs}
    return compare_runs(*(run_folder(root / one, {name: sides[one]}, metrics, scores) for one in sides))


def test_a_difference_is_the_mean_of_the_differences(rng: Generator, tmp_path: Path) -> None:
    base = rng.normal(30, 5, COUNT)
    ours, theirs = base + rng.normal(0.5, 0.2, COUNT), base
    score = compare(tmp_path / "forth", ours.tolist(), theirs.tolist())["psnr"]
    assert score.value == pytest.approx((ours - theirs).mean())
    assert score.interval[0] < score.value < score.interval[1]
    assert score.interval[1] - score.interval[0] < 0.2  # each value alone has a standard error of 0.65
    assert (score.better, score.unit, score.digits) == ("higher", "dB", 2)
    back = compare(tmp_path / "back", theirs.tolist(), ours.tolist())["psnr"]
    assert back.value == pytest.approx(-score.value)


def test_samples_without_a_number_are_left_out(tmp_path: Path) -> None:
    values: list[object] = [1.0] * COUNT
    assert compare(tmp_path, [float("inf"), *values[1:]], values)["psnr"].n == COUNT - 1
    assert compare(tmp_path / "none", [None] * COUNT, values) == {}


def test_means_of_groups_are_compared_group_by_group(tmp_path: Path) -> None:
    tags = ["colors"] * 10 + ["counting"] * 50
    right = [True] * COUNT
    wrong = [i >= 5 for i in range(COUNT)]  # half of the ten colours
    metrics = {
        "geneval[x]": MetricSpec("higher", strata="tag"),
        "geneval[x]/colors": MetricSpec("higher", detail=True),
    }
    ours, theirs = (
        run_folder(tmp_path / name, {"tag": tags, "geneval[x]": correct}, metrics)
        for name, correct in (("ours", wrong), ("theirs", right))
    )
    found = compare_runs(ours, theirs)
    assert list(found) == ["geneval[x]"]
    assert found["geneval[x]"].value == pytest.approx(-0.25)
    assert str(found["geneval[x]"].ci).startswith("stratified")


def test_equal_answers_do_not_prove_equal_methods(tmp_path: Path) -> None:
    right: list[object] = [True] * COUNT
    reach = 2.042 / 32  # 30 prompts, Student's t
    for ci in ("wilson", "stratified wilson", "agresti-min, cut at [-1, 1]"):
        score = compare(tmp_path / ci[:12], right, right, "geneval[x]", ci)["geneval[x]"]
        assert (score.value, score.ci) == (0, "agresti-min")
        assert score.interval == pytest.approx((-reach, reach), rel=0.01)
    change = compare(tmp_path / "change", [0.0] * COUNT, [-1.0] * COUNT, "x", "agresti-min")["x"]
    assert (change.value, change.ci) == (1, "agresti-min")
    assert change.interval[0] < 1
    same = compare(tmp_path / "images", [0.0] * COUNT, [0.0] * COUNT, "lpips")["lpips"]
    assert same.interval == (0, 0)  # of equal images


@pytest.mark.parametrize(
    ("old", "new", "index"), [('"seed": 0', '"seed": 1', 0), ("prompt 7", "prompt 8", 14)]
)
def test_other_samples_cannot_be_compared(tmp_path: Path, old: str, new: str, index: int) -> None:
    ours, theirs = (run_folder(tmp_path / name, {"psnr": [1.0] * COUNT}, PSNR) for name in ("ours", "theirs"))
    path = theirs / "samples.jsonl"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SampleSetError, match=f"sample {index} has"):
        compare_runs(ours, theirs)


def test_samples_of_a_difference_are_those_of_the_smaller_set_and_both_sides_have_the_metric(
    tmp_path: Path,
) -> None:
    fid, sides = {"fid": MetricSpec("lower")}, (("ours", 3.0, 60), ("theirs", 1.0, 40))
    ours, theirs = (run_folder(tmp_path / name, {}, fid, {"fid": Score(*score)}) for name, *score in sides)
    for pair, value in (((ours, theirs), 2), ((theirs, ours), -2)):
        assert (compare_runs(*pair)["fid"].value, compare_runs(*pair)["fid"].n) == (value, 40)
    assert compare_runs(ours, run_folder(tmp_path / "other", {}, {"ssim": MetricSpec("higher")})) == {}


def test_values_of_whole_sets_are_compared_by_their_replicates(rng: Generator, tmp_path: Path) -> None:
    metrics = {"is": MetricSpec("higher"), "count": MetricSpec("lower")}
    drawn = rng.normal(100, 5, 20)
    shift = rng.normal(2, 0.1, 20)
    ours, theirs = (
        {
            "is": Score(value, 60, replicates=Replicates.from_groups(left, range(60))),
            "count": Score(value, 60),
        }
        for value, left in ((102.0, drawn + shift), (100.0, drawn))
    )
    found = compare_runs(*(run_folder(tmp_path / str(s["is"].value), {}, metrics, s) for s in (ours, theirs)))
    assert found["is"].value == found["count"].value == 2
    assert found["is"].se == pytest.approx(np.sqrt(19 / 20 * np.square(shift - shift.mean()).sum()))
    assert found["count"].ci95 is None
    other = {**theirs, "is": Score(100.0, 60, replicates=Replicates((1.0, 2.0), 1.0, "other parts"))}
    parts = compare_runs(tmp_path / "102.0", run_folder(tmp_path / "other", {}, metrics, other))
    assert (parts["is"].value, parts["is"].ci95) == (2, None)


def test_equal_shares_of_whole_sets_do_not_prove_equal_methods(tmp_path: Path) -> None:
    """As precision where every image is inside: no replicate differs, and Newcombe's interval has a width."""
    metrics = {"precision_x": MetricSpec("higher")}
    parts = Replicates.from_groups(np.ones(20), range(60))
    share = Score(1.0, 60, se=0.02, ci95=(0.94, 1.0), ci="wilson", replicates=parts)
    ours, theirs = (run_folder(tmp_path / name, {}, metrics, {"precision_x": share}) for name in "ab")
    found = compare_runs(ours, theirs)["precision_x"]
    assert (found.value, found.ci) == (0, "newcombe")
    assert found.interval == pytest.approx((-0.06, 0.06))
    for crossed in (cross_runs([ours] * 3)["precision_x"], cross_runs([ours] * 2)["precision_x"]):
        assert (crossed.mean.interval, crossed.mean.ci) == ((0.94, 1.0), "wilson")
    assert cross_runs([ours] * 3, theirs)["precision_x"].mean.interval == pytest.approx((-0.06, 0.06))


def test_a_difference_ends_at_the_largest_possible_one(tmp_path: Path) -> None:
    """All prompts but one change by 1, so that the widened bootstrap passes 1, which a share cannot."""
    ours, theirs = [1.0] * COUNT, [0.3] * 2 + [0.0] * (COUNT - 2)
    names = ("psnr", "vqascore")
    free, cut = (compare(tmp_path / name, [*ours], [*theirs], name)[name] for name in names)
    assert free.interval[1] > 1
    assert cut.interval == (free.interval[0], 1)
    assert cut.ci == f"{free.ci}, cut at [-1, 1]"


# Ranges


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ssim_tm", (-1, 1)), ("ms_ssim", (0, 1)), ("dists", (0, 2)), ("geneval[scenes]/position", (0, 1)),
        ("geneval2_am[scenes]", (0, 100)), ("dpg[official]/entity", (0, 100)), ("exact[scenes]", (0, 1)),
        ("exact_answer_change", (-1, 1)), ("accuracy", (0, 1)), ("recall_adm", (0, 1)), ("psnr", None),
        ("lpips_scenes", (0, math.inf)), ("fid_scenes", (0, math.inf)), ("kid_scenes", None),
        ("string_match_all", (0, 1)), ("string_match_part_change", (-1, 1)), ("sfid_adm", (0, math.inf)),
        ("mind_real_clean", (0, math.inf)), ("cmmd_paired", (0, math.inf)), ("generated_tokens", (0, math.inf)),
        ("perplexity_full", (1, math.inf)), ("is", (1, math.inf)), ("vendi[scenes,n=4]", (1, math.inf)),
        ("diversity[dinov2]", (0, 2)), ("nll_change", None),
    ],
)  # fmt: skip
def test_a_metric_has_the_range_of_its_values(name: str, wanted: tuple[float, float] | None) -> None:
    assert find_range(name) == wanted
