"""The bitwise tokenizer: equal to the official one, and shapes and round trips of every option."""

import pytest
import torch

from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from tests.support.reference import packed
from tests.support.reference_infinity import tokenizer


@torch.inference_mode()
def test_encoder_equals_the_official_one() -> None:
    stored, _ = packed("vae_f16.io")
    latents = tokenizer("vae_f16").encoder(stored["x"])
    torch.testing.assert_close(latents, stored["enc_raw"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["vae_f16", "vae_f8p"])
@torch.inference_mode()
def test_quantiser_and_decoder_equal_the_official_ones(name: str) -> None:
    model = tokenizer(name)
    stored, meta = packed(f"{name}.io")
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


CONFIGS = [
    BSQConfig(bits=8, base=32, encoder_widths=(32, 32), decoder_widths=(32, 32), blocks=1),
    BSQConfig(bits=8, base=32, encoder_widths=(32, 64), decoder_widths=(64, 32), blocks=2, stem=2),
    BSQConfig(bits=6, base=24, encoder_widths=(24, 48), decoder_widths=(24, 48), blocks=1, stem=4),
    BSQConfig(
        bits=12, base=32, encoder_widths=(32, 32), decoder_widths=(32, 32), blocks=1, stem=2, mixers=2, grid=(4, 4),
        scales=4,
    ),
    BSQConfig(bits=8, base=32, encoder_widths=(32,), decoder_widths=(32,), blocks=1, stem=4, scales=3),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_images_come_back_in_their_shape(config: BSQConfig) -> None:
    torch.manual_seed(0)
    model = BSQ(config)
    side = 4 * config.networks.patch
    images = torch.rand(2, 3, side, side) * 2 - 1
    latents = model.encoder(images)
    assert latents.shape == (2, config.bits, 4, 4)
    sizes = [(1, 1), (2, 2), (4, 4)]
    bits, summed = model.quantize(latents, sizes)
    assert [b.shape for b in bits] == [(2, *size, config.bits) for size in sizes]
    assert all(b.dtype == torch.bool for b in bits)
    assert summed.shape == latents.shape
    decoded = model.decode(summed)
    assert decoded.shape == images.shape
    assert decoded.abs().max() <= 1
    copy = BSQ(config)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy.decode(summed), decoded)


def test_amplitudes_are_learned_and_fall() -> None:
    model = BSQ(BSQConfig(bits=4, base=32, encoder_widths=(32,), decoder_widths=(32,), blocks=1, scales=5))
    sizes = [float(model.codes(torch.ones(1), scale).detach().abs().max()) for scale in range(5)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(1.8 / 2)
    model.codes(torch.ones(3), 2).sum().backward()
    assert model.amplitudes.grad is not None
    assert model.amplitudes.grad.nonzero().flatten().tolist() == [2]
