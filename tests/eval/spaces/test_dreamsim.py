"""DreamSim on small random networks, against its authors' program (tests/golden/eval/README.md)."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from kvbench.eval.distribution.diversity import Diversity
from kvbench.eval.paired.dreamsim import DreamSim
from kvbench.eval.spaces.dreamsim import DINO, ENSEMBLE, DreamSimEmbeddings, centre
from tests.support.image_sets import GOLDEN, make_set, only, reason
from tests.support.marks import needs
from tests.support.tiny import make_golden_weight

pytestmark = [pytest.mark.usefixtures("offline"), needs("timm")]
META = json.loads((GOLDEN / "dreamsim.json").read_text())
STORED = load_file(GOLDEN / "dreamsim.safetensors")
IMAGES = list(STORED["images"].numpy())
PAIRS = [(0, 1), (1, 2), (2, 3), (3, 0)]


def states(part: str) -> dict[str, Tensor]:
    return {name: make_golden_weight(f"{part}.{name}", shape) for name, shape in META["shapes"][part].items()}


def packed(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def make_space(folder: Path, *, pickled: bool = False, **settings: object) -> DreamSimEmbeddings:
    """The space on the golden networks, with an adapter in either of peft's formats."""
    torch.save(states("dino"), folder / DINO.file)
    config = {"lora_alpha": META["lora_alpha"], "r": META["r"], "use_dora": False, **settings}
    with zipfile.ZipFile(folder / ENSEMBLE.file, "w") as members:
        members.writestr("ensemble_lora/adapter_config.json", json.dumps(config))
        kind, content = ("bin", packed(states("lora"))) if pickled else ("safetensors", save(states("lora")))
        members.writestr(f"ensemble_lora/adapter_model.{kind}", content)
        for part in ("clip", "open_clip"):
            members.writestr(f"{part}_vitb16_pretrain.pth.tar", packed({"state_dict": states(part)}))
    paths = (str(folder / ENSEMBLE.file), str(folder / DINO.file))
    return DreamSimEmbeddings(path=paths[0], trunk_path=paths[1], heads=4, batch=3)


@pytest.mark.parametrize("pickled", [False, True])
def test_embeddings_and_distances_are_those_of_the_authors(pickled: bool, tmp_path: Path) -> None:
    space = make_space(tmp_path, pickled=pickled)
    ours, theirs = (make_set(tmp_path / str(side), [IMAGES[pair[side]] for pair in PAIRS]) for side in (0, 1))
    features = space.features(ours, "cpu").arrays["features"]
    expected = STORED["embeddings"][[pair[0] for pair in PAIRS]].numpy()
    assert np.abs(features - expected).max() < 2e-6
    result = only(DreamSim(space), ours, theirs)
    assert result.samples["dreamsim[ensemble]"] == pytest.approx(STORED["distances"].tolist(), abs=2e-6)
    assert result.scores["dreamsim[ensemble]"].value == pytest.approx(
        float(STORED["distances"].mean()), abs=2e-6
    )
    assert result.provenance["features"] == {"images": "reused", "reference": "computed"}
    same = only(DreamSim(space), ours, ours)
    assert same.samples["dreamsim[ensemble]"] == [0] * 4


def test_distances_are_those_of_the_formula() -> None:
    stored = json.loads((GOLDEN / "newer_metrics.json").read_text())["dreamsim"]
    first, second = (
        centre(torch.tensor(stored[f"concatenated_features_{side}"], dtype=torch.float64)) for side in "ab"
    )
    assert 1 - (first * second).sum(1).numpy() == pytest.approx(stored["distance"], abs=1e-12)


def test_diversity_of_a_prompt_is_the_mean_distance_of_its_pairs(tmp_path: Path) -> None:
    run = make_set(tmp_path / "run", IMAGES, ["one"] * 4)
    result = only(Diversity(make_space(tmp_path)), run)
    whole = STORED["embeddings"].double()
    distances = [1 - float(whole[i] @ whole[j]) for i in range(4) for j in range(i)]
    assert result.scores["diversity[dreamsim]"].value == pytest.approx(np.mean(distances), abs=2e-6)


def test_other_files_are_refused(tmp_path: Path) -> None:
    run = make_set(tmp_path / "run", IMAGES)
    space = make_space(tmp_path, use_rslora=True)
    assert "sets use_rslora, which is not supported" in reason(DreamSim(space), "failed", run, run)
    space = make_space(tmp_path)
    torch.save(states("clip"), tmp_path / DINO.file)
    assert "does not hold DreamSim's ensemble" in reason(DreamSim(space), "failed", run, run)
    (tmp_path / ENSEMBLE.file).write_text("no archive")
    assert "does not hold DreamSim's ensemble" in reason(DreamSim(space), "failed", run, run)
