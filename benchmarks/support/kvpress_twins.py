"""Presses of kvpress with the method that does the same here, and the guest that runs the press itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW, CHUNK, LAG, FUTURE = 64, 20, 128, 512
SNAPKV = {
    "window": WINDOW, "queries": "last", "pool": "avg", "kernel": 5, "softmax": "all", "group": "mean",
}  # fmt: skip
"""Settings with which `snapkv` is SnapKVPress; a model's own windows give others to each key that is not named."""


@dataclass(frozen=True)
class Twin:
    """A press, and the settings of `conf/method` that make the method here the same.

    Attributes:
        press: class of kvpress.
        method: choice of `method=`.
        settings: settings of the method; the value "ratio" means the compression ratio.
        given: settings of the press.
        inner: a press inside this one, with its settings; None for none.
        guest: whether `method=kvpress` runs the press.
        eager: whether the press reads attention, which only transformers' eager code returns.
        draws: whether the press draws random numbers.
        note: why heads differ, or what makes them equal.
    """

    press: str
    method: str
    settings: Mapping[str, Any]
    given: Mapping[str, Any]
    inner: tuple[str, Mapping[str, Any]] | None = None
    guest: bool = True
    eager: bool = False
    draws: bool = False
    note: str = ""

    def make_press(self, ratio: float) -> Any:
        """Return kvpress's press with a compression ratio."""
        import kvpress

        inner = () if self.inner is None else (getattr(kvpress, self.inner[0])(**self.inner[1]),)
        press = getattr(kvpress, self.press)(*inner, **self.given)
        press.compression_ratio = ratio
        return press

    def list_overrides(self, ratio: float) -> list[str]:
        """Return the overrides that configure the method, without protection by the model's default.

        Args:
            ratio: replaces the setting value "ratio".
        """
        pairs = {key: ratio if value == "ratio" else value for key, value in self.settings.items()}
        return [
            "protect=paper",
            f"method={self.method}",
            *(f"method.{key}={_write(value)}" for key, value in pairs.items()),
        ]

    def describe(self) -> str:
        """Return the name of the method and its settings."""
        return " ".join((self.method, *(f"{key}={_write(value)}" for key, value in self.settings.items())))


def _write(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _around_snapkv(press: str, method: str, window: int = WINDOW, note: str = "", **settings: object) -> Twin:
    base = {f"base.{key}": value for key, value in {**SNAPKV, "window": window}.items()}
    inner = ("SnapKVPress", {"window_size": window})
    return Twin(press, method, {**base, **settings}, {}, inner, guest=False, note=note)


TWINS: Sequence[Twin] = (
    Twin("SnapKVPress", "snapkv", SNAPKV, {"window_size": WINDOW}),
    Twin("StreamingLLMPress", "streaming_llm", {"sinks": 0, "leading": 4}, {}),
    Twin("TOVAPress", "tova", {}, {}),
    Twin("KeyDiffPress", "keydiff", {}, {}),
    Twin(
        "ExpectedAttentionPress",
        "expected_attention",
        {"epsilon": 0, "leading": 4, "heads": "even", "future": FUTURE},
        {"n_future_positions": FUTURE},
        note="rounding in one head",
    ),
    Twin("AdaKVPress", "adakv", SNAPKV, {}, ("SnapKVPress", {"window_size": WINDOW}), guest=False),
    _around_snapkv("CriticalKVPress", "criticalkv"),
    _around_snapkv("CriticalAdaKVPress", "critical_adakv"),
    Twin(
        "LeverageScorePress",
        "leverage",
        {},
        {},
        draws=True,
        note="rounding: the first layer's keys are nearly dependent; leverages are solved in float64 here, and "
        "the press itself, as the guest, keeps other tokens on keys that differ in the last bits",
    ),
    Twin(
        "NonCausalAttnPress",
        "noncausal",
        {"official_padding": True},
        {},
        note="rounding: equal scores in float32, and the press itself, as the guest, keeps another token too",
    ),
    Twin(
        "CompactorPress",
        "compactor",
        {"official_padding": True, "leading": 8, "mix": "ratio"},
        {},
        draws=True,
    ),
    Twin(
        "LagKVPress",
        "lagkv",
        {"lag": LAG, "leading": 4},
        {"lag_size": LAG},
        note="exact ties: scores are ranks within a part, which repeat in every part; kvpress keeps any of them, the "
        "method the earliest, the guest the newest",
    ),
    _around_snapkv(
        "ChunkKVPress",
        "chunkkv",
        3 * CHUNK,
        "equal because window and kept tokens are whole chunks; otherwise kvpress keeps fewer tokens and whole chunks "
        "of the window, the method fills the budget",
        chunk=CHUNK,
    ),
    _around_snapkv("MergingPress", "merging"),
    Twin(
        "ObservedAttentionPress",
        "h2o",
        {"recent": 0, "norm": "per_query"},
        {},
        guest=False,
        eager=True,
        note="without `norm=per_query` and `recent=0`, h2o is not this press",
    ),
    Twin("KnormPress", "knorm", {}, {}, note="rounding: norms that differ in the last bit"),
    Twin("CURPress", "cur", {"leading": 4}, {}),
)
