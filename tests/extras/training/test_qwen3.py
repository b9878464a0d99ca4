"""Training of the small language model: what it reads, that it resumes, and files that transformers reads."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from kvbench.core.config import ConfigError
from kvbench.extras.training.loop import generator
from kvbench.extras.training.qwen3 import (
    IGNORED_TARGET,
    NextWord,
    Qwen3Training,
    WalkRecipe,
    WalkStage,
    draw_batch,
    number_words,
)
from kvbench.extras.training.transformer import attend_causally, init_decoder
from kvbench.models.files.weights import Source
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_tokens import WordTokens
from tests.puzzles.test_walks import follow
from tests.support.trainings import check_resumed, check_traced

VOCABULARY = list(number_words("room_walk"))
SHAPE = Qwen3Config(
    depth=2, width=16, heads=2, kv_heads=1, head_dim=8, hidden=24, vocabulary=len(VOCABULARY), rope_base=1e4
)
STAGES = (WalkStage(2, 3, 4, batch=6, steps=3), WalkStage(3, 5, 8, batch=4, steps=3))
ROTATION = SHAPE.rotations(80)
RECIPE = WalkRecipe(stages=STAGES)


def network() -> NextWord:
    made = NextWord(TextDecoder(SHAPE))
    init_decoder(made.transformer, generator(0, 3))
    return made


def test_a_batch_asks_for_solutions_alone() -> None:
    recipe, words = WalkRecipe(stages=(WalkStage(2, 5, 12, batch=40, steps=1),)), WordTokens(VOCABULARY)
    tokens, targets, rotation = draw_batch(ROTATION, recipe, 0)
    assert len(rotation) == tokens.shape[1]
    ended = 0
    for read, said in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert all(after in (IGNORED_TARGET, follows) for after, follows in zip(said, read[1:], strict=False))
        asked, solution = (
            words.decode(read[: next(i for i, t in enumerate(said) if t != IGNORED_TARGET) + 1]),
            words.decode([token for token in said if token != IGNORED_TARGET]),
        )
        assert asked.count(" in ") == 3
        assert asked.startswith("doors ")
        assert solution.startswith(f"\n{int(asked.rsplit(chr(10), 1)[1].split()[0]) - 1} ")
        if "answer:" in solution:
            ended += 1
            assert solution.split("answer: ")[1] == follow(asked)
            assert [token for token in said if token != IGNORED_TARGET][-1] == VOCABULARY.index("<end>")
    assert 3 <= ended <= 20


def test_stages_follow_each_other_and_steps_draw_the_same_again() -> None:
    draw = partial(draw_batch, ROTATION, RECIPE)
    assert [draw(step)[0].shape for step in (0, 2, 3, 5)] == [(6, 39)] * 2 + [(4, 59)] * 2
    assert torch.equal(draw(4)[0], draw(4)[0])
    assert not torch.equal(draw(4)[0], draw(5)[0])


def test_an_interrupted_training_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_resumed(monkeypatch, network, partial(draw_batch, ROTATION, RECIPE), RECIPE, tmp_path)


@pytest.mark.slow
def test_a_compiler_follows_the_pass() -> None:
    model = network()
    torch.nn.init.normal_(model.transformer.output.weight)
    check_traced(model, *draw_batch(ROTATION, RECIPE, 0))


def test_what_it_writes_is_read_by_the_harness_and_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = Qwen3Training(out=str(tmp_path), compiled=False, threads=1, transformer=RECIPE).train(_model(SHAPE))
    folder = out / "model"
    model = _model(SHAPE, folder)
    model.load("cpu")
    tokens = model._text.encode("doors a< b a> a b< a b> b\n3 in a\n3 in b\n3 in a")
    ids = torch.tensor([tokens])
    hidden = model._transformer(
        model._transformer.embed(ids), model._transformer.rotations(len(tokens)), attend_causally
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(model._transformer.logits(hidden), theirs, atol=1e-5, rtol=1e-5)
    assert json.loads((folder / "vocabulary.json").read_text()) == list(VOCABULARY)


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(depth=1, width=8, heads=1, kv_heads=1, head_dim=8, hidden=8, vocabulary=9)
    with pytest.raises(ConfigError, match=r"vocabulary=9: must be 441"):
        Qwen3Training(out=str(tmp_path), transformer=RECIPE).train(_model(config))


def _model(config: Qwen3Config, folder: Path | None = None) -> Qwen3Model:
    sources = {"weights": Source("model.sources.weights", str(folder))} if folder else {}
    return Qwen3Model("tiny", config, TextSampling(0), sources, weights="files" if folder else "random")
