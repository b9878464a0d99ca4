"""VAR's tokenizer: equal to the official one at the tiny and the published shape, and consistent at any schedule."""

import pytest
import torch

from kvbench.models.var.tokenizer import choose_convolution
from tests.support.drawing import close
from tests.support.reference_var import FULL_VQ, SIDES, TINY_VQ, golden, meta, tokenizer


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
    rebuilt = torch.zeros_like(summed)
    for scale, found in enumerate(tokens):
        rebuilt = model.add(rebuilt, model.codes(found), scale, len(sides))
        close(rebuilt, expected[f"f_hat.{scale}"])


def test_images_of_every_prefix_equal_the_official_ones() -> None:
    model, expected = tokenizer(), golden("vae_tiny")
    close(model.encoder(expected["img_in"]), expected["enc"])
    for scale in range(len(SIDES)):
        close(model.decode(expected[f"f_hat.{scale}"]), expected[f"recon.{scale}"])


def test_another_schedule_than_the_models_own() -> None:
    tokens, _ = tokenizer().encode(golden("vae_tiny")["f"], sizes((1, 3, 6)))
    for scale, found in enumerate(tokens):
        assert torch.equal(found.flatten(1), golden("vae_tiny")[f"idx_alt.{scale}"])


@pytest.mark.parametrize("schedule", sorted(meta()["phi_index"]))
def test_convolutions_of_the_published_schedules(schedule: str) -> None:
    scales = int(schedule.removeprefix("K4_S"))
    assert [choose_convolution(scale, scales) for scale in range(scales)] == meta()["phi_index"][schedule]


def test_a_schedule_must_end_at_the_grid() -> None:
    with pytest.raises(ValueError, match=r"last scale is \(5, 5\), the latents are \(6, 6\)"):
        tokenizer().encode(torch.zeros(1, 8, 6, 6), sizes((1, 5)))
