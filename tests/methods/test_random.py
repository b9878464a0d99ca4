"""The random baseline: uniform, seeded by the prompt, sinks kept, both branches alike."""

from collections import Counter

from kvbench.methods.random import Random
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


def test_every_token_has_the_same_chance() -> None:
    counts: Counter[int] = Counter()
    prompts = list(range(200))
    last = kept_by(prompts)[-1]
    for ids in last.ids()[: len(prompts) * SPEC.heads]:
        counts.update(ids[1:])
    total, others = len(prompts) * SPEC.heads, SPEC.ends[3] - 1
    share = (ROOM - 1) / others
    spread = (total * share * (1 - share)) ** 0.5
    assert len(counts) == others
    assert all(abs(count - total * share) < 5 * spread for count in counts.values())
