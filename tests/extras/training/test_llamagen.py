"""Training of the next-token model: codes that cover what there is, one causal pass, resumed equals uninterrupted."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec
from kvbench.extras.training.llamagen import (
    CaptionToTokens,
    NextTokenRecipe,
    TokenCorpus,
    VQRecipe,
    draw_batch,
    encode,
)
from kvbench.methods.full import Full
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from tests.support.engine import open_cache
from tests.support.trainings import (
    check_resumed,
    check_tokenizer,
    check_traced,
    draw_pictures,
    make_text_encoder,
    move_all,
)

CODES = 16


def _vq() -> VQ:
    torch.manual_seed(0)
    return VQ(VQConfig(codes=CODES, channels=4, latents=32, widths=(32, 32), blocks=1, stem=2))


def _network() -> CaptionToTokens:
    config = LlamaGenConfig(
        depth=2, width=32, heads=2, kv_heads=2, head_dim=16, hidden=48, vocabulary=CODES, grid=(4, 4), text_width=16,
        text_tokens=5, condition_keys=True,
    )  # fmt: skip
    network = CaptionToTokens(make_text_encoder(), LlamaGen(config))
    network.init_weights(torch.Generator().manual_seed(2))
    return network


def _corpus() -> TokenCorpus:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(CODES, (32, 16), generator=rng).short()
    return TokenCorpus(tokens, torch.randint(1, 9, (32, 5), generator=rng))


def test_the_tokenizer_trains_everywhere_and_encodes_to_its_codes(tmp_path: Path) -> None:
    model, recipe = _vq(), VQRecipe(steps=6, batch=4, free=3)
    check_tokenizer(model, recipe, (), tmp_path)
    tokens = encode(model, draw_pictures(), torch.device("cpu"))
    assert tokens.shape == (8, 16)
    assert tokens.dtype == torch.int16
    assert 0 <= tokens.min() <= tokens.max() < CODES


def test_one_pass_is_what_the_cache_computes_token_by_token() -> None:
    network, corpus = _network(), _corpus()
    move_all(network)
    words, targets = corpus.words[:3], corpus.tokens[:3].long()
    dropped = torch.tensor([False, True, False])
    found = network(words, dropped, targets, targets)
    transformer, config = network.transformer, network.transformer.config
    segments = config.segments(config.condition)
    spec = ModelSpec(
        "tiny", config.depth, config.kv_heads, config.head_dim, segments, 1, config.head_dim**-0.5
    )
    cache = open_cache(Full(), spec)
    with torch.inference_mode():
        embed = transformer.cls_embedding
        features = network.text(words)
        features[dropped] = embed.uncond_embedding
        x, rotation = embed(features, guided=False), config.rotations(config.condition + config.tokens)
        cache.reset(3)
        losses, step = [], 0
        for segment in segments:
            cache.begin(segment)
            for start in range(segment.start, segment.end, x.shape[1]):
                hidden = transformer(x, rotation[start : start + x.shape[1]], cache.attend)
                losses.append(F.cross_entropy(transformer.logits(hidden[:, -1]), targets[:, step]))
                x, step = transformer.tok_embeddings(targets[:, step])[:, None], step + 1
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_wrong_tokens_are_read_and_never_learnt() -> None:
    corpus = _corpus()
    recipe = NextTokenRecipe(steps=1, batch=400, wrong=1.0)
    _, dropped, inputs, targets = draw_batch(corpus, recipe, CODES, 0)
    known = {tuple(row) for row in corpus.tokens.tolist()}
    assert {tuple(row) for row in targets.tolist()} <= known
    right = (inputs == targets).float().mean(1)
    assert (right == 1).float().mean() > 0.4  # every second sample has none
    assert right.min() < 0.2
    assert 0.05 < dropped.float().mean() < 0.16
    again = draw_batch(corpus, recipe, CODES, 0)
    assert torch.equal(again[2], inputs)


def test_resumed_training_equals_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = NextTokenRecipe(steps=6, batch=4, text_dropout=0.5)
    check_resumed(monkeypatch, _network, partial(draw_batch, _corpus(), recipe, CODES), recipe, tmp_path)


@pytest.mark.slow
def test_a_compiler_traces_the_pass() -> None:
    check_traced(_network(), *draw_batch(_corpus(), NextTokenRecipe(steps=1, batch=3), CODES, 0))
