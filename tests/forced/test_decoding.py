"""A language model that reads a text under a method, beside attention with a mask that leaves out what was evicted."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.tape import Tape
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.engine.cache import KVCache
from kvbench.forced.decoding import ForcedDecoding, ForcedOutputs
from kvbench.forced.given import GivenTexts
from kvbench.forced.passes import ForcedPass, ForcedScales
from kvbench.forced.text import ForcedText, Part
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.prompts.texts import Texts
from tests.support.engine import open_cache
from tests.support.reference_llamagen import PlainCache
from tests.support.small_models import SMALL_QWEN3, configured, load

CAPACITY = 9
TEXTS = {"one": 40, "two": 37}


@pytest.fixture(scope="module")
def reader() -> GivenTexts:
    model = load(*SMALL_QWEN3)
    words = {
        prompt: " ".join(f"{prompt}{number}" for number in range(count)) for prompt, count in TEXTS.items()
    }
    readings = {prompt: ForcedText((Part(text),), given=TEXTS[prompt] - 19) for prompt, text in words.items()}
    return GivenTexts(model, readings, {})


def read(
    reader: ForcedDecoding,
    method: Method,
    budget: str,
    prompts: list[str],
    tokens: list[Tensor] | None = None,
) -> list[ForcedPass]:
    method.prepare(reader.spec, Budget.parse(budget, reader.spec))
    cache = KVCache(reader.spec, method, dtype=torch.float32, rotation=reader.key_rotation())
    return reader.read(prompts, cache, PromptNoise(0, range(len(prompts))), tokens)


def test_texts_of_a_given_length_are_planned_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of `model=qwen3_8b` and its default prompts, without the Hub."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network is asked")

    monkeypatch.setattr("kvbench.models.files.weights.list_part", refuse)
    readings = {
        prompt.text: prompt.reading for prompt in Texts().load() if isinstance(prompt.reading, ForcedText)
    }
    spec = GivenTexts(configured("model=qwen3_8b"), readings, {}).spec
    assert spec.lengths == (4, *[128] * 5, 127)
    assert (spec.layers, spec.heads, spec.head_dim) == (36, 8, 128)


def test_the_full_cache_reads_as_plain_attention(reader: GivenTexts) -> None:
    for passed, prompt in zip(read(reader, Full(), "1", list(TEXTS)), TEXTS, strict=True):
        laid = reader._tokenize(prompt)
        rows = torch.tensor(laid.tokens[:-1])[None]
        segments = reader.schedule.segments[-1:]
        whole = (segments[0]._replace(index=0, start=0, width=rows.shape[1]),)
        plain = reader.inner.read_states(rows, whole, PlainCache(), [0], laid.given - 1)[0]
        torch.testing.assert_close(passed.states, plain, rtol=1e-4, atol=1e-4)
        assert passed.tokens.tolist() == list(laid.tokens[laid.given :])


def test_a_compressed_cache_reads_as_attention_to_what_is_kept(reader: GivenTexts) -> None:
    ends = [segment.end for segment in reader.spec.segments]

    def sees(query: int, key: int) -> bool:
        """The newest tokens when the query's segment began, and the segment."""
        start = max([end for end in ends if end <= query], default=0)
        return start - CAPACITY <= key <= query

    [passed] = read(reader, StreamingLLM(sinks=0), str(CAPACITY), ["one"])
    laid = reader._tokenize("one")
    rows = torch.tensor(laid.tokens[:-1])[None]
    masked = reader.inner.read_states(rows, reader.spec.segments, PlainCache(sees), [0], laid.given - 1)[0]
    full = read(reader, Full(), "1", ["one"])[0].states
    torch.testing.assert_close(passed.states, masked, rtol=1e-4, atol=1e-4)
    assert (passed.states - full).abs().max() > 0.1


def test_a_text_does_not_depend_on_its_batch(reader: GivenTexts) -> None:
    together = read(reader, StreamingLLM(sinks=0), str(CAPACITY), list(TEXTS))
    for prompt, passed in zip(TEXTS, together, strict=True):
        [alone] = read(reader, StreamingLLM(sinks=0), str(CAPACITY), [prompt])
        torch.testing.assert_close(passed.states, alone.states, rtol=1e-4, atol=1e-4)


def test_storage_in_fixed_places_reads_the_same(reader: GivenTexts) -> None:
    """As on a GPU, where one-token steps are recorded and the rows of the cache have fixed places."""
    method = H2O(sinks=0)
    plain = read(reader, method, str(CAPACITY), list(TEXTS))
    cache = KVCache(reader.spec, method, dtype=torch.float32, rotation=reader.key_rotation(), record=Tape())
    for _ in range(2):
        fixed = reader.read(list(TEXTS), cache, PromptNoise(0, range(2)), None)
    for one, other in zip(plain, fixed, strict=True):
        torch.testing.assert_close(one.states, other.states)


def test_predictions_are_compared_with_cross_entropy_and_spelled(reader: GivenTexts) -> None:
    [full], [ours] = (read(reader, *how, ["one"]) for how in ((Full(), "1"), (StreamingLLM(sinks=0), "9")))
    text = reader.compare(ours, full.states)
    logits = [reader.inner.find_logits(one.states, 0) for one in (ours, full)]
    for values, own in zip((text.nll, text.nll_full), logits, strict=True):
        expected = F.cross_entropy(own, ours.tokens, reduction="none")
        torch.testing.assert_close(torch.from_numpy(values), expected)
    assert text.kl.max() > 1e-3
    assert text.states is None
    assert len(text.tokens) == 19
    named = {*text.tokens.tolist(), *text.likeliest.tolist(), *text.likeliest_full.tolist()}
    assert text.words == {token: f"w{token}" if token != 1 else "" for token in sorted(named)}
    same = reader.compare(full, None)
    assert same.kl.max() == 0
    assert same.same.all()
    assert torch.equal(same.states, full.states)


def test_longer_texts_and_models_of_images_are_refused(
    reader: GivenTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reader.inner
    long = {"long": ForcedText((Part(" ".join(map(str, range(90)))),), given=80)}
    with pytest.raises(ValueError, match=f"80 tokens are given, more than the {reader.schedule.given} of"):
        GivenTexts(model, reader._texts, long).check_prompts(["one", "long"])
    monkeypatch.setattr(model, "transformer", replace(model.transformer, context=39))
    with pytest.raises(ConfigError, match="supports at most 39 tokens"):
        _ = GivenTexts(model, reader._texts, {}).spec
    with pytest.raises(ConfigError, match="texts need a language model, and llamagen_tiny is not one"):
        GivenTexts(load("model=llamagen_tiny"), {}, {})


def test_a_revision_of_draws_is_one_of_own_outputs(reader: GivenTexts) -> None:
    """Other draws are other own outputs; given texts do not depend on draws."""
    sampling = TextSampling(temperature=1.0, top_p=0.5)
    model = replace(reader.inner, sampling=sampling)
    assert (model.revision, ForcedOutputs(model).revision) == (2, 2)
    assert GivenTexts(model, reader._texts, {}).revision == 0


OWN = {
    "llamagen_tiny": ["a red circle on blue", "two green squares on dark red"],
    "infinity_tiny": ["a red circle on blue", "two green squares on dark red"],
    "var_tiny": ["3", "17"],
}


@pytest.fixture(scope="module", params=list(OWN))
def own(request: pytest.FixtureRequest) -> ForcedOutputs:
    return ForcedOutputs(load(f"model={request.param}"))


@pytest.fixture(scope="module")
def drawn(own: ForcedOutputs) -> list[ForcedPass]:
    return read(own, Full(), "1", OWN[own.name])


def test_an_image_is_read_as_it_was_drawn(own: ForcedOutputs, drawn: list[ForcedPass]) -> None:
    """The same tokens under the full cache predict what they predicted when they were drawn."""
    prompts = OWN[own.name]
    numbers = [torch.from_numpy(own.compare(one, None).tokens).long() for one in drawn]
    again = read(own, Full(), "1", prompts, numbers)
    for first, second in zip(drawn, again, strict=True):
        assert torch.equal(first.tokens, second.tokens)
        torch.testing.assert_close(first.states, second.states, rtol=1e-4, atol=1e-4)
    other = read(own, StreamingLLM(sinks=0), "0.1", prompts, numbers)
    for first, second in zip(drawn, other, strict=True):
        assert torch.equal(first.tokens, second.tokens)
        text = own.compare(second, first.states)
        assert text.kl.mean() > 1e-3
        assert sum(text.groups) == len(text.tokens)
        assert not text.words
    if own.name != "llamagen_tiny":  # forced scales give the image that drew them
        caches = [open_cache(Full(), own.spec) for _ in range(2)]
        with torch.inference_mode():
            plain = own.inner._draw(prompts, caches[0], PromptNoise(0, range(2)))
            forced = own.inner._draw(prompts, caches[1], PromptNoise(1, range(2)), ForcedScales(numbers))
        torch.testing.assert_close(forced, plain)
