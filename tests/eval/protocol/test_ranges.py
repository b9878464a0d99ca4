"""Names of metrics, of their parts and of their variants have the range of their values."""

import pytest

from kvbench.eval.protocol.ranges import find_range


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ssim_tm", (0, 1)),
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
