"""Files of calibrations: they come back whole, and are for nothing else than what they were made for."""

from pathlib import Path

import pytest
import torch

from kvbench.core.config import ConfigError
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.shared.calibration import Artifact
from kvbench.runs.calibrate import load_artifact, save_artifact

KIND = AttentionByScale.kind
MASS = torch.linspace(0, 1, 2 * 3 * 5 * 5, dtype=torch.float64).view(2, 3, 5, 5)
METADATA = {"model": "small", "seed": 3, "sizes": [[1, 1], [2, 2]], "weights": "abc"}


def test_an_artifact_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    made = Artifact(KIND, {"mass": MASS}, METADATA)
    save_artifact(path, made)
    found = load_artifact(path, KIND, METADATA)
    assert torch.equal(found.tensors["mass"], made.tensors["mass"])
    assert found.kind == KIND
    assert found.metadata.items() >= METADATA.items()
    load_artifact(path, KIND, {"sizes": ((1, 1), (2, 2))})
    with pytest.raises(ConfigError, match=r"made for prompts=None, this run has 'new'; calibrate again"):
        load_artifact(path, KIND, {**METADATA, "prompts": "new"})
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [None, b"", b"not a calibration at all", "bare"])
def test_an_unreadable_artifact_is_refused(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    if content == "bare":
        from safetensors.torch import save_file

        save_file({"mass": torch.zeros(1)}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_artifact(path, KIND, METADATA)
