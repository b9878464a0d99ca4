"""PriceKV by rank: ranks added by hand, priced capacities filled, the forecast alone at weight 0."""

from dataclasses import replace

import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import sum_tokens
from kvbench.methods.contents.lagkv import LagKV
from kvbench.methods.h2o import H2O
from kvbench.methods.pricekv.by_rank import PriceKVByRank
from kvbench.methods.pricekv.by_token import PriceKVByToken
from kvbench.methods.scored import Scored
from kvbench.methods.snapkv import SnapKV
from tests.methods.pricekv.test_by_token import ROWS, SCALES, kept_by, stand_in
from tests.support.engine import run, tokens_of, watch
from tests.support.small_models import composed


def ready(spec: ModelSpec, base: Scored, weight: float = 1.0, budget: str = "0.4") -> PriceKVByRank:
    method = PriceKVByRank(base=base, forecast=PriceKVByToken(), weight=weight)
    method.prepare(spec, Budget.parse(budget, spec), stand_in(method.forecast, spec))
    return method


@pytest.mark.parametrize("spec", [SCALES, ROWS], ids=["scales", "rows"])
@pytest.mark.parametrize("base", [LagKV, SnapKV, H2O, lambda: LagKV(refresh=2), lambda: SnapKV(sinks=1)])
def test_every_head_holds_what_was_sold_to_it(spec: ModelSpec, base: type[Scored]) -> None:
    method = ready(spec, base())
    cache = KVCache(spec, method, dtype=torch.float32)
    run(cache, tokens_of(spec, 4))
    assert cache.ledger.tokens_after == sum_tokens(method.forecast.capacities).tolist()
    assert cache.ledger.peak_tokens == method.budget.tokens


@pytest.mark.parametrize("spec", [SCALES, ROWS], ids=["scales", "rows"])
def test_without_weight_the_forecast_decides(spec: ModelSpec) -> None:
    method = ready(spec, LagKV(), weight=0)
    alone = PriceKVByToken()
    alone.prepare(spec, Budget.parse("0.4", spec), stand_in(alone, spec))
    assert kept_by(method, spec, 1) == kept_by(alone, spec, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("padding", [None, [2, 0, 2, 0]])
def test_slots_of_the_largest_sum_of_ranks_stay(weight: float, padding: list[int] | None) -> None:
    method = ready(ROWS, LagKV(), weight)
    seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    choose = method.choose

    def choosing(view, ranked):  # type: ignore[no-untyped-def]
        both = method.forecast.rate(view).clone(), method.base.rate(view).clone()
        seen[view.layer, view.segment.index] = both
        return choose(view, ranked)

    method.choose = choosing  # type: ignore[method-assign]
    watched = watch(method, ROWS, tokens_of(ROWS, 4), "0.4", stand_in(method.forecast, ROWS), padding=padding)
    chosen = [asked for asked in watched.asked if (asked.layer, asked.scale) in seen]
    assert len(chosen) == len(seen) > 4
    for asked in chosen:
        forecast, scores = seen[asked.layer, asked.scale]
        positions = asked.position.tolist()
        for row, kept in enumerate(asked.ids()):
            slots = [slot for slot, position in enumerate(positions[row]) if position >= 0]
            places = [
                {
                    slot: place
                    for place, slot in enumerate(sorted(slots, key=lambda slot: (float(of[row, slot]), slot)))
                }
                for of in (forecast, scores)
            ]
            total = {slot: places[0][slot] + weight * places[1][slot] for slot in slots}
            best = sorted(slots, key=lambda slot: (-total[slot], slot))[: len(kept)]
            assert kept == sorted(positions[row][slot] for slot in best)


def test_it_looks_at_this_prompt() -> None:
    one, other = (kept_by(ready(ROWS, LagKV()), ROWS, seed) for seed in (1, 2))  # type: ignore[arg-type]
    assert one != other


def test_a_base_with_a_calibration_of_its_own_is_refused() -> None:
    base = PriceKVByRank(base=LagKV(), forecast=PriceKVByToken())
    with pytest.raises(
        ConfigError, match=r"method.base: PriceKVByRank needs a calibration .* as method.base=lagkv"
    ):
        PriceKVByRank(base=base, forecast=PriceKVByToken())


def test_what_the_forecast_refuses_is_refused() -> None:
    texts = replace(ROWS, line=0)
    with pytest.raises(ValueError, match="rows writes texts; take method=pricekv"):
        PriceKVByRank(base=LagKV(), forecast=PriceKVByToken()).check(texts, Budget.parse("0.4", texts))


def test_settings_reach_base_and_forecast() -> None:
    cfg = composed("method=pricekv/by_rank", "method@method.base=snapkv", "method.forecast.floor=3")
    assert cfg.method.base._target_.endswith("SnapKV")
    assert (cfg.method.forecast.floor, cfg.calibrate.count) == (3, 40)
