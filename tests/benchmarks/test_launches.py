"""Launches per token: four products and four kernels a layer beside attention, and no wait of the host."""

from argparse import Namespace

import pytest

from benchmarks import launches

SHORT = ("model.transformer.depth=3",)
TEXT = ("model.transformer.depth=2", "model.max_tokens=48", "model.prompt_tokens=24", "model.chunk=16")


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        pytest.param("qwen3_4b", TEXT, marks=pytest.mark.slow),
        pytest.param("llamagen_b", SHORT, marks=pytest.mark.nightly),
        pytest.param(
            "lumina_mgpt_7b_512", (*SHORT, "model.transformer.image=[8,8]"), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_layer_of_a_token_is_few_kernels(
    model: str, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"model": model, "method": None, "budget": "1", "overrides": [*overrides]}
    tables = {}
    for noise in ("counter", "stream"):
        launches.main(Namespace(**chosen, batch=2, names=0, noise=noise))
        lines = map(str.split, capsys.readouterr().out.splitlines())
        tables[noise] = {
            words[0]: list(map(int, words[1:])) for words in lines if words[:1] in (["torch"], ["programs"])
        }
    found, stream = tables["counter"], tables["stream"]
    assert found["programs"][2] == stream["programs"][2] + 1  # the draw
    assert found["programs"][3] < stream["programs"][3]
    assert found["torch"][0] in (1, 2)  # attention, and the merge of the shares of its keys
    assert found["torch"][1] >= 23
    assert found["programs"][0] - found["torch"][0] == 4  # two norms, rotation, gate
    assert found["programs"][1] == 4  # products: queries, keys and values; output; w1 and w3; w2
    assert found["torch"][4] == found["programs"][4] == 0  # waits
