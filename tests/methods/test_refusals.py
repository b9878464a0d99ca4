"""Settings, bases, budgets and missing calibrations that methods refuse, and what their messages name."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.adakv import AdaKV
from kvbench.methods.ams_kv import AMSKV, AMSKVFixed
from kvbench.methods.cake import CAKE
from kvbench.methods.contents.norms import CUR
from kvbench.methods.critical import Critical
from kvbench.methods.expected.capkv import CapKV
from kvbench.methods.h2o import H2O
from kvbench.methods.hack.method import HACK
from kvbench.methods.hack.plus_plus import HACKPlusPlus
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.headkv import HeadKV
from kvbench.methods.heatkv.method import BinaryHeatKV, HeatKV
from kvbench.methods.linear_ar import LineAR
from kvbench.methods.lukv.method import LUKV
from kvbench.methods.merging.meda import MEDA
from kvbench.methods.merging.method import CaM, LookM, MergingPress
from kvbench.methods.pricekv.blocks import PriceKVBlocks
from kvbench.methods.pricekv.forecast import Forecast
from kvbench.methods.pricekv.method import PriceKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.quest import Quest
from kvbench.methods.random import Random
from kvbench.methods.random_attention import RandomAttention
from kvbench.methods.rkv import RKV
from kvbench.methods.scale_groups import ScaleGroups
from kvbench.methods.scalekv import ScaleKV
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.scored import Scored
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.sparvar import SparVAR
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.triattention import TriAttention
from kvbench.methods.vase import VaSE
from tests.support.engine import D, prepared, small

SCALES = small(layers=4, sides=(1, 2, 3, 4, 5, 6))
LINES = ModelSpec("lines", 3, 2, D, next_token(3, [5] * 8 + [4]))
ONE_BRANCH = replace(SCALES, branches=1)
MANY = ModelSpec("many", 1, 1, D, next_scale([(1, 1)] * 17))
NAN = float("nan")
MENU = {"menu": [4]}
SHARE, ONE, NONE = "must lie in 0..1", "must be at least 1", "must be at least 0"
FRACTION = "give a fraction in (0, 1] or a whole number of tokens"
ANEW = "every eviction chooses anew; set method."
SETTINGS: list[tuple[type[Method], dict[str, Any], str]] = [
    (AMSKV, {"demanding": 2}, SHARE + ", or null to use theta"),
    (AMSKV, {"condensed": 4}, "must lie in 0..3 for small"),
    (CAKE, {"window": 1, "queries": "last"}, "must be at least 2"),
    (CUR, {"seed": 1}, "nothing is drawn without a projection"),
    (H2O, {"ema": 0.5}, "H2O accumulates its scores; set method.ema=0"),
    (HACK, {"observed": 0, "sinks": 2}, ONE),
    (HACKPlusPlus, {"pool": 4}, "must be odd and positive"),
    (HACKPlusPlus, {"attention_budget": 92}, FRACTION + " per head, at most 91 for small"),
    (HardKV, {"refresh": 2}, "method.select=top_p marks by the present attention"),
    (HardKV, {"select": "official_rewrite"}, "the released program has one temperature; set method.calib"),
    (HeadKV, {"branch_mode": "mean", "len_rows": "per_row", "sinks": 1}, "branches of unequal length share no tokens"),
    (LineAR, {"window": 0}, ONE + ", or null for the whole line"),
    (MEDA, {"statistic": "cross"}, "small does not attend from an image to a text"),
    (PriceKVBlocks, {"recent": 15}, "must lie in 1..14"),
    (PriceKVBlocks, MENU, "precisions differ in bytes; set budget_unit=bytes"),
    (PriceKV, {"retrieval": 0.5, "base": H2O()}, "for language models; set method.retrieval=0"),
    (PyramidKV, {"beta": NAN}, ONE),
    (Quest, {"attention_budget": 8}, "must be at least a page, method.page=16"),
    (RKV, {"threshold": 2}, "is a cosine and must lie in -1..1"),
    (Random, {"refresh": 2}, "every segment draws its scores; set method.refresh=1"),
    (RandomAttention, {"ema": 0.5}, ANEW + "ema=0"),
    (ScaleKV, {"window": 5}, "a grid needs a square number"),
    (SparVAR, {"decision": 9}, "small has 6 scales"),
    (VaSE, {"large": 1}, "must lie in 0..0.99, because the window and drawn tokens need the rest"),
    (VaSE, {"kernel": 4}, "must be odd and positive"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "why"), SETTINGS)
def test_a_setting_out_of_range_is_named(kind: type[Method], settings: dict[str, Any], why: str) -> None:
    """The first setting is the wrong one."""
    (name, value), *_ = settings.items()
    shown = {"True": "true", "False": "false"}.get(str(value), str(value))
    spec = SCALES if "next-scale" in kind.families else LINES
    with pytest.raises(ValueError, match=re.escape(f"method.{name}={shown}: {why}")):
        kind(**settings).check(spec, Budget.parse("0.5", spec))


@pytest.mark.parametrize(
    ("method", "spec", "budget", "message"),
    [
        (AMSKVFixed(condensed=2), SCALES, 5, "2 condensed scales and another need 6 of 55 tokens"),
        (HACK(sinks=2, alpha=0.1, contextual=1), SCALES, 4, "2 sink scales need 5 of 55 tokens"),
        (HardKV(leading=40), LINES, "0.5", "need 40 of 43 tokens per head"),
        (HeatKV(2), SCALES, 4, "2 sink scales need 5 of 55 tokens"),
        (HeatKV(-1), SCALES, "0.5", "sinks=-1"),
        (LineAR(sinks=1), LINES, "0.05", "model.prompt_tokens=3, need 3 of 43 tokens per head"),
        (Scored(), SCALES, "0.5", "method=Scored: has no score; implement `score` or `keep`"),
        (Forecast(), LINES, "0.5", "lines writes texts; use method=h2o, or method.base=h2o inside another method"),
        (RandomAttention(window=18, sinks=1), LINES, 21, "the method's tokens need 22 of 43 tokens per head"),
        (VaSE(window=15), LINES, 20, "the method's tokens need 21 of 43 tokens per head"),  # 5 of large values
        (PriceKVBlocks(), MANY, "0.5", "many has 16 sources, above 15; use pricekv"),
        (ScaleGroups(condensed=3, local=3), SCALES, 1, "method.condensed=3, method.local=3: small caches 5 scales"),
        (SnapKV(sinks=2), SCALES, 4, "2 sink scales need 5 of 55 tokens"),
        (PriceKVBlocks(menu=[5]), SCALES, "0.1", "method.menu=[5]: bits must be of 16, 8, 4, 3, 2"),
        (PriceKVBlocks(**MENU, importance="mass"), SCALES, "0.1", "needs method.importance=output"),
        (PriceKVBlocks(**MENU, sinks=4), SCALES, "0.1", "the smallest feasible budget is 2880 bytes of a sequence"),
        (PriceKVBlocks(**MENU, share=True), ONE_BRANCH, "0.1", "method.share=true: small has no second"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_model_or_a_budget_cannot_give_is_refused(
    method: Method, spec: ModelSpec, budget: float | str, message: str
) -> None:
    bits = getattr(method, "menu", None)
    given = Budget.parse_bytes(budget, spec, 4 * D) if bits else Budget.parse(budget, spec)
    with pytest.raises(ValueError, match=re.escape(message)):
        method.check(spec, given)


OWN_CAPACITY = "shares capacity among heads or layers itself"
BASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: MergingPress(base=StreamingLLM(0)), "method.base=StreamingLLM: it does not score tokens"),
    (lambda: MergingPress(base=LookM(base=H2O())), "method.base: LookM merges tokens, which only the outermost"),
    (lambda: MergingPress(base=HardKV(merge="fixed")), "HardKV merges tokens, which only the outermost method can"),
    (lambda: CaM(base=H2O()), "method.base: H2O keeps values per slot, and so does cam"),
    (lambda: Critical(base=CapKV()), "the score of CapKV contains the norm of values"),
    (lambda: LUKV(base=AdaKV()), OWN_CAPACITY),
    (lambda: LUKV(base=CapKV(asked="prompt")), "method.base.asked=every"),
    (lambda: PriceKV(base=Critical(base=SnapKV())), OWN_CAPACITY),
    (lambda: PriceKV(base=TriAttention(shared="layers")), OWN_CAPACITY),
    (lambda: PriceKV(base=SnapKV(refresh=2)), "set method.base.refresh=1 method.base.ema=0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), BASES)
def test_a_base_that_cannot_be_is_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make()


def test_a_prompt_that_exceeds_the_full_cache_in_16_bits_is_refused() -> None:
    """In 32 bits."""
    spec = ModelSpec("text", 2, 2, D, next_token(40, [6] * 4), 1)
    with pytest.raises(InfeasibleBudget, match=f"at most {spec.full_bytes}, .* set budget_unit=tokens"):
        StreamingLLM(1).check(spec, Budget.parse_bytes("0.5", spec, 8 * D))


@pytest.mark.parametrize(
    ("method", "lead"),
    [
        (AMSKV(demanding=0.5), "method.demanding:"),
        (AMSKVFixed(), "method=ams_kv_fixed:"),
        (LUKV(base=H2O()), "method=LUKV:"),
        (BinaryHeatKV(2), "method.orders: give an order file, or"),
        (ScaleKV(), "method.budgets: give a budget file, or"),
    ],
)
def test_without_a_calibration_a_method_says_how_to_get_one(method: Method, lead: str) -> None:
    with pytest.raises(ValueError, match=f"^{lead} calibrate first .python run.py task=calibrate.$"):
        prepared(method, SCALES, "0.5")
