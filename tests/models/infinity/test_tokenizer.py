"""The bitwise tokenizer: equal to the official one, shapes of every option, and learned amplitudes."""

import pytest
import torch

from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from tests.support.reference import packed
from tests.support.reference_infinity import tokenizer


@pytest.mark.parametrize("name", ["vae_f16", "vae_f8p"])
@torch.inference_mode()
def test_equals_the_official_tokenizer(name: str) -> None:
    model = tokenizer(name)
    stored, meta = packed(f"{name}.io")
    if name == "vae_f16":
        torch.testing.assert_close(model.encoder(stored["x"]), stored["enc_raw"], atol=1e-4, rtol=0)
    sizes = [(height, width) for _, height, width in meta["scale_schedule"]]
    bits, summed = model.quantize(stored["enc_raw"], sizes)
    for scale, found in enumerate(bits):
        assert torch.equal(found, stored[f"bits{scale}"][:, 0].bool()), f"scale {scale}"
    torch.testing.assert_close(summed, stored["z"], atol=1e-5, rtol=0)
    torch.testing.assert_close(model.decode(stored["z"][:1]), stored["recon"], atol=1e-4, rtol=0)
    rebuilt = torch.zeros_like(summed)
    for scale, found in enumerate(bits):
        rebuilt = model.add(rebuilt, found, scale)
    assert torch.equal(rebuilt, summed)


def test_a_tokenizer_of_every_option_gives_images_back_in_their_shape() -> None:
    widths = {"encoder_widths": (32, 64), "decoder_widths": (64, 32)}
    options = {"blocks": 1, "stem": 2, "mixers": 2, "grid": (4, 4), "scales": 3}
    torch.manual_seed(0)
    model = BSQ(BSQConfig(bits=12, base=32, **widths, **options))
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    latents = model.encoder(images)
    sizes = [(1, 1), (2, 2), (4, 4)]
    bits, summed = model.quantize(latents, sizes)
    assert latents.shape == summed.shape == (2, 12, 4, 4)
    assert [(b.shape, b.dtype) for b in bits] == [((2, *size, 12), torch.bool) for size in sizes]
    decoded = model.decode(summed)
    assert decoded.shape == images.shape
    assert decoded.abs().max() <= 1


def test_amplitudes_are_learned_and_fall() -> None:
    model = BSQ(BSQConfig(bits=4, base=32, encoder_widths=(32,), decoder_widths=(32,), blocks=1, scales=5))
    sizes = [float(model.codes(torch.ones(1), scale).detach().abs().max()) for scale in range(5)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(1.8 / 2)
    model.codes(torch.ones(3), 2).sum().backward()
    assert model.amplitudes.grad is not None
    assert model.amplitudes.grad.nonzero().flatten().tolist() == [2]
