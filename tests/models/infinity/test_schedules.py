"""Infinity's schedules, positions, draw of bits and tokenizer: equal to the official ones."""

import gzip
import json

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import next_scale
from kvbench.models.infinity import rope
from kvbench.models.infinity.sampling import Sampling, probabilities
from kvbench.models.infinity.scales import SCALES, TEMPLATES, schedule
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from tests.support.reference import GOLDEN, packed
from tests.support.reference_infinity import tokenizer


def test_schedules_and_positions_equal_the_published_ones() -> None:
    tables = np.load(GOLDEN / "rope.npz")
    published = json.loads(gzip.decompress((GOLDEN / "schedules.json.gz").read_bytes()))
    assert sorted(map(float, published)) == sorted(TEMPLATES)
    for ratio, entries in published.items():
        sizes = TEMPLATES[float(ratio)]
        found = torch.cat([rope.place_tokens(height, width, sizes[-1]) for height, width in sizes])
        assert np.array_equal(found.numpy(), tables[f"ratio_{float(ratio):g}"])
        assert set(entries) == set(SCALES)
        for pixels, entry in entries.items():
            assert [list(size) for size in schedule(float(ratio), pixels)] == entry["hw"]
    rotation = rope.compute_rotations(next_scale(TEMPLATES[1]), (64, 64), 128, 10_000.0, "cpu")
    assert rotation.shape == (10_521, 64)
    angles = torch.view_as_real(rotation[:521:8]).movedim(2, 0)
    torch.testing.assert_close(angles, torch.from_numpy(tables["cos_sin"]), atol=1e-5, rtol=0)


def truncated(logits: Tensor, top_p: float) -> Tensor:
    """The official truncation of one bit, value by value: ascending, dropped while rare in sum, never the last."""
    p = logits.softmax(-1)
    ascending = sorted(range(2), key=lambda value: float(logits[value]))
    kept, total = p.clone(), torch.zeros(())
    for value in ascending[:-1]:
        total += p[value]
        if total <= 1 - top_p:
            kept[value] = 0
    return kept / kept.sum()


@given(
    first=st.floats(-20, 20, width=32),
    second=st.floats(-20, 20, width=32),
    top_p=st.one_of(st.sampled_from((0.01, 0.3, 0.5, 0.51, 0.97, 1.0)), st.floats(1e-6, 1)),
)
@example(first=0.0, second=0.0, top_p=0.4)
@example(first=0.0, second=0.0, top_p=0.5)
@example(first=0.0, second=0.0, top_p=0.6)
def test_truncation_is_the_official_one_at_any_top_p(first: float, second: float, top_p: float) -> None:
    logits = torch.tensor([first, second])
    found = probabilities(logits, Sampling(top_p=top_p))
    torch.testing.assert_close(found, truncated(logits, top_p))


def test_settings_per_scale() -> None:
    assert Sampling(cfg=2.0, tau=(1.0, 0.5, 0.25)).per_scale(2) == ((2.0, 1.0), (2.0, 0.5))
    with pytest.raises(ValueError, match=r"model.sampling.tau: needs 4 values, not 3"):
        Sampling(tau=(1.0, 0.5, 0.25)).per_scale(4)


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


def test_amplitudes_are_learned_and_fall() -> None:
    model = BSQ(BSQConfig(bits=4, base=32, encoder_widths=(32,), decoder_widths=(32,), blocks=1, scales=5))
    sizes = [float(model.codes(torch.ones(1), scale).detach().abs().max()) for scale in range(5)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(1.8 / 2)
    model.codes(torch.ones(3), 2).sum().backward()
    assert model.amplitudes.grad is not None
    assert model.amplitudes.grad.nonzero().flatten().tolist() == [2]
