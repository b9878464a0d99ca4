"""Names of metrics, of their parts and of their variants have the range of their values."""

import pytest

from kvbench.eval.protocol.ranges import find_range
from kvbench.eval.protocol.scores import cut_interval, mean_score


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ssim_tm", (-1, 1)),
        ("ms_ssim", (0, 1)),
        ("dists", (0, 2)),
        ("geneval[scenes]/position", (0, 1)),
        ("geneval2_am[scenes]", (0, 100)),
        ("dpg[official]/entity", (0, 100)),
        ("exact[scenes]", (0, 1)),
        ("exact_answer_change", (-1, 1)),
        ("accuracy", (0, 1)),
        ("recall_adm", (0, 1)),
        ("psnr", None),
        ("lpips", None),
    ],
)
def test_a_metric_has_the_range_of_its_values(name: str, wanted: tuple[float, float] | None) -> None:
    assert find_range(name) == wanted


def test_an_interval_ends_at_the_range_and_says_so() -> None:
    score = mean_score([0.90, 0.99])
    assert score.ci95 is not None
    assert score.ci95[1] > 1
    cut = cut_interval(score, find_range("ssim"))
    assert cut.ci95 == (score.ci95[0], 1)
    assert cut.ci == f"{score.ci}, cut at [-1, 1]"
    assert (cut.value, cut.se) == (score.value, score.se)
    assert cut_interval(score, find_range("psnr")) is score
    inner = mean_score([0.50, 0.51])
    assert cut_interval(inner, (0, 1)) is inner
