"""ImageReward on a random network of two layers, against its authors' program (tests/golden/eval/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvbench.eval.alignment.imagereward import ImageReward, load_scorer, load_tokenizer
from kvbench.eval.files.weights import Snapshot
from tests.support.image_sets import make_noise, make_set, only, reason
from tests.support.marks import needs
from tests.support.places import GOLDENS
from tests.support.tiny import make_golden_weight

pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip", "transformers")]
META = json.loads((GOLDENS / "eval" / "imagereward.json").read_text())
GOLDEN = load_file(GOLDENS / "eval" / "imagereward.safetensors")


def fill(name: str, shape: list[int]) -> Tensor:
    """A tensor of the golden network."""
    places = name.endswith("position_ids")
    return torch.arange(shape[1])[None] if places else make_golden_weight(name, shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imagereward")
    torch.save({name: fill(name, shape) for name, shape in META["shapes"].items()}, path / "ImageReward.pt")
    (path / "med_config.json").write_text(json.dumps(META["med_config"]))
    (path / "vocab.txt").write_text("\n".join(META["vocabulary"]) + "\n")
    return path


def test_tokens_are_those_of_the_official_program(folder: Path) -> None:
    tokens, attention = load_tokenizer(folder / "vocab.txt")(META["prompts"])
    assert torch.equal(tokens, GOLDEN["tokens"])
    assert torch.equal(attention, GOLDEN["attention"])
    assert load_tokenizer(folder / "vocab.txt")(["[ENC]"])[0][0, 1] == len(META["vocabulary"]) + 1


def test_rewards_are_those_of_the_official_program(folder: Path, tmp_path: Path) -> None:
    images = make_set(tmp_path / "run", list(GOLDEN["images"].numpy()), META["prompts"])
    words, expected = Snapshot("who/words", ("vocab.txt",)), GOLDEN["rewards"].tolist()
    for batch in (1, 3):
        scorer = ImageReward(str(folder), tokenizer_path=str(folder), batch=batch, tokenizer=words)
        result = only(scorer, images)
        # The same network in float64 differs by 1.8e-5 from the reference, which has the rounding of float32.
        assert result.samples["imagereward"] == pytest.approx(expected, abs=2e-5)
        assert result.scores["imagereward"].value == pytest.approx(np.mean(expected), abs=1e-5)
    assert max(expected) - min(expected) > 1  # images and prompts do matter


@pytest.mark.parametrize(
    ("lost", "settings", "complaint"),
    [
        ("mlp.layers.6.bias", META["med_config"], "does not hold ImageReward"),
        ("blip.text_encoder", META["med_config"], "does not hold ImageReward"),
        ("no such part", [1], "cannot be read as settings by name"),
        ("no such part", {}, "hidden_size"),
    ],
)
def test_incomplete_files_and_another_vocabulary_are_refused(
    lost: str, settings: object, complaint: str, folder: Path, tmp_path: Path
) -> None:
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    torch.save({n: v for n, v in state.items() if not n.startswith(lost)}, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=complaint):
        load_scorer(tmp_path, folder / "vocab.txt", "cpu")
    metric, images = ImageReward(str(folder), tokenizer_path=str(folder)), make_noise(tmp_path / "run", [{}])
    assert "is not google-bert/bert-base-uncased/vocab.txt" in reason(metric, "failed", images)
