"""PickScore on a CLIP network of a few channels, against its authors' steps one image at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvbench.eval.alignment.pickscore import PickScore
from tests.support.image_sets import make_noise, only
from tests.support.marks import needs

pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip", "transformers")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    text = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision = {**text, "image_size": 28, "patch_size": 14}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406},
        vision_config=vision,
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.logit_scale.data.fill_(4.5)
    path = tmp_path_factory.mktemp("pickscore")
    model.save_pretrained(path)
    return path


@torch.no_grad()
def test_pickscore_is_that_of_its_authors(folder: Path, tmp_path: Path) -> None:
    import open_clip
    import transformers

    prompts = ["a red fox", "two owls on a wall, oil on canvas", "word " * 200]
    images = make_noise(tmp_path / "run", [{}] * 3, prompts, size=40)
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    expected = []
    for index, prompt in zip(images.indices, prompts, strict=True):
        resized = np.asarray(Image.fromarray(images.image(index)).resize((28, 28), Image.BICUBIC)) / 255
        pixels = (resized - open_clip.OPENAI_DATASET_MEAN) / open_clip.OPENAI_DATASET_STD
        seen = model.vision_model(torch.from_numpy(pixels).permute(2, 0, 1)[None].float()).pooler_output
        [tokens] = open_clip.get_tokenizer("ViT-H-14")([prompt])
        tokens = tokens[: int((tokens == 49407).nonzero()[0]) + 1]  # without padding
        read = model.text_model(tokens[None]).last_hidden_state[:, -1]
        image, text = model.visual_projection(seen)[0], model.text_projection(read)[0]
        expected.append(float(np.exp(4.5) * image @ text / image.norm() / text.norm()))
    result = only(PickScore(str(folder), batch=2), images)
    assert result.samples["pickscore"] == pytest.approx(expected, abs=1e-3)
    assert result.scores["pickscore"].value == pytest.approx(np.mean(expected), abs=1e-3)
    assert set(result.provenance["weights"]) == {
        "yuvalkirstain/PickScore_v1/config.json",
        "yuvalkirstain/PickScore_v1/model.safetensors",
    }
