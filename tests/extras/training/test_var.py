"""Training of a class-conditional model: tokens agree with the tokenizer's, scales with the loop's, resumption."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.extras.training import autoencoder
from kvbench.extras.training.images import draw_classes
from kvbench.extras.training.transformer import Stage
from kvbench.extras.training.var import (
    ClassCorpus,
    ClassToTokens,
    VARRecipe,
    VARTokenizerRecipe,
    VARTraining,
    corrected_tokens,
    draw_batch,
    make_tokenizer,
    walk_scales,
)
from kvbench.methods.full import Full
from kvbench.models.var.loop import make_features
from kvbench.models.var.tokenizer import VQVAE, VQConfig, shrink
from kvbench.models.var.transformer import VAR, VARConfig
from kvbench.scenes import grammar
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import exact
from tests.support.engine import open_cache
from tests.support.trainings import check_resumed, check_tokenizer, check_traced, draw_pictures, move_all

SHAPE = VQConfig(16, 8, (32, 32), blocks=1, stem=2)
SIZES = [(1, 1), (2, 2), (3, 3), (4, 4)]
CODES, CLASSES = SHAPE.codes, 5
NEVER = torch.zeros(3)


def _vq() -> VQVAE:
    vq = make_tokenizer(SHAPE, 0)
    torch.nn.init.normal_(vq.quantize.embedding.weight, generator=torch.Generator().manual_seed(5))
    return vq


def _latents(count: int = 3) -> Tensor:
    return torch.randn(count, 8, 4, 4, generator=torch.Generator().manual_seed(1))


def _network() -> ClassToTokens:
    transformer = VAR(VARConfig(2, 32, 2, (1, 2, 3, 4), CLASSES, CODES, 8))
    transformer.init_weights(torch.Generator().manual_seed(2))
    return ClassToTokens(transformer)


def _moved() -> ClassToTokens:
    """A network none of whose layers is at the start that training gives it."""
    network = _network()
    move_all(network)
    return network


def _corpus() -> ClassCorpus:
    labels = torch.arange(32) % CLASSES
    return ClassCorpus(_latents(32).half(), labels, CLASSES)


def test_tokens_that_are_right_are_the_tokenizers() -> None:
    vq, segments = _vq(), _network().transformer.config.segments
    tokens, summed = vq.encode(_latents(), SIZES)
    targets, inputs = corrected_tokens(vq, _latents(), segments, 4, NEVER, torch.Generator())
    assert torch.equal(targets, torch.cat([t.flatten(1) for t in tokens], 1))
    partial = vq.add(torch.zeros_like(summed), vq.codes(tokens[0]), 0, 4)
    torch.testing.assert_close(inputs[:, :4], make_features(partial, segments[1]))
    fewer, read = corrected_tokens(vq, _latents(), segments, 2, NEVER, torch.Generator())
    assert torch.equal(fewer, targets[:, :5])
    assert torch.equal(read, inputs[:, :4])
    always = torch.tensor([0.0, 1.0, 1.0])
    wrong, read = corrected_tokens(vq, _latents(), segments, 4, always, torch.Generator().manual_seed(0))
    assert torch.equal(wrong[:, 0], targets[:, 0])  # the first target does not know of replacements
    assert torch.equal(read[0], inputs[0])
    assert not torch.equal(read[1:], inputs[1:])
    assert not torch.equal(wrong[1:, 1:], targets[1:, 1:])


def test_exact_scales_add_up_to_the_latents_and_codes_to_the_tokenizers_sum() -> None:
    vq = _vq()
    exact = list(walk_scales(vq, _latents(), SIZES, exact=True))
    torch.testing.assert_close(exact[0][0][..., 0, 0], _latents().mean((2, 3)))
    torch.testing.assert_close(exact[-1][1], _latents())
    coded = list(walk_scales(vq, _latents(), SIZES, exact=False))
    torch.testing.assert_close(coded[-1][1], vq.encode(_latents(), SIZES)[1])
    torch.testing.assert_close(coded[1][0], shrink(_latents() - coded[0][1], (2, 2)))


def test_one_pass_is_what_the_cache_computes_scale_by_scale() -> None:
    network, vq = _moved(), _vq()
    transformer = network.transformer
    segments = transformer.config.segments
    _, inputs = corrected_tokens(vq, _latents(), segments, 4, NEVER, torch.Generator())
    labels = torch.tensor([0, 3, CLASSES])
    found = transformer(labels, inputs)
    torch.testing.assert_close(transformer(labels, inputs[:, :4], 2), found[:, :5])
    spec = ModelSpec("tiny", 2, 2, 16, segments, branches=1)
    cache = open_cache(Full(), spec)
    with torch.inference_mode():
        cache.reset(3)
        condition, logits = transformer.condition(labels), []
        for segment in segments:
            cache.begin(segment)
            features = inputs[:, segment.start - 1 : segment.end - 1] if segment.index else None
            logits.append(transformer.scale(segment, condition, features, cache.attend))
    torch.testing.assert_close(found, torch.cat(logits, 1), atol=1e-5, rtol=1e-5)


def test_a_batch_follows_from_its_step() -> None:
    segments = _network().transformer.config.segments
    recipe = VARRecipe(stages=(Stage(2, 200, 1), Stage(4, 8, 1)), wrong=1.0)
    drawn = draw_batch(_corpus(), _vq(), segments, recipe, 0)
    labels, inputs, targets, weights, scales = drawn
    assert (scales, targets.shape, inputs.shape, weights.shape) == (2, (200, 5), (200, 4, 8), (5,))
    assert 0.03 < (labels == CLASSES).float().mean() < 0.2
    again = draw_batch(_corpus(), _vq(), segments, recipe, 0)
    assert all(torch.equal(a, b) for a, b in zip(again[:-1], drawn[:-1], strict=True))
    assert draw_batch(_corpus(), _vq(), segments, recipe, 1)[2].shape == (8, 30)


def test_resumed_training_equals_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = VARRecipe(stages=(Stage(2, 4, 3), Stage(4, 4, 3)), class_dropout=0.5)
    segments = _network().transformer.config.segments
    draw = partial(draw_batch, _corpus(), _vq(), segments, recipe)
    check_resumed(monkeypatch, _network, draw, recipe, tmp_path, partial(recipe.rate_by_cost, segments))


@pytest.mark.slow
def test_a_compiler_traces_the_pass() -> None:
    recipe, segments = VARRecipe(stages=(Stage(4, 3, 1),)), _network().transformer.config.segments
    check_traced(_moved(), *draw_batch(_corpus(), _vq(), segments, recipe, 0))


@pytest.mark.slow
def test_the_tokenizer_trains_everywhere_and_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vq, recipe = make_tokenizer(SHAPE, 0), VARTokenizerRecipe(steps=6, batch=4, free=3, longest_prefix=3)
    # Scales add up to the latents; what their convolutions could add was not needed.
    fixed = [name for name, _ in vq.named_parameters() if name.startswith("quantize.quant_resi")]
    check_tokenizer(vq, recipe, SIZES, tmp_path, fixed)
    monkeypatch.setattr(autoencoder, "ENCODED", 3)
    latents = autoencoder.encode_images(vq.latents, draw_pictures(), torch.device("cpu"), torch.float16)
    assert (latents.shape, latents.dtype) == ((8, 8, 4, 4), torch.float16)


def test_scenes_of_classes_hold_what_their_number_says() -> None:
    images, labels = draw_classes(90, 0, 1)
    assert len(labels.unique()) > 20
    for image, label in zip(images, labels.tolist(), strict=True):
        assert exact(detect(image.numpy()), str(grammar.describe_class(label)["prompt"]))


def test_a_recipe_for_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train: the recipe is for a VARModel; use train=fake"):
        VARTraining(out=str(tmp_path / "new")).train(SimpleNamespace(name="fake"))
    assert not (tmp_path / "new").exists()
