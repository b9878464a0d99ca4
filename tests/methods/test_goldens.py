"""Methods against what other authors' programs score and keep on the same tensors."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.methods.adakv import AdaKV
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.select import average_attention, choose_best, smooth
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import TOVA
from tests.support.engine import same_best, watch
from tests.support.goldens import load_golden

HEADS, GROUPS, D = 2, 4, 16
WINDOW = 8  # of R-KV


def kept_after(
    method: Method, segments: tuple[Segment, ...], k: Tensor, q: Tensor, room: int
) -> list[list[int]]:
    """Positions that each row keeps once all segments but a last one of one token are cached."""
    spec = ModelSpec("reference", 1, k.shape[1], D, segments, branches=1, logit_scale=D**-0.5)
    lengths = [s.length for s in spec.segments]
    parts = [x.split(lengths, 2) for x in (torch.cat((x, x[:, :, :1]), 2) for x in (q, k))]
    seen = watch(method, spec, [[(one, other, other)] for one, other in zip(*parts, strict=True)], room).asked
    return seen[-1].ids()


def with_last(queries: Tensor, tokens: int) -> Tensor:
    """[sequences, query heads, tokens, D] with the given ones at the end, zeros before."""
    before = queries.new_zeros(*queries.shape[:2], tokens - queries.shape[2], queries.shape[3])
    return torch.cat((before, queries), 2)


def rows_of(golden: Tensor) -> list[list[int]]:
    """Positions of each row in order."""
    return [sorted(row.tolist()) for row in golden.flatten(0, -2)]


OF_RKV: dict[str, Method] = {
    **{f"rkv_l{mix}_b64": RKV(mix=mix, window=WINDOW, queries="last") for mix in (0.07, 0.1, 0.5)},
    "streaming_b64_s4": StreamingLLM(0, leading=4),
}


@pytest.mark.parametrize("name", OF_RKV)
def test_rkv_keeps_what_the_authors_keep(name: str) -> None:
    """In one map, as their queries see all keys."""
    g = load_golden("rkv_select")
    kept = kept_after(OF_RKV[name], next_scale([(10, 20), (1, 1)]), g["K"], with_last(g["Q"], 200), 64)
    assert kept == rows_of(g[f"{name}.kept_ids"])


def test_baselines_of_triattention_keep_what_its_authors_keep() -> None:
    """A prompt of 20 tokens and a text behind it, in another paper's comparison with R-KV and SnapKV."""
    g = load_golden("ld_baselines_a")
    k, length = g["K"], g["K"].shape[2]
    inputs = next_token(20, [length - 20, 1]), k, with_last(g["Q"], length)
    usual = {"window": WINDOW, "queries": "last"}
    for method, name, room in (
        (RKV(**usual), "r1kv", 64),
        (RKV(**usual, similarity="middle", sinks=1), "r1kv_protect", 64),
        (RKV(**usual, similarity="middle", sinks=1), "r1kv_protect.tight", 28),
    ):
        assert kept_after(method, *inputs, room) == g[f"keep.{name}"].tolist(), name
    kept = kept_after(SnapKV(**usual, softmax="prefix", group="max", pool="max", kernel=7), *inputs, 64)
    logits = g["Q"][0, :, -WINDOW:].view(HEADS, GROUPS, WINDOW, D) @ k[0, :, None].transpose(2, 3) * D**-0.5
    inside = (torch.arange(length) >= length - WINDOW).expand(HEADS, -1)
    pooled = smooth(average_attention(logits, inside, softmax="prefix", group="max"), "max", 7)
    for row, scores in enumerate(pooled.masked_fill(inside, torch.inf)):  # plateaus are cut anywhere
        same_best(kept[row], g["keep.snapkv"][row].tolist(), scores)


def test_baselines_of_hard_kv_keep_what_its_authors_keep() -> None:
    """Its SnapKV has no pooling; its R-KV does not normalise redundancy (`normalize`)."""
    g, usual = load_golden("hardinfer_base"), {"window": WINDOW, "queries": "last"}
    plain = SnapKV(**usual, softmax="prefix", group="max", kernel=1)
    segments = next_scale([(10, 16), (1, 1)])  # the queries of one map see all keys, also in the window
    for name, method in (
        ("vanilla", plain),
        ("snapkv", plain),
        ("rkv", RKV(**usual, mix=0.07, normalize=False)),
    ):
        kept = kept_after(method, segments, g["K"], with_last(g["Q"], 160), 64)
        assert kept == rows_of(g[f"base.{name}.kept_ids"]), name


OF_SNAPKV: dict[str, Any] = {
    "window": 16, "queries": "last", "softmax": "all", "group": "mean", "pool": "avg", "kernel": 5,
}  # fmt: skip
OF_KVPRESS: dict[str, Method] = {
    "snapkv": SnapKV(**OF_SNAPKV), "tova": TOVA(), "keydiff": KeyDiff(), "streaming": StreamingLLM(0, leading=4),
}  # fmt: skip


def kvpress() -> tuple[Tensor, Tensor]:
    g = load_golden("kvpress_scores")
    return g["keys"], g["queries_roped"]


def test_methods_keep_what_kvpress_keeps() -> None:
    g = load_golden("kvpress_scores")
    for name, method in OF_KVPRESS.items():
        kept = kept_after(method, next_token(96, [1]), *kvpress(), 38)
        assert kept * (4 // len(kept)) == rows_of(g[f"{name}.kept"]), name
    kept = kept_after(AdaKV(**OF_SNAPKV, safeguard=0.2), next_token(96, [1]), *kvpress(), 38)
    assert kept == [row.nonzero()[:, 0].tolist() for row in g["adakv_snapkv.keep_mask"].flatten(0, 1)]


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
