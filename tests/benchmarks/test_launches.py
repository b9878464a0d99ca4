"""Launches per token: ten kernels a layer instead of over thirty, and no wait of the host."""

from argparse import Namespace

import pytest

from benchmarks import launches

SHORT = ("model.transformer.depth=3",)
TEXT = (*SHORT, "model.max_tokens=48", "model.prompt_tokens=24", "model.chunk=16")


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("qwen3_4b", TEXT),
        pytest.param("llamagen_b", SHORT, marks=pytest.mark.slow),
        pytest.param("lumina_mgpt_7b_512", SHORT, marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_a_token_is_ten_kernels(
    model: str, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"model": model, "method": None, "budget": "1", "overrides": [*overrides]}
    launches.main(Namespace(**chosen, batch=2, names=0))
    rows = map(str.split, capsys.readouterr().out.splitlines()[2:])
    found = {name: list(map(int, counts)) for name, *counts in rows}
    assert found["torch"][0] == 1  # attention
    assert found["torch"][1] >= 24
    assert found["programs"][:2] == [5, 5]
    assert found["torch"][4] == found["programs"][4] == 0  # waits
