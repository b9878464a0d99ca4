"""LlamaGen's tokenizer, at the tiny and the published shape, and its captions: equal to the official ones."""

import json

import pytest
import torch

from kvbench.models.files import official_files, parameters
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.llamagen.captions import clean_caption, clean_once
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from tests.support.drawing import close
from tests.support.reference_llamagen import FULL_VQ, GOLDEN, TINY_VQ, golden, raw_state, tokenizer


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


def test_a_file_without_keys_of_an_attention_is_refused() -> None:
    raw = raw_state("vq_16")
    del raw["decoder.mid.1.k.weight"]
    model = parameters.build_on_meta(lambda: VQ(FULL_VQ))
    with pytest.raises(WeightsError, match=r"missing decoder\.mid\.attn_1\.qkv\.weight"):
        parameters.check(official_files.clean_vqgan(raw), model, "tokenizer")


def test_captions_become_the_official_ones() -> None:
    pytest.importorskip("ftfy")
    for case in json.loads((GOLDEN / "captions.json").read_text()):
        assert clean_once(case["inp"]) == case["once"]
        assert clean_caption(case["inp"]) == case["out"]
    for caption in ("", "  ", "<b></b>", "@someone #12"):
        assert clean_caption(caption) == ""
