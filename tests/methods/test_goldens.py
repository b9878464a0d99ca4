"""Methods against what other authors' programs score and keep on the same tensors."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.redundancy import measure_redundancy
from kvbench.methods.shared.select import average_attention, choose_best, smooth
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import TOVA
from tests.support.engine import same_best, watch
from tests.support.goldens import load_golden

HEADS, GROUPS, D = 2, 4, 16
WINDOW = 8  # of R-KV


def kept_of(method: Method, sizes: list[tuple[int, int]], k: Tensor, q: Tensor, room: int) -> list[list[int]]:
    """Positions that each row keeps once the tokens [sequences, heads, n, D] of maps of `sizes` are cached."""
    return kept_after(method, next_scale([*sizes, (1, 1)]), k, q, room)


def kept_after(
    method: Method, segments: tuple[Segment, ...], k: Tensor, q: Tensor, room: int
) -> list[list[int]]:
    """Positions that each row keeps once all segments but a last one of one token are cached."""
    spec = ModelSpec("reference", 1, HEADS, D, segments, branches=1, logit_scale=D**-0.5)
    lengths = [s.length for s in spec.segments]
    parts = [x.split(lengths, 2) for x in (torch.cat((x, x[:, :, :1]), 2) for x in (q, k))]
    seen = watch(method, spec, [[(one, other, other)] for one, other in zip(*parts, strict=True)], room).asked
    return seen[-1].ids()


def with_last(queries: Tensor, tokens: int) -> Tensor:
    """[sequences, query heads, tokens, D] with the given ones at the end, zeros before."""
    before = queries.new_zeros(*queries.shape[:2], tokens - queries.shape[2], queries.shape[3])
    return torch.cat((before, queries), 2)


def rkv_inputs(which: str = "") -> tuple[Tensor, Tensor]:
    """Keys and queries of all 200 tokens."""
    g = load_golden("rkv_select")
    k, q = (g["K"], g["Q"]) if not which else (g[f"{which}.K1"], g[f"{which}.Q1"])
    return k, with_last(q, k.shape[2])


def rkv_importance(k: Tensor, q: Tensor) -> Tensor:
    """Pooled attention [rows, slots] of the last queries through the functions that SnapKV and R-KV share."""
    scores = q[0, :, -WINDOW:].view(HEADS, GROUPS, WINDOW, D) @ k[0, :, None].transpose(2, 3) * D**-0.5
    inside = (torch.arange(k.shape[2]) >= k.shape[2] - WINDOW).expand(HEADS, -1)
    return smooth(average_attention(scores, inside, softmax="prefix", group="max"), "max", 7)


@pytest.mark.parametrize("mix", [0.07, 0.1, 0.5])
def test_rkv_keeps_what_the_authors_keep(mix: float) -> None:
    method = RKV(mix=mix, window=WINDOW, queries="last")
    kept = kept_of(method, [(10, 20)], *rkv_inputs(), 64)
    assert kept == rows_of(load_golden("rkv_select")[f"rkv_l{mix}_b64.kept_ids"])


def test_baselines_of_triattention_keep_what_its_authors_keep() -> None:
    """A prompt of 20 tokens and a text behind it, in another paper's comparison with R-KV and SnapKV."""
    g = load_golden("ld_baselines_a")
    length = g["K"].shape[2]
    inputs = next_token(20, [length - 20, 1]), g["K"], with_last(g["Q"], length)
    usual = {"window": WINDOW, "queries": "last"}
    for method, name, room in (
        (RKV(**usual), "r1kv", 64),
        (RKV(**usual, similarity="middle", sinks=1), "r1kv_protect", 64),
        (RKV(**usual, similarity="middle", sinks=1), "r1kv_protect.tight", 28),
    ):
        assert kept_after(method, *inputs, room) == g[f"keep.{name}"].tolist(), name
    snapkv = SnapKV(**usual, softmax="prefix", group="max", pool="max", kernel=7)
    kept = kept_after(snapkv, *inputs, 64)
    pooled = rkv_importance(*inputs[1:])
    pooled[:, -WINDOW:] = torch.inf
    for row, scores in enumerate(pooled):  # plateaus of the maximum are cut anywhere
        same_best(kept[row], g["keep.snapkv"][row].tolist(), scores)


def test_rkv_protects_as_many_near_copies_as_asked() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 1, 24, generator=generator) + 0.6 * torch.randn(3, 40, 24, generator=generator)
    for protected in (0, 1, 3):
        found = measure_redundancy(keys, torch.ones(keys.shape[:2], dtype=torch.bool), 0.7, protected)
        for row, key in enumerate(keys):
            unit = key / key.norm(dim=1, keepdim=True)
            similarity = (unit @ unit.T).tolist()
            for i in range(40):
                similarity[i][i] = 0.0
                near = [j for j in range(40) if similarity[i][j] > 0.7]
                assert near
                for j in near[len(near) - min(protected, len(near)) :]:
                    similarity[i][j] = 0.0
            expected = torch.tensor(similarity).mean(0).softmax(0)
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-7)


def test_snapkv_of_rkv() -> None:
    k, q = rkv_inputs()
    method = SnapKV(window=WINDOW, queries="last", softmax="prefix", group="max", pool="max", kernel=7)
    scores = rkv_importance(k, q)
    scores[:, -WINDOW:] = 2
    expected = load_golden("rkv_select")["snapkv_b64.kept_ids"][0]
    for kept, wanted, row in zip(kept_of(method, [(10, 20)], k, q, 64), expected, scores, strict=True):
        same_best(kept, wanted.tolist(), row)


def test_streaming_llm_of_rkv() -> None:
    kept = kept_of(StreamingLLM(sinks=1), [(2, 2), (14, 14)], *rkv_inputs(), 64)
    assert kept == rows_of(load_golden("rkv_select")["streaming_b64_s4.kept_ids"])


def rows_of(golden: Tensor) -> list[list[int]]:
    """Positions of each row in order."""
    return [sorted(row.tolist()) for row in golden.flatten(0, -2)]


def kvpress() -> tuple[Tensor, Tensor]:
    g = load_golden("kvpress_scores")
    return g["keys"], g["queries_roped"]


def test_snapkv_of_kvpress() -> None:
    k, q = kvpress()
    g, tokens, size = load_golden("kvpress_scores"), k.shape[2], 16
    scores = q[:, :, -size:].unflatten(1, (HEADS, GROUPS)) @ k[:, :, None].transpose(3, 4) * D**-0.5
    queries, slots = torch.arange(tokens - size, tokens), torch.arange(tokens)
    causal = scores.masked_fill(slots > queries[:, None], -torch.inf).flatten(0, 1)
    inside = (slots >= tokens - size).expand(2 * HEADS, -1)
    attention = average_attention(causal, inside, softmax="all", group="mean")
    found = smooth(attention.masked_fill(inside, 0), "avg", 5)
    expected = g["snapkv.score"].flatten(0, 1)
    torch.testing.assert_close(found[:, :-size], expected[:, :-size], rtol=1e-5, atol=1e-7)
    kept = choose_best(found.masked_fill(inside, torch.inf), 38)
    assert [row.nonzero().squeeze(1).tolist() for row in kept] == rows_of(g["snapkv.kept"])


def test_adakv_of_kvpress() -> None:
    g, size = load_golden("kvpress_scores"), 16
    scores = g["snapkv.score"].flatten(0, 1).clone()
    scores[:, -size:] = torch.inf  # kvpress gives the window the highest score there is
    kept = choose_among_heads(scores, 38, HEADS, safeguard=0.2)
    assert torch.equal(kept, g["adakv_snapkv.keep_mask"].flatten(0, 1) > 0)
    assert kept.sum(1).tolist() == [39, 37, 40, 36]


def test_tova_of_kvpress() -> None:
    kept = kept_after(TOVA(), next_token(96, [1]), *kvpress(), 38)
    assert kept == rows_of(load_golden("kvpress_scores")["tova.kept"])


def test_keydiff_of_kvpress() -> None:
    kept = kept_after(KeyDiff(), next_token(5, [40, 51, 1]), *kvpress(), 96)
    assert kept == [list(range(96))] * 4
    kept = kept_after(KeyDiff(), next_token(96, [1]), *kvpress(), 38)
    assert kept == rows_of(load_golden("kvpress_scores")["keydiff.kept"])


def test_streaming_llm_of_kvpress() -> None:
    kept = kept_of(StreamingLLM(sinks=1), [(2, 2), (2, 46)], *kvpress(), 38)
    assert 2 * kept == rows_of(load_golden("kvpress_scores")["streaming.kept"])


@dataclass
class Observed(H2O):
    """H2O that keeps everything and remembers its scores."""

    seen: list[Tensor] = field(default_factory=list)

    def keep(self, view: View) -> None:
        """Scores only."""
        super().keep(view)
        self.seen.append(self.score(view).clone())


@pytest.mark.parametrize(
    "segments", [next_scale([(1, 1)] * 97), next_token(96, [1]), next_token(5, [1, 40, 50, 1])], ids=len
)
def test_h2o_per_query_is_observed_attention(segments: tuple[Segment, ...]) -> None:
    k, q = kvpress()
    g, tokens = load_golden("kvpress_scores"), k.shape[2]
    method = Observed(recent=0, norm="per_query")
    kept_after(method, segments, k, q, tokens)  # causal: a token at a time, all at once, in rows
    assert len(method.seen) == len(segments) - 1
    torch.testing.assert_close(method.seen[-1], g["observed.score"].flatten(0, 1), rtol=1e-5, atol=1e-7)
    kept = choose_best(method.seen[-1], 38)
    assert [row.nonzero().squeeze(1).tolist() for row in kept] == rows_of(g["observed.kept"])
