"""Random, Random Attention and VaSE: draws by prompt and seed, the programs' choices, and how often slots stay."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.schedule import show_layer
from kvbench.kernels.layout import empty_layout
from kvbench.methods.contents.norms import CUR
from kvbench.methods.random import Random
from kvbench.methods.random_attention import RandomAttention
from kvbench.methods.shared.draws import draw_by_row
from kvbench.methods.shared.newest import NewestKept
from kvbench.methods.shared.view import View
from kvbench.methods.vase import VaSE
from tests.support.engine import Asked, D, note_calls, small, tokens_of, watch
from tests.support.goldens import load_golden

CASES = {  # capacity, newest tokens, prompt, rounds, whether the prompt stays, whether heads share a draw
    "case0": (40, 8, 11, 5, True, False),
    "case1": (64, 16, 20, 5, True, False),
    "case2": (40, 8, 11, 2, False, False),
    "case3": (40, 8, 11, 2, True, True),
    "case5": (32, 8, 23, 3, True, False),
}
MODES: dict[str, dict[str, Any]] = {
    "case0": {"leading": 4}, "case1": {"leading": 4}, "case2": {"leading": 4, "kernel": 1},
    "case3": {"large": 0}, "case4": {"draw": False}, "case5": {"leading": 4, "magnitude": "variance"},
    "case6": {"leading": 4, "magnitude": "norm"}, "case9": {"draw": False, "large": 0},
}  # fmt: skip
"""Settings of the program's modes; all hold 48 of 56 slots with a window of 8, `case1` 64 of 96 with 16."""
CAPACITY, WINDOW, PROMPT, CHUNK, LINE = 24, 4, 6, 6, 8


def text(prompt: int, chunks: list[int], heads: int = 2, channels: int = D) -> ModelSpec:
    """Shapes of a text model; the last token only lets what is before it be evicted."""
    segments = next_token(prompt, [*chunks, 1])
    return ModelSpec("text", 1, heads, channels, segments, 1, channels**-0.5, padding_counts=False)


@pytest.mark.parametrize("case", CASES)
def test_recorded_draws_keep_what_the_program_keeps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity, newest, prompt, rounds, protected, shared = CASES[case]
    golden = load_golden("nm_random_attention")
    sequences, heads, _ = golden[f"{case}.before.0"].shape
    spec = text(prompt, [capacity - prompt, *[newest] * rounds], heads)
    draws = iter(range(rounds))

    def draw(method: RandomAttention, view: View) -> Tensor:
        """The recorded numbers at the positions of the candidates."""
        index = next(draws)
        before = golden[f"{case}.before.{index}"].flatten(0, 1)
        assert view.position.tolist() == before.tolist()
        numbers = torch.zeros(len(before), view.segment.end)
        drawn = golden[f"{case}.uniform.{index}"].flatten(0, 1)
        return numbers.scatter(1, before[:, : drawn.shape[1]], drawn)

    monkeypatch.setattr(RandomAttention, "_draw", draw)
    method = RandomAttention(window=newest, sinks=int(protected), shared=shared)
    seen = watch(method, spec, tokens_of(spec, sequences), f"{capacity}").asked
    asked = [one for one in seen if one.scale >= 2][:rounds]
    for index, one in enumerate(asked):
        assert one.ids() == golden[f"{case}.after.{index}"].flatten(0, 1).tolist()


def generate(method: RandomAttention, prompts: int, rounds: int) -> list[Asked]:
    """What is kept of texts of equal lengths, chunk by chunk, once the capacity is full."""
    spec = text(PROMPT, [CAPACITY - PROMPT, *[CHUNK] * rounds], heads=4)
    seen = watch(method, spec, tokens_of(spec, prompts), f"{CAPACITY}").asked
    return [one for one in seen if one.scale >= 2]


def test_candidates_survive_by_the_papers_probability() -> None:
    """p = (C - w - l) / (C - w - l + c) an eviction, whatever the position, in every head by itself."""
    prompts, rounds = 400, 2
    asked = generate(RandomAttention(window=WINDOW, sinks=1), prompts, rounds)
    rows = 4 * prompts
    p = (CAPACITY - WINDOW - PROMPT) / (CAPACITY - WINDOW - PROMPT + CHUNK)
    for number, one in enumerate(asked[:rounds], 1):
        end = CAPACITY + CHUNK * number
        kept = one.ids()
        assert all(len(ids) == CAPACITY for ids in kept)
        assert all(ids[:PROMPT] == list(range(PROMPT)) for ids in kept)
        assert all(ids[-WINDOW:] == list(range(end - WINDOW, end)) for ids in kept)
        survival = p**number
        spread = (survival * (1 - survival) * rows) ** 0.5
        for position in range(PROMPT, CAPACITY - WINDOW):
            count = sum(position in ids for ids in kept)
            assert abs(count - survival * rows) < 5 * spread
    first = [kept[PROMPT:-WINDOW] for kept in asked[0].ids()]
    together = sum(len(set(one) & set(other)) for one, other in zip(first[::2], first[1::2], strict=True))
    expected = rows / 2 * len(first[0]) * p  # two heads of independent draws
    assert together == pytest.approx(expected, rel=0.05)


def test_heads_that_share_a_draw_keep_the_same_and_blocks_stay_together() -> None:
    shared = generate(RandomAttention(window=WINDOW, sinks=1, shared=True), 3, 2)
    for one in shared:
        rows = one.ids()
        assert all(rows[4 * prompt : 4 * prompt + 4] == [rows[4 * prompt]] * 4 for prompt in range(3))
        assert rows[0] != rows[4]
    blocks = generate(RandomAttention(window=0, block=3), 3, 1)[0]
    for ids in blocks.ids():
        whole = [number for number in range(10) if {3 * number, 3 * number + 1, 3 * number + 2} <= set(ids)]
        assert len(ids) - 3 * len(whole) < 3  # at most one block is cut by the capacity


TEXTS = text(PROMPT, [150, 80])
IMAGE = ModelSpec("image", 1, 2, D, next_token(4, [8, 8, 8, 8]), line=8)
SCALES = small(layers=1, sides=(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("method", "spec", "capacity", "window"),
    [
        (RandomAttention(), TEXTS, 140, 64),
        (RandomAttention(sinks=1), TEXTS, 108, (108 - PROMPT) // 2),
        (RandomAttention(sinks=1), IMAGE, 16, 6),
        (RandomAttention(sinks=1), SCALES, 12, 0),
        (VaSE(large=0), text(PROMPT, [150, CHUNK]), 140, CHUNK),
        (VaSE(sinks=1, large=0), SCALES, 12, 4),
    ],
)
def test_the_default_window_is_the_familys_or_half_of_what_the_sinks_leave(
    method: NewestKept, spec: ModelSpec, capacity: int, window: int
) -> None:
    """What stays under the draws of thirty prompts of equal tokens."""
    one = tokens_of(spec, 1)
    inputs = [[tuple(x.expand(30 * spec.branches, -1, -1, -1) for x in qkv) for qkv in s] for s in one]
    last = watch(method, spec, inputs, f"{capacity}").asked[-1]
    end = spec.segments[last.scale].end
    always = set(range(end)).intersection(*last.ids())
    assert set(range(end - window, end)) <= always
    assert end - window - 1 not in always
    if isinstance(method, RandomAttention):
        assert len([token for token in always if token >= spec.segments[method.sinks].start]) == window


DRAWN = small(layers=2, heads=2, sides=(1, 2, 3, 4, 5))


def test_another_seed_draws_another_choice() -> None:
    one, other = (watch(Random(seed=seed), DRAWN, tokens_of(DRAWN, 2), 12).asked for seed in (0, 1))
    assert [asked.ids() for asked in one] != [asked.ids() for asked in other]


@pytest.mark.parametrize("spec", [DRAWN, text(5, [4], heads=4)], ids=["image", "text"])
def test_processes_that_share_the_heads_draw_what_one_draws(spec: ModelSpec) -> None:
    def draw(shapes: ModelSpec) -> torch.Tensor:
        layout = empty_layout(2 * shapes.heads, "cpu")
        view = show_layer(0, shapes.segments[0], layout, shapes, 2, prompts=(3, 7))
        return draw_by_row(0, view, shapes, 5).unflatten(0, (2, -1))

    shares = [draw(spec.take_share(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(shares, 1), draw(spec))


def replay(monkeypatch: pytest.MonkeyPatch, rounds: list[Tensor | None]) -> list[Tensor]:
    """Draw the recorded numbers [rows, candidates], round by round; returns a list that fills with attentions."""
    attentions: list[Tensor] = []
    attend, numbers = VaSE._attend, iter(rounds)

    def draw(_: VaSE, view: View) -> Tensor:
        recorded = next(numbers)
        assert recorded is not None
        return torch.nn.functional.pad(recorded, (0, view.position.shape[1] - recorded.shape[1]), value=1.0)

    def attend_and_note(*arguments: Any) -> Tensor:
        attentions.append(attend(*arguments))
        return attentions[-1]

    monkeypatch.setattr(VaSE, "_draw_exponential", draw)
    monkeypatch.setattr(VaSE, "_attend", attend_and_note)
    return attentions


@pytest.mark.parametrize("case", MODES)
def test_recorded_draws_of_vase_keep_what_its_program_keeps(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = {
        key.removeprefix(f"{case}."): x for key, x in load_golden("nm_vase").items() if f"{case}." in key
    }
    keys, values, queries = (golden[name] for name in ("keys", "values", "queries"))
    slots, window = keys.shape[2], queries.shape[2]
    spec = text(slots, [], keys.shape[1], keys.shape[3])
    earlier = queries.new_zeros(*queries.shape[:2], slots - window, queries.shape[3])
    prompt = (torch.cat((earlier, queries), 2), keys, values)
    drawn = golden["exponential"].flatten(0, 1) if "exponential" in golden else None
    attentions = replay(monkeypatch, [drawn])
    method = VaSE(window=window, **MODES[case])
    capacity = golden["kept"].shape[2] + window
    asked = watch(method, spec, [[prompt], [tuple(x[:, :, :1] for x in prompt)]], f"{capacity}").asked
    newest = list(range(slots - window, slots))
    assert asked[0].ids() == [[*row, *newest] for row in golden["kept"].flatten(0, 1).tolist()]
    candidates = attentions[0][:, :-window]
    torch.testing.assert_close(candidates, golden["attention"].flatten(0, 1), rtol=1e-5, atol=0)


def test_several_rounds_keep_what_the_program_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program stores slots in the order of selection; here they are in the order of positions."""
    golden = {key[7:]: x for key, x in load_golden("nm_vase").items() if key.startswith("case10.")}
    keys, values, rounds, capacity, window = golden["keys"], golden["values"], 4, 32, 8
    spec = text(20, [20, *[window] * (rounds - 1)])
    queries = torch.zeros(1, 4, 64, D)
    drawn: list[Tensor | None] = []
    for number in range(rounds):
        seen, before = int(golden[f"seen.{number}"]), golden[f"before.{number}"].flatten(0, 1)
        queries[:, :, seen - window : seen] = golden[f"queries.{number}"]
        order = before[:, :-window].argsort(1)
        drawn.append(golden[f"exponential.{number}"].flatten(0, 1).gather(1, order))
    replay(monkeypatch, drawn)
    inputs = [[tuple(x[:, :, s.start : s.end] for x in (queries, keys, values))] for s in spec.segments[:-1]]
    inputs.append([tuple(x[:, :, :1] for x in (queries, keys, values))])
    method = VaSE(window=window, leading=4, kernel=1)
    asked = watch(method, spec, inputs, f"{capacity}").asked[1:]
    for number, one in enumerate(asked[:rounds]):
        assert one.ids() == golden[f"after.{number}"].flatten(0, 1).sort(1).values.tolist()


@pytest.mark.parametrize("case", ["case7", "case8"])
def test_projected_norms_keep_what_the_program_keeps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden("nm_vase")
    keys, values, projection, kept = (
        golden[f"{case}.{name}"] for name in ("keys", "values", "projection", "kept")
    )
    heads, slots, window = keys.shape[1], keys.shape[2], 8
    spec = text(slots, [], heads, keys.shape[3])
    monkeypatch.setattr(CUR, "_draw_projection", lambda *_: projection.repeat_interleave(heads, 0))
    method = CUR(local=False, project=20, window=window, leading=4)
    inputs = [[(keys, keys, values)], [tuple(x[:, :, :1] for x in (keys, keys, values))]]
    asked = watch(method, spec, inputs, f"{kept.shape[2] + window}").asked
    newest = list(range(slots - window, slots))
    assert asked[0].ids() == [[*row, *newest] for row in kept.flatten(0, 1).tolist()]


def test_projections_are_drawn_for_a_prompt_or_for_a_segment() -> None:
    spec = text(PROMPT, [LINE, LINE])
    drawn: dict[bool, list[Tensor]] = {}
    for redraw in (False, True):
        method = CUR(project=400, redraw=redraw)
        calls = note_calls(method, "_draw_projection")
        watch(method, spec, tokens_of(spec, 2), "8", prompts=[3, 5])
        drawn[redraw] = [projection for _, projection in calls]
    for redraw, [first, second] in drawn.items():
        assert torch.equal(first, second) != redraw
        assert torch.equal(first[0], first[1])
        assert not torch.equal(first[0], first[2])
        assert float(first.square().sum(-1).mean()) == pytest.approx(1, abs=0.05)  # 1/sqrt(channels)


def keep_large(method: VaSE, prompts: int) -> list[list[int]]:
    """What is kept of a text after a chunk; all prompts have the same queries, keys, and values of many sizes."""
    spec, sizes = text(PROMPT, [CAPACITY - PROMPT, LINE]), torch.Generator().manual_seed(2)
    inputs = [
        [(q, k, v * torch.randn(v.shape[:3], generator=sizes)[..., None].exp()) for q, k, v in layers]
        for layers in tokens_of(spec, 1, groups=2)
    ]
    every = [[tuple(x.expand(prompts, -1, -1, -1) for x in qkv) for qkv in layers] for layers in inputs]
    return watch(method, spec, every, f"{CAPACITY}").asked[-1].ids()


def test_slots_are_drawn_in_proportion_to_attention() -> None:
    """Of two tokens, the second gets twice the attention of the last two."""
    spec = text(4, [])
    keys, queries = (torch.zeros(2000, 2, 4, D) for _ in range(2))
    keys[:, :, 1, 0] = torch.tensor(2.0).log() * D**0.5
    queries[..., -2:, 0] = 1
    method, inputs = VaSE(window=2, large=0, kernel=1), [[(queries, keys, keys)], [(keys[:, :, :1],) * 3]]
    kept = [ids[:-2] for ids in watch(method, spec, inputs, "3").asked[0].ids()]
    share = sum(ids == [1] for ids in kept) / len(kept)
    assert abs(share - 2 / 3) < 5 * (2 / 9 / len(kept)) ** 0.5


def test_a_protected_prompt_and_the_window_are_apart_from_the_large_values() -> None:
    """The prompt leaves 18 of 24 slots: 4 of large values, 4 of the window, 10 that are drawn."""
    kept = keep_large(VaSE(window=WINDOW, sinks=1, leading=3), 60)
    for rows in (kept[::2], kept[1::2]):
        always = set(range(CAPACITY + LINE)).intersection(*rows)
        assert len(always) == PROMPT + 4 + WINDOW
        assert set(range(PROMPT)) < always
    newest = set(
        range(CAPACITY, CAPACITY + LINE)
    )  # the window: it leaves 16 of 24 slots, of which 21 would be large
    assert all(newest <= set(row) and len(row) == CAPACITY for row in keep_large(VaSE(large=0.9), 5))
