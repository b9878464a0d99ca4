"""Training: bits agree with the tokenizer's, gradients reach the encoder, a resumed run equals an uninterrupted one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvbench.core.segments import next_scale
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.models.autoencoder import close_branches
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity, InfinityConfig
from kvbench.models.text import VocabularyConfig, VocabularyEncoder
from kvbench.training import checkpoint
from kvbench.training.features import OUTPUTS, FeatureRecipe, train_features
from kvbench.training.infinity import transformer as training
from kvbench.training.infinity.bits import self_corrected_bits, straight_through_sums
from kvbench.training.infinity.tokenizer import TokenizerRecipe, train_tokenizer
from kvbench.training.infinity.transformer import (
    Corpus,
    TextToBits,
    TransformerRecipe,
    draw_batch,
    train_transformer,
)
from kvbench.training.loop import Recipe, fit
from kvbench.training.optim import Average, Optimizer, warm_hold_decay
from kvbench.training.stages import Stage
from tests.support.trainings import check_resumed, check_traced

SIZES = [(1, 1), (2, 2), (3, 3), (4, 4)]
SEGMENTS = next_scale(SIZES)


def _tokenizer() -> BSQ:
    torch.manual_seed(0)
    return BSQ(
        BSQConfig(
            bits=8, base=32, encoder_widths=(32, 32), decoder_widths=(32, 32), blocks=1, stem=2, scales=4
        )
    )


@pytest.fixture
def tokenizer() -> BSQ:
    return _tokenizer()


def test_bits_without_flips_are_the_tokenizers(tokenizer: BSQ) -> None:
    latents = torch.randn(3, 8, 4, 4)
    bits, summed = tokenizer.quantize(latents, SIZES)
    never = torch.zeros(3)
    targets, inputs = self_corrected_bits(
        latents, SIZES, tokenizer.amplitudes.detach(), never, torch.Generator()
    )
    assert torch.equal(targets, torch.cat([b.flatten(1, 2) for b in bits], 1))
    assert inputs.shape == (3, 4 + 9 + 16, 8)
    sums, _ = straight_through_sums(latents, SIZES, tokenizer.amplitudes, never, torch.Generator())
    torch.testing.assert_close(sums[-1], summed)


def test_flips_change_inputs_and_are_corrected_later() -> None:
    latents, amplitudes = torch.randn(2, 8, 4, 4), torch.ones(4)
    always = torch.tensor([0.0, 1.0])
    targets, inputs = self_corrected_bits(latents, SIZES, amplitudes, always, torch.Generator())
    clean, _ = self_corrected_bits(latents, SIZES, amplitudes, torch.zeros(2), torch.Generator())
    assert torch.equal(targets[0], clean[0])
    assert torch.equal(targets[1, 0], clean[1, 0])  # the first target does not know of flips
    first = torch.where(targets[1, 0], -1.0, 1.0) / 8**0.5  # every bit flipped
    torch.testing.assert_close(inputs[1, :4], first.expand(4, 8))


def test_gradients_reach_the_encoder_from_any_prefix(tokenizer: BSQ) -> None:
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    for scale in range(4):
        tokenizer.zero_grad()
        sums, _ = straight_through_sums(
            tokenizer.encoder(images), SIZES, tokenizer.amplitudes, torch.zeros(2), torch.Generator()
        )
        tokenizer.decoder(sums[scale]).square().mean().backward()
        gradient = tokenizer.encoder.conv_in.conv.weight.grad
        assert gradient is not None
        assert gradient.abs().max() > 0


def _corpus() -> Corpus:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 9, (32, 5), generator=rng)
    return Corpus(torch.randn(32, 8, 4, 4, generator=rng).half(), tokens, torch.ones(4))


def _network() -> TextToBits:
    text = VocabularyEncoder(VocabularyConfig(words=9, longest=5, width=16, layers=1, heads=2))
    config = InfinityConfig(
        2, 32, 2, 1, 8, text_width=16, text_maxlen=5, rope_grid=(4, 4), levels=4, pool_heads=2, hidden=64
    )
    network = TextToBits(text, Infinity(config))
    rng = torch.Generator().manual_seed(2)
    network.text.init_weights(rng)
    network.transformer.init_weights(rng)
    return network


def _train(path: Path) -> dict[str, Tensor]:
    recipe = TransformerRecipe(stages=(Stage(2, 4, 3), Stage(4, 4, 3)))
    return train_transformer(_network(), _corpus(), SEGMENTS, recipe, path, compiled=False)


def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumed(monkeypatch, training, _train, tmp_path)


def test_a_compiler_traces_the_pass() -> None:
    recipe = TransformerRecipe(stages=(Stage(4, 4, 1),))
    tensors, segments = draw_batch(_corpus(), SEGMENTS, recipe, 0)
    check_traced(_network(), *tensors, segments)


def _train_features(path: Path) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = SceneFeatures(OUTPUTS).state_dict()
    train_features(path, FeatureRecipe(steps=4, batch=4, test=20))
    return before


def _train_transformer(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = _network()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    recipe = TransformerRecipe(stages=(Stage(2, 4, 3), Stage(4, 4, 3)))
    train_transformer(network, _corpus(), SEGMENTS, recipe, path, compiled=False)
    return before


def _train_tokenizer(path: Path) -> dict[str, Tensor]:
    tokenizer = _tokenizer()
    close_branches(tokenizer)
    before = {name: p.detach().clone() for name, p in tokenizer.named_parameters()}
    images = torch.randint(256, (8, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    recipe = TokenizerRecipe(steps=4, batch=4, longest_prefix=3)
    train_tokenizer(tokenizer, images, SIZES, recipe, path, compiled=False)
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
    with caplog.at_level("INFO", "kvbench.training.loop"):
        before = train(tmp_path / "net.safetensors")
    (path,) = (
        tmp_path.glob("*.checkpoint.safetensors")
        if train is _train_features
        else [tmp_path / "net.safetensors"]
    )
    after = checkpoint.group(checkpoint.load(path)[0], "average")
    moved = {name: (after[name] - before[name]).norm() for name in before}
    went = [
        float(torch.stack([d for name, d in moved.items() if (before[name].ndim > 1) == many]).norm())
        for many in (True, False)
    ]
    losses = [record.args[3] for record in caplog.records if record.name == "kvbench.training.loop"]
    assert losses[-1] == pytest.approx(last, rel=1e-3)
    assert went == pytest.approx([matrices, vectors], rel=1e-2)


def test_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    _train(path)
    with pytest.raises(ValueError, match="another recipe"):
        train_transformer(
            _network(), _corpus(), SEGMENTS, TransformerRecipe(stages=(Stage(2, 4, 1),)), path, compiled=False
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_training(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(FloatingPointError, match=f"net: the loss is {value} at step 0"):
        fit(
            "net",
            model,
            Recipe(0.1, 0.1, 0.9),
            lambda _: model.weight.square().sum() * value,
            tmp_path / "c.safetensors",
            steps=2,
            rate=lambda _: 1.0,
            hidden=lambda _: True,
        )
    assert torch.equal(model.weight, before)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(model, lambda name: name.startswith("0"), muon=0.1, adamw=0.01)
    average = Average(model, 0.5)
    rows, columns = torch.linalg.qr(torch.randn(4, 4)).Q, torch.linalg.qr(torch.randn(18, 4)).Q
    gradient = rows @ torch.diag(torch.tensor([1.0, 0.5, 0.25, 0.125])) @ columns.T
    ((model[0].weight.flatten(1) * gradient).sum() + model[2].weight.sum()).backward()
    optimizer.step(1.0)
    average.update(0)
    change = [(a - b).detach() for a, b in zip(model.parameters(), before, strict=True)]
    # Muon keeps the gradient's singular vectors and makes its singular values, 1 to 8, nearly equal; AdamW's first
    # step moves each weight by the rate.
    strength = rows.T @ -change[0].flatten(1) @ columns
    assert strength.diagonal().max() < 2 * strength.diagonal().min()
    assert (strength - torch.diag(strength.diagonal())).abs().max() < 0.05 * strength.max()
    torch.testing.assert_close(change[2].abs(), torch.full_like(change[2], 0.01), rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_train_in_any_memory_layout(layout: torch.memory_format) -> None:
    model = nn.Conv2d(2, 4, 3).to(memory_format=layout)
    before = model.weight.detach().clone()
    model(torch.randn(1, 2, 3, 3)).sum().backward()
    if layout == torch.channels_last:  # no view is possible: refusing is right, training a copy is not
        with pytest.raises(RuntimeError, match="view"):
            Optimizer(model, lambda _: True, muon=0.1, adamw=0.01)
        return
    Optimizer(model, lambda _: True, muon=0.1, adamw=0.01).step(1.0)
    assert not torch.equal(model.weight, before)


def test_every_tokenizer_parameter_trains(tokenizer: BSQ, tmp_path: Path) -> None:
    close_branches(tokenizer)
    before = {name: p.detach().clone() for name, p in tokenizer.named_parameters()}
    images = torch.randint(256, (8, 16, 16, 3), dtype=torch.uint8)
    recipe = TokenizerRecipe(steps=4, batch=4, longest_prefix=3)
    train_tokenizer(tokenizer, images, SIZES, recipe, tmp_path / "t.safetensors", compiled=False)
    assert [name for name, p in tokenizer.named_parameters() if torch.equal(p, before[name])] == []


def test_learning_rate_warms_up_holds_and_decays() -> None:
    assert warm_hold_decay(0, 0.0) == pytest.approx(1 / 40)
    assert warm_hold_decay(100, 0.3) == 1.0
    assert warm_hold_decay(100, 0.7) == pytest.approx(0.51)
    assert warm_hold_decay(100, 1.0) == pytest.approx(0.02)
