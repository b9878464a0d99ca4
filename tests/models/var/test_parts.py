"""VAR's tokenizer, equal to the official one, and VAR as the harness sees it: prompts, memory and dtypes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.settings import Settings
from kvbench.engine.memory import paper_mib
from kvbench.models.base import read_labels
from kvbench.models.files.parameters import build_on_meta, fill_random
from kvbench.models.var.model import VARModel
from kvbench.models.var.tokenizer import choose_convolution
from kvbench.models.var.transformer import VAR, VARConfig
from kvbench.runs.cache_plan import find_dtype
from tests.support.drawing import close
from tests.support.reference_var import FULL_VQ, SIDES, TINY_VQ, golden, meta, tokenizer
from tests.support.small_models import configured


def sizes(sides: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(side, side) for side in sides]


@pytest.mark.parametrize(
    ("config", "name", "sides"),
    [
        pytest.param(TINY_VQ, "vae_tiny", SIDES, id="tiny"),
        pytest.param(FULL_VQ, "vae_full", (1, 2, 3, 4), id="published shape", marks=pytest.mark.slow),
    ],
)
def test_equals_the_official_tokenizer(config: object, name: str, sides: tuple[int, ...]) -> None:
    model, expected = tokenizer(config), golden(name)
    latents = model.latents(expected["img_in"])
    close(latents, expected["f"])
    tokens, summed = model.encode(expected["f"], sizes(sides))
    for scale, found in enumerate(tokens):
        assert torch.equal(found.flatten(1), expected[f"idx.{scale}"]), f"tokens of scale {scale}"
    close(summed, expected[f"f_hat.{len(sides) - 1}"])
    close(model.decode(expected["fhat_in"]), expected["fhat_img"])
    if name == "vae_tiny":
        close(model.encoder(expected["img_in"]), expected["enc"])
        for scale in range(len(sides)):
            close(model.decode(expected[f"f_hat.{scale}"]), expected[f"recon.{scale}"])
    rebuilt = torch.zeros_like(summed)
    for scale, found in enumerate(tokens):
        rebuilt = model.add(rebuilt, model.codes(found), scale, len(sides))
        close(rebuilt, expected[f"f_hat.{scale}"])


def test_another_schedule_than_the_models_own_ends_at_the_grid() -> None:
    tokens, _ = tokenizer().encode(golden("vae_tiny")["f"], sizes((1, 3, 6)))
    for scale, found in enumerate(tokens):
        assert torch.equal(found.flatten(1), golden("vae_tiny")[f"idx_alt.{scale}"])
    with pytest.raises(ValueError, match=r"last scale is \(5, 5\), the latents are \(6, 6\)"):
        tokenizer().encode(torch.zeros(1, 8, 6, 6), sizes((1, 5)))


def test_convolutions_of_the_published_schedules() -> None:
    for schedule, expected in meta()["phi_index"].items():
        scales = int(schedule.removeprefix("K4_S"))
        assert [choose_convolution(scale, scales) for scale in range(scales)] == expected


def test_memory_of_all_tokens_is_what_papers_print() -> None:
    for name, batch, printed in (("var_d30", 50, 22.412), ("var_d36", 25, 53.156)):
        spec = configured(f"model={name}").spec
        found = paper_mib(spec.all_heads * spec.ends[-1], spec, batch) / 1000
        assert found == pytest.approx(printed, abs=5e-4)


def test_the_first_word_is_the_class_and_minus_one_none() -> None:
    assert read_labels(["3", "0 tench", " 9  two words ", "-1 anything"], 30, "var_tiny") == [3, 0, 9, 30]


def test_random_numbers_belong_to_the_shape() -> None:
    shapes = ({"depth": 2}, {"depth": 3}, {"depth": 2, "classes": 9})
    base = VARConfig(1, 32, 2, (1, 2), classes=5, codes=16, channels=4)
    made = [fill_random(build_on_meta(lambda own=own: VAR(replace(base, **own)))) for own in shapes]
    assert len(set(made)) == 3


def test_on_a_gpu_temperatures_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARModel, "compute_dtype", lambda *_: VARModel.half)  # there is no GPU
    one = configured("model=var_tiny", "model.weights=random", "model.transformer.shared_aln=true")
    one.load("cpu")
    block = one._transformer.blocks[0]
    assert block.attn.scale_mul_1H11.dtype == block.ada_gss.dtype == torch.float32
    assert block.attn.mat_qkv.weight.dtype == block.ffn.fc2.bias.dtype == torch.float16
    assert one._transformer.head.weight.dtype == torch.float32


def test_keys_and_values_are_stored_as_computed() -> None:
    for name, device, dtype in (
        ("var_d30", "cuda", torch.float16),
        ("infinity_2b", "cuda:1", torch.bfloat16),
        ("var_d30", "cpu", torch.float32),
    ):
        one = configured(f"model={name}")
        assert one.compute_dtype(device) == dtype
        for asked, stored in (("auto", dtype), ("bfloat16", torch.bfloat16)):
            assert find_dtype(Settings("run", 1, 1, 0, 8, device, asked, Path("runs")), one) == stored
