"""Random and Random Attention: seeds and prompts of draws, the re-run's choices, survival of the paper's rule."""

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.schedule import show_layer
from kvbench.kernels.layout import empty_layout
from kvbench.methods.random import Random
from kvbench.methods.random_attention import RandomAttention
from kvbench.methods.shared.draws import draw_by_row
from kvbench.methods.shared.newest import NewestKept
from kvbench.methods.shared.view import View
from kvbench.methods.vase import VaSE
from tests.support.engine import Asked, D, small, tokens_of, watch
from tests.support.goldens import load_golden

CASES = {  # capacity, newest tokens, prompt, rounds, whether the prompt stays, whether heads share a draw
    "case0": (40, 8, 11, 5, True, False),
    "case1": (64, 16, 20, 5, True, False),
    "case2": (40, 8, 11, 2, False, False),
    "case3": (40, 8, 11, 2, True, True),
    "case5": (32, 8, 23, 3, True, False),
}
CAPACITY, WINDOW, PROMPT, CHUNK = 24, 4, 6, 6


def text(prompt: int, chunks: list[int], heads: int = 2, layers: int = 1) -> ModelSpec:
    """Shapes of a text model; the last token only lets what is before it be evicted."""
    segments = next_token(prompt, [*chunks, 1])
    return ModelSpec("text", layers, heads, D, segments, branches=1, padding_counts=False)


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


def test_branches_of_a_prompt_keep_the_same_and_other_prompts_and_seeds_others() -> None:
    choices = {}
    for prompt, seed in ((3, 0), (7, 0), (7, 1)):
        asked = watch(Random(seed=seed), DRAWN, tokens_of(DRAWN, 2), 12, prompts=[prompt]).asked
        choices[prompt, seed] = [one.ids(slice(DRAWN.heads)) for one in asked]
        assert choices[prompt, seed] == [one.ids(slice(DRAWN.heads, None)) for one in asked]
    assert choices[3, 0] != choices[7, 0] != choices[7, 1]


HEADS_OF_TEXT = ModelSpec("text", 1, 4, 8, next_token(5, [4]), branches=1, padding_counts=False)


@pytest.mark.parametrize("spec", [DRAWN, HEADS_OF_TEXT], ids=["image", "text"])
def test_processes_that_share_the_heads_draw_what_one_draws(spec: ModelSpec) -> None:
    def draw(shapes: ModelSpec) -> torch.Tensor:
        layout = empty_layout(2 * shapes.heads, "cpu")
        view = show_layer(0, shapes.segments[0], layout, shapes, 2, prompts=(3, 7))
        return draw_by_row(0, view, shapes, 5).unflatten(0, (2, -1))

    shares = [draw(spec.take_share(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(shares, 1), draw(spec))
