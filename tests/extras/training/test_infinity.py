"""Training: bits agree with the tokenizer's, gradients reach the encoder, a resumed run equals an uninterrupted one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.segments import next_scale
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.extras.training.features import OUTPUTS, FeatureRecipe, train_features
from kvbench.extras.training.infinity import (
    Corpus,
    TextToBits,
    TokenizerRecipe,
    TransformerRecipe,
    draw_batch,
    self_corrected_bits,
    straight_through_sums,
)
from kvbench.extras.training.loop import fit
from kvbench.extras.training.transformer import Stage, fit_transformer
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity, InfinityConfig
from kvbench.models.parts.autoencoder import close_branches
from tests.support.trainings import check_resumed, check_traced, draw_pictures, make_text_encoder

SIZES = [(1, 1), (2, 2), (3, 3), (4, 4)]
SEGMENTS = next_scale(SIZES)


def _tokenizer() -> BSQ:
    torch.manual_seed(0)
    widths = {"encoder_widths": (32, 32), "decoder_widths": (32, 32)}
    return BSQ(BSQConfig(bits=8, base=32, **widths, blocks=1, stem=2, scales=4))


def test_bits_without_flips_are_the_tokenizers_and_flips_are_corrected_later() -> None:
    tokenizer, latents = _tokenizer(), torch.randn(3, 8, 4, 4)
    amplitudes, never, rng = tokenizer.amplitudes.detach(), torch.zeros(3), torch.Generator()
    bits, summed = tokenizer.quantize(latents, SIZES)
    clean, inputs = self_corrected_bits(latents, SIZES, amplitudes, never, rng)
    assert torch.equal(clean, torch.cat([b.flatten(1, 2) for b in bits], 1))
    assert inputs.shape == (3, 4 + 9 + 16, 8)
    sums, _ = straight_through_sums(latents, SIZES, tokenizer.amplitudes, never, rng)
    torch.testing.assert_close(sums[-1], summed)
    always = torch.tensor([0.0, 1.0, 1.0])
    targets, inputs = self_corrected_bits(latents, SIZES, torch.ones(4), always, rng)
    clean, _ = self_corrected_bits(latents, SIZES, torch.ones(4), never, rng)
    assert torch.equal(targets[0], clean[0])
    assert torch.equal(targets[1, 0], clean[1, 0])  # the first target does not know of flips
    first = torch.where(targets[1, 0], -1.0, 1.0) / 8**0.5  # every bit flipped
    torch.testing.assert_close(inputs[1, :4], first.expand(4, 8))


def _corpus() -> Corpus:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 9, (32, 5), generator=rng)
    return Corpus(torch.randn(32, 8, 4, 4, generator=rng).half(), tokens, torch.ones(4))


def _network() -> TextToBits:
    config = InfinityConfig(
        2, 32, 2, 1, 8, text_width=16, text_maxlen=5, rope_grid=(4, 4), levels=4, pool_heads=2, hidden=64
    )
    network = TextToBits(make_text_encoder(), Infinity(config))
    rng = torch.Generator().manual_seed(2)
    network.text.init_weights(rng)
    network.transformer.init_weights(rng)
    return network


RECIPE = TransformerRecipe(stages=(Stage(2, 4, 3), Stage(4, 4, 3)), text_dropout=0.5)


def test_resumed_training_equals_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = partial(draw_batch, _corpus(), SEGMENTS, RECIPE)
    check_resumed(monkeypatch, _network, draw, RECIPE, tmp_path, partial(RECIPE.rate_by_cost, SEGMENTS))
    with pytest.raises(ValueError, match="a different recipe"):
        fit_transformer(
            _network(), draw, replace(RECIPE, flip=0.5), tmp_path / "whole.safetensors", compiled=False
        )


@pytest.mark.slow
def test_a_compiler_traces_the_pass() -> None:
    check_traced(_network(), *draw_batch(_corpus(), SEGMENTS, RECIPE, 3))


def _train_features(path: Path) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = SceneFeatures(OUTPUTS).state_dict()
        torch.manual_seed(99)  # training looks at its own seed alone
        train_features(path, FeatureRecipe(steps=4, batch=4, test=20))
    path.with_suffix(".checkpoint.safetensors").replace(path)
    return before


def _train_transformer(path: Path) -> dict[str, Tensor]:
    network, recipe = _network(), replace(RECIPE, text_dropout=0.1)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    draw = partial(draw_batch, _corpus(), SEGMENTS, recipe)
    fit_transformer(network, draw, recipe, path, partial(recipe.rate_by_cost, SEGMENTS), compiled=False)
    return before


def _train_tokenizer(path: Path) -> dict[str, Tensor]:
    tokenizer = _tokenizer()
    close_branches(tokenizer)
    before = {name: p.detach().clone() for name, p in tokenizer.named_parameters()}
    recipe = TokenizerRecipe(steps=4, batch=4, longest_prefix=3)
    loss = recipe.make_loss(tokenizer, draw_pictures(), SIZES, compiled=False)
    after = fit("tokenizer", tokenizer, recipe, loss, path)
    assert [name for name in before if torch.equal(after[name], before[name])] == []
    return before


@pytest.mark.parametrize(
    ("train", "last", "matrices", "vectors"),
    [
        (_train_tokenizer, 2.750150, 0.0556984, 0.00860165),
        (_train_transformer, 0.701428, 0.141151, 0.0169064),
        (_train_features, 0.698373, 0.0890502, 0.0121244),
    ],
)
def test_training_gives_the_numbers_of_the_first_release(
    train: Callable[[Path], dict[str, Tensor]],
    last: float,
    matrices: float,
    vectors: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Loss of the last step, and how far the averaged weights went, as release 0.1.0 had them."""
    caplog.set_level("INFO", "kvbench.extras.training.loop")
    before = train(tmp_path / "net.safetensors")
    after = checkpoint.group(checkpoint.load(tmp_path / "net.safetensors")[0], "average")
    moved = {name: (after[name] - before[name]).norm() for name in before}
    went = [
        float(torch.stack([d for name, d in moved.items() if (before[name].ndim > 1) == many]).norm())
        for many in (True, False)
    ]
    losses = [record.args[3] for record in caplog.records if record.name == "kvbench.extras.training.loop"]
    assert losses[-1] == pytest.approx(last, rel=1e-3)
    assert went == pytest.approx([matrices, vectors], rel=1e-2)
