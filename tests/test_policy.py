"""Policies: a program that reads the file keeps what the engine keeps, layer by layer and head by head."""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from kvbench.core import checkpoint
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import build_schedule
from kvbench.methods.first_scales import FirstScales
from kvbench.methods.heatkv.method import BinaryHeatKV, HeatKV
from kvbench.methods.pricekv.blocks import PriceKVBlocks
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.policy import export_policy, tabulate_precisions
from kvbench.prompts.base import Prompt
from tests.support.engine import small
from tests.support.fake_run import job_in
from tests.support.marks import slow_except
from tests.support.places import ROOT
from tests.support.small_models import SMALL_QWEN3, configured

CAPTIONS = ["a red circle", "two blue squares above a green triangle"]
CLASSES = ["3", "7"]


EXAMPLE = SimpleNamespace(**run_path(str(ROOT / "docs" / "examples" / "kvbench_policy.py")))
"""The file that users copy, read where it lies."""


@lru_cache
def load(name: str) -> Any:
    """An embedded model; of LlamaGen's the first five rows of its image."""
    model = configured(f"model={name}")
    if name == "llamagen_tiny":
        model = replace(model, transformer=replace(model.transformer, grid=(5, 16)))
    model.load("cpu")
    return model


class Beside(KVCache):
    """The engine's cache, and beside it the example's, which must attend to the same keys and hold the same tokens."""

    compared = 0

    def follow(self, policy: Any) -> None:
        self.policy = policy

    def reset(self, sequences: int, padding: Any = None) -> None:
        super().reset(sequences, padding)
        self.padding = torch.tensor(padding or [0] * sequences)
        if sequences:
            self.beside = [EXAMPLE.LayerCache(self.policy, layer) for layer in range(self.spec.layers)]

    def begin(self, segment: Segment) -> None:
        super().begin(segment)
        if segment.index:
            for layout, cache in zip(self.held.layouts, self.beside, strict=True):
                self.check_positions(layout.positions, cache.positions)

    def check_positions(self, held: Tensor, found: Tensor) -> None:
        padding = self.padding.repeat_interleave(self.spec.heads) if self.padding.any() else torch.tensor([0])
        for row, positions in enumerate(held):
            own = found[row % self.spec.heads]
            assert positions[positions >= 0].tolist() == own[own >= padding[row % len(padding)]].tolist()
            self.compared += 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Any = None) -> Tensor:
        out = super().attend(layer, q, k, v, raw_queries)
        cache = self.beside[layer]
        start = cache.seen
        keys, values, positions = cache.update(k, v)
        mask = torch.ones(len(q), 1, q.shape[2], cache.seen, dtype=torch.bool)
        if self.segment.causal:
            mask = mask.tril(start) & (torch.arange(cache.seen) >= self.padding[:, None, None, None])
        mask = EXAMPLE.select_mask(mask, positions)
        expected = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.spec.logit_scale)
        real = torch.arange(start, cache.seen) >= self.padding[:, None]
        torch.testing.assert_close(*(x.transpose(1, 2)[real] for x in (out, expected)), atol=1e-5, rtol=1e-5)
        return out


def export(folder: Path, model: Any, method: Method, prompts: list[str], budget: float | str) -> Path:
    path = folder / "policy.safetensors"
    texts = [Prompt(index, text) for index, text in enumerate(prompts)]
    more = {"prompts": texts, "calibration_prompts": texts, "budget": budget}
    export_policy(job_in(folder, model=model, method=method, **more), path)
    return path


@pytest.mark.parametrize(
    ("name", "method", "prompts", "budget"),
    slow_except(
        lambda case: case[0] == "var_tiny",
        [
            ("infinity_tiny", HeatKV(sinks=1), CAPTIONS, 0.1),
            ("var_tiny", BinaryHeatKV(sinks=1, fill=True), CLASSES, 0.2),
            ("var_tiny", FirstScales(), CLASSES, 0.1),
            ("llamagen_tiny", StreamingLLM(sinks=1), CAPTIONS, 0.5),
            ("llamagen_tiny", PriceKVBlocks(sinks=1, queries=2), CAPTIONS, 0.4),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_policy_keeps_what_the_engine_keeps(
    name: str, method: Method, prompts: list[str], budget: float, tmp_path: Path
) -> None:
    model = load(name)
    policy = EXAMPLE.Policy(export(tmp_path, model, method, prompts, budget))
    cache = Beside(model.spec, method, dtype=torch.float32)
    cache.follow(policy)
    model.generate(prompts, cache, PromptNoise(0, (0, 1)))
    assert cache.compared >= model.spec.all_heads * (len(model.spec.segments) - 1)
    stated = policy.metadata["budget"]
    assert cache.ledger.peak_tokens <= stated["peak_tokens"] <= stated["capacity_tokens"]
    assert cache.ledger.peak_tokens == stated["peak_tokens"] or name == "llamagen_tiny"  # prompts are padded


def test_a_policy_names_what_it_was_made_of(tmp_path: Path) -> None:
    model = load("infinity_tiny")
    path = export(tmp_path, model, HeatKV(sinks=1), CAPTIONS, 0.1)
    tensors, metadata = checkpoint.load(path)
    [calibration] = (tmp_path / "infinity_tiny").glob("calibration-*.safetensors")
    assert metadata["calibration_sha256"] == hash_path(calibration)
    assert metadata["model"] == {
        "name": "infinity_tiny", "family": "next-scale", "layers": 6, "kv_heads": 6, "query_heads": 6,
        "head_dim": 32, "sequences_per_prompt": 2, "weights_sha256": model.weights_sha256,
    }  # fmt: skip
    assert metadata["segments"] == [[n, n] for n in (1, 2, 3, 4, 5, 6, 8, 10, 12)]
    assert set(tensors) == {"dropped_after"}
    table = tensors["dropped_after"]
    assert (table.dtype, tuple(table.shape)) == (torch.int32, (6, 6, 255))
    assert (table[:, :, 0] == 8).all(), "the sink stays to the end"
    assert int((table == 8).sum()) < metadata["budget"]["capacity_tokens"] == 918  # type: ignore[index]


def test_precisions_are_those_of_the_method() -> None:
    spec = small(sides=(1, 2, 3, 4))
    method = PriceKVBlocks(menu=(16, 4), share=True)
    bytes_ = Budget.parse_bytes("0.4", spec, 2 * 2 * spec.head_dim)
    method.prepare(spec, bytes_, method.needs().make_random_artifact(spec))
    tensors = tabulate_precisions(spec, method)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "bits": (3, 2, 3),
        "shared": (3, 2, 3),
    }
    for segment, layer in product(spec.segments[:-1], range(2)):
        expected = method.precisions(layer, segment)
        assert expected is not None
        bits, shared = (tensors[name][segment.index, layer].tolist() for name in ("bits", "shared"))
        assert (bits, shared) == ([form.bits for form in expected], [form.shared for form in expected])
    assert len(tensors["bits"].unique()) > 1


def mask_of(spec: ModelSpec, method: Method, first: int) -> Tensor:
    """What each token sees of the engine's cache, and of its own segment: bool [tokens, tokens] from `first` on."""
    schedule = build_schedule(spec, method)
    seen = torch.zeros(spec.segments[-1].end, spec.segments[-1].end, dtype=torch.bool)
    for segment in spec.segments:
        if segment.index:
            rows = [schedule[layer, segment.index - 1].layout.positions for layer in range(spec.layers)]
            assert all(torch.equal(row, rows[0][0]) for positions in rows for row in positions)
            seen[segment.start : segment.end, rows[0][0]] = True
        own = slice(segment.start, segment.end)
        seen[own, own] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
    return seen[first:, first:]


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize(
    ("attention", "prompt"),
    [("sdpa", 5), *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("sdpa", 8), ("eager", 7)))],
)
def test_transformers_write_with_a_policy(attention: str, prompt: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, method = configured(*SMALL_QWEN3, "model.max_tokens=33"), StreamingLLM(sinks=1)
    policy = EXAMPLE.Policy(export(tmp_path, ours, method, [], 20))
    config = transformers.Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(1, 60, (2, prompt))
    cache = EXAMPLE.open_transformers_cache(policy, prompt)
    with pytest.raises(ValueError, match="prompt of 9 tokens: the policy is for 8 at most"):
        EXAMPLE.open_transformers_cache(policy, 9)
    options = {"max_new_tokens": 33, "do_sample": False, "eos_token_id": None}
    written = model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == prompt + 32
    assert [layer.keys.shape[2] for layer in cache.layers] == [20 + 8 - (8 - prompt)] * 2

    seen = mask_of(ours.spec, method, 8 - prompt)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(written[:, :-1], attention_mask=mask[None, None], use_cache=False).logits
    assert torch.equal(logits[:, prompt - 1 :].argmax(-1), written[:, prompt:])
    assert not torch.equal(model.generate(ids, **options), written)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), written)


def test_what_no_policy_can_be_made_of_or_does_not_fit_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    with pytest.raises(ConfigError, match=r"export.policy=.*decides from the cache .* runs; take one"):
        export_policy(job_in(tmp_path, method=SnapKV(sinks=1)), path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be written"):
        export_policy(job_in(tmp_path), tmp_path)
    ours = configured(*SMALL_QWEN3, "model.max_tokens=33")
    policy = EXAMPLE.Policy(export(tmp_path, ours, StreamingLLM(sinks=1), [], 20))
    tokens = torch.zeros(1, policy.heads, policy.ends[-1] + 1, 16)
    with pytest.raises(ValueError, match="token 41 came; the policy is for 40"):
        EXAMPLE.LayerCache(policy, 0).update(tokens, tokens)
    pytest.importorskip("transformers")
    policy.dropped_after[0, 0] = 0
    with pytest.raises(ValueError, match="heads keep different numbers of tokens"):
        EXAMPLE.open_transformers_cache(policy, 1)
    save_file({"dropped_after": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no policy of kvbench, version 1"):
        EXAMPLE.Policy(path)


def test_tokens_that_come_in_any_pieces_are_kept_alike(tmp_path: Path) -> None:
    """A prompt with the first chunks, one token after the other, or pieces across segments."""
    ours = configured(*SMALL_QWEN3, "model.max_tokens=33")
    policy = EXAMPLE.Policy(export(tmp_path, ours, StreamingLLM(sinks=1), [], 20))
    keys = torch.randn(1, policy.heads, 35, 16)
    held = []
    for pieces in ([35], [1] * 35, [8, 8, 8, 8, 3], [13, 9, 13]):
        cache = EXAMPLE.LayerCache(policy, 1)
        for piece in keys.split(pieces, 2):
            cache.update(piece, -piece)
        assert torch.equal(cache.keys, -cache.values)
        assert torch.equal(cache.keys, keys[:, :, cache.positions[0]])
        held.append(cache.positions)
    assert all(torch.equal(positions, held[0]) for positions in held)
    assert held[0].shape[1] == 20 + 3
