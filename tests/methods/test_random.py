"""The random baseline: seeded by the prompt, sinks kept, both branches alike."""

import pytest
import torch

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.schedule import show_layer
from kvbench.kernels.layout import empty_layout
from kvbench.methods.random import Random
from kvbench.methods.shared.draws import draw_by_row
from tests.support.engine import Asked, listening, open_cache, run, small, tokens_of

SPEC = small(layers=2, heads=2, sides=(1, 2, 3, 4, 5))
ROOM, SINKS = 12, 1


def kept_by(prompts: list[int], seed: int = 0) -> list[Asked]:
    """What was kept of each layer and segment, of prompts with two branches."""
    cache = open_cache(Random(seed=seed, sinks=SINKS), SPEC, ROOM)
    cache.prompts = prompts
    seen = listening(cache.method)
    run(cache, tokens_of(SPEC, 2 * len(prompts)))
    return seen


def test_a_prompt_keeps_the_same_in_any_batch_and_another_by_another_seed() -> None:
    alone, both, other = kept_by([7]), kept_by([3, 7]), kept_by([7], seed=1)
    heads, differs, apart = SPEC.heads, 0, 0
    for one, two, three in zip(alone, both, other, strict=True):
        rows = two.ids()
        assert one.ids() == rows[heads : 2 * heads] + rows[3 * heads :]
        assert one.ids()[:heads] == one.ids()[heads:]
        assert all(ids[0] == 0 and len(ids) == min(ROOM, SPEC.ends[one.scale]) for ids in rows)
        differs += one.ids() != three.ids()
        apart += rows[:heads] != rows[heads : 2 * heads]
    assert differs
    assert apart


TEXT = ModelSpec("text", 1, 4, 8, next_token(5, [4]), branches=1, padding_counts=False)


@pytest.mark.parametrize("spec", [SPEC, TEXT], ids=["image", "text"])
def test_processes_that_share_the_heads_draw_what_one_draws(spec: ModelSpec) -> None:
    def draw(shapes: ModelSpec) -> torch.Tensor:
        layout = empty_layout(2 * shapes.heads, "cpu")
        view = show_layer(0, shapes.segments[0], layout, shapes, 2, prompts=(3, 7))
        return draw_by_row(0, view, shapes, 5).unflatten(0, (2, -1))

    shares = [draw(spec.take_share(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(shares, 1), draw(spec))
