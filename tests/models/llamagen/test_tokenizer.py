"""LlamaGen's tokenizer: equal to the official one at the tiny and the published shape, its files read strictly."""

import pytest
import torch

from kvbench.models.files import official_files, parameters
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from tests.support.drawing import close
from tests.support.reference_llamagen import FULL_VQ, TINY_VQ, golden, raw_state, tokenizer


@pytest.mark.parametrize(
    ("config", "name"), [(TINY_VQ, "vq_tiny"), pytest.param(FULL_VQ, "vq_full", marks=pytest.mark.slow)]
)
def test_equals_the_official_tokenizer(config: VQConfig, name: str) -> None:
    model, expected = tokenizer(config), golden(name)
    latents = model.latents(expected["img_in"])
    close(latents, expected["z"])
    tokens = model.encode(latents)
    assert torch.equal(tokens.flatten(), expected["indices"])
    close(model.codes(tokens), expected["quant"])
    height, width = (side // config.networks.patch for side in expected["code_img"].shape[2:])
    close(model.decode(model.codes(expected["code"].unflatten(1, (height, width)))), expected["code_img"])


def test_the_first_level_may_be_wider_than_the_first_convolution() -> None:
    """With ch 32 and ch_mult (2, 2) the official encoder goes from 3 to 32 to 64 channels."""
    model = VQ(VQConfig(codes=16, channels=8, latents=32, widths=(64, 64), base=32))
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes["encoder.conv_in.conv.weight"] == (32, 3, 3, 3)
    assert shapes["encoder.down.0.block.0.conv1.conv.weight"] == (64, 32, 3, 3)
    assert shapes["encoder.down.0.block.0.nin_shortcut.conv.weight"] == (64, 32, 1, 1)
    assert shapes["decoder.conv_out.conv.weight"] == (3, 64, 3, 3)
    assert model.decode(model.latents(torch.zeros(1, 3, 8, 8))[:, :8]).shape == (1, 3, 8, 8)


def test_a_file_without_keys_of_an_attention_is_refused() -> None:
    raw = raw_state("vq_16")
    del raw["decoder.mid.1.k.weight"]
    model = parameters.build_on_meta(lambda: VQ(FULL_VQ))
    with pytest.raises(WeightsError, match=r"missing decoder\.mid\.attn_1\.qkv\.weight"):
        parameters.check(official_files.clean_vqgan(raw), model, "tokenizer")
