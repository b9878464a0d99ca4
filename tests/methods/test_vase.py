"""VaSE: the program's choices for recorded draws, frequencies of the draw, and what values change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.contents.norms import CUR
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.vase import VaSE
from tests.support.engine import Asked, note_calls, tokens_of, watch
from tests.support.goldens import load_golden

CASES: dict[str, dict[str, Any]] = {
    "case0": {"leading": 4}, "case1": {"leading": 4}, "case2": {"leading": 4, "kernel": 1},
    "case3": {"large": 0}, "case4": {"draw": False}, "case5": {"leading": 4, "magnitude": "variance"},
    "case6": {"leading": 4, "magnitude": "norm"}, "case9": {"draw": False, "large": 0},
}  # fmt: skip
"""Settings of the program's modes; all hold 48 of 56 slots with a window of 8, `case1` 64 of 96 with 16."""
CAPACITY, WINDOW, PROMPT, CHUNK = 24, 4, 6, 8
D = 8
Inputs = list[list[tuple[Tensor, ...]]]


def text(prompt: int, chunks: list[int], heads: int = 2, channels: int = D) -> ModelSpec:
    """Shapes of a text model; the last token only lets what is before it be evicted."""
    segments = next_token(prompt, [*chunks, 1])
    return ModelSpec("text", 1, heads, channels, segments, 1, channels**-0.5, padding_counts=False)


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


@pytest.mark.parametrize("case", CASES)
def test_recorded_draws_keep_what_the_program_keeps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    method = VaSE(window=window, **CASES[case])
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
    spec = text(PROMPT, [CHUNK, CHUNK])
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


def generate(method: VaSE | SnapKV, inputs: Inputs, prompts: int = 1) -> list[Asked]:
    """What is kept of a text after each chunk; all prompts have the same queries, keys and values."""
    spec = text(PROMPT, [CAPACITY - PROMPT, *[CHUNK] * (len(inputs) - 3)])
    every = [[tuple(x.expand(prompts, -1, -1, -1) for x in qkv) for qkv in layers] for layers in inputs]
    seen = watch(method, spec, every, f"{CAPACITY}").asked
    return [one for one in seen if one.scale >= 2]


def draw_inputs(rounds: int = 2) -> Inputs:
    """Queries, keys and values of one prompt, whose values differ in size."""
    spec = text(PROMPT, [CAPACITY - PROMPT, *[CHUNK] * rounds])
    sizes = torch.Generator().manual_seed(2)
    return [
        [(q, k, v * torch.randn(v.shape[:3], generator=sizes)[..., None].exp()) for q, k, v in layers]
        for layers in tokens_of(spec, 1, groups=2)
    ]


def test_large_values_leave_room_for_the_window() -> None:
    """A chunk of 8 tokens is the window: it leaves 16 of 24 slots, of which 21 would be large."""
    [one] = generate(VaSE(large=0.9), draw_inputs(1), 5)
    newest = set(range(CAPACITY, CAPACITY + CHUNK))
    assert all(newest <= set(row) and len(row) == CAPACITY for row in one.ids())


def attend_by(weights: list[float], capacity: int, prompts: int) -> list[list[int]]:
    """What stays of a prompt whose tokens get attention in proportion to `weights` from its last two."""
    spec = text(len(weights) + 2, [])
    keys, queries = (torch.zeros(prompts, 2, len(weights) + 2, D) for _ in range(2))
    keys[:, :, :-2, 0] = torch.tensor(weights).log().clamp(min=-1e4) * D**0.5
    queries[..., -2:, 0] = 1
    method, inputs = VaSE(window=2, large=0, kernel=1), [[(queries, keys, keys)], [(keys[:, :, :1],) * 3]]
    seen = watch(method, spec, inputs, f"{capacity}").asked
    return [ids[:-2] for ids in seen[0].ids()]


def test_slots_are_drawn_in_proportion_to_attention() -> None:
    kept = attend_by([1.0, 2.0], 3, 2000)
    share = sum(ids == [1] for ids in kept) / len(kept)
    assert abs(share - 2 / 3) < 5 * (2 / 9 / len(kept)) ** 0.5


def test_a_protected_prompt_is_apart_from_the_large_values() -> None:
    """The prompt leaves 18 of 24 slots: 4 of large values, 4 of the window, 10 that are drawn."""
    inputs, prompts = draw_inputs(1), 60
    [one] = generate(VaSE(window=WINDOW, sinks=1, leading=3), inputs, prompts)
    for rows in (one.ids()[::2], one.ids()[1::2]):
        always = set(range(CAPACITY + CHUNK)).intersection(*rows)
        assert len(always) == PROMPT + 4 + WINDOW
        assert set(range(PROMPT)) < always
