"""Budgets in exact rational arithmetic."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal

from kvbench.core.config import shorten
from kvbench.core.segments import ModelSpec

BudgetUnit = Literal["tokens", "bytes"]
UNITS: tuple[BudgetUnit, ...] = ("tokens", "bytes")
"""Units of a budget."""
NUMBER = re.compile(
    r"[+-]?(\d{1,99}/\d{1,99}|(\d{1,99}\.?\d{0,99}|\.\d{1,99})(e[+-]?\d{1,3})?)", re.IGNORECASE
)
"""Pattern of accepted numbers; a longer exponent would take minutes to parse."""


@dataclass(frozen=True)
class Budget:
    """Capacity of one sequence's cache over all layers and KV heads, in tokens and, for a byte budget, in bytes.

    Methods always receive a capacity in tokens. For a byte budget it is the number of tokens guaranteed to fit.

    Attributes:
        capacity: B = b x T x c_{K-1} tokens, exact (HeatKV Eq. 5 uses the real number, not a rounded one).
        full: T x c_{K-1}, the full cache.
        heads: T = layers x KV heads.
        bytes: limit in bytes per sequence, exact; None for a token budget.
        full_bytes: bytes of the full cache per sequence in 16 bits; None for a token budget.
        given: the number as it was given: a share up to 1, otherwise tokens per head or bytes; None for a budget that
            was computed. It names the budget and is not compared.
    """

    capacity: Fraction
    full: int
    heads: int
    bytes: Fraction | None = None
    full_bytes: int | None = None
    given: Fraction | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, value: float | int | str, spec: ModelSpec) -> "Budget":
        """Parse a fraction of the full cache in (0, 1] or, above 1, a whole number of mean tokens per head.

        Decimal input is taken as written: 0.1 is one tenth, not the nearest double.

        >>> from kvbench.core.segments import next_scale
        >>> spec = ModelSpec("small", layers=2, heads=3, head_dim=8, segments=next_scale([(1, 1), (2, 2), (3, 3)]))
        >>> spec.full_tokens  # 2 x 3 heads hold the 5 tokens before the last scale
        30
        >>> Budget.parse(0.1, spec).capacity
        Fraction(3, 1)
        >>> Budget.parse(2, spec).tokens  # two tokens in every head, on average
        12

        Raises:
            ValueError: the value is not a number, not positive, above the full cache, or above 1 and not whole.
        """
        given = number = read_number(value, "tokens")
        if number > 1:
            if number > spec.cached_length:
                raise ValueError(
                    f"budget={value}: {spec.name} caches at most {spec.cached_length} tokens per head; give fewer"
                )
            number /= spec.cached_length
        return cls(number * spec.full_tokens, spec.full_tokens, spec.all_heads, given=given)

    @classmethod
    def parse_bytes(cls, value: float | int | str, spec: ModelSpec, token_bytes: int | Fraction) -> "Budget":
        """Parse a fraction in (0, 1] of the bytes of the full cache in 16 bits or, above 1, whole bytes per sequence.

        With 16-bit keys and values, the capacity is the same as for that fraction of tokens; with 32 bits, half.
        It is at most the full cache.

        >>> from kvbench.core.segments import next_scale
        >>> spec = ModelSpec("small", layers=2, heads=3, head_dim=8, segments=next_scale([(1, 1), (2, 2), (3, 3)]))
        >>> spec.full_bytes  # 30 tokens, each a key and a value of 8 channels of 2 bytes
        960
        >>> Budget.parse_bytes(0.1, spec, token_bytes=2 * 8 * 2).capacity
        Fraction(3, 1)
        >>> Budget.parse_bytes(0.1, spec, token_bytes=2 * 8 * 4).capacity
        Fraction(3, 2)
        >>> Budget.parse_bytes(200, spec, token_bytes=2 * 8 * 2).tokens
        6

        `token_bytes` are the bytes of the largest token in one head, key and value.

        Raises:
            ValueError: as for `parse`, with the full cache in 16 bits.
        """
        key = f"budget={value} budget_unit=bytes"
        number = read_number(value, "bytes")
        allowed = number if number > 1 else number * spec.full_bytes
        if allowed > spec.full_bytes:
            raise ValueError(
                f"{key}: a sequence of {spec.name} has at most {spec.full_bytes} bytes in 16 bits; give fewer, or a "
                "fraction in (0, 1]"
            )
        capacity = min(allowed / Fraction(token_bytes), Fraction(spec.full_tokens))
        return cls(capacity, spec.full_tokens, spec.all_heads, allowed, spec.full_bytes, number)

    def take_share(self, spec: ModelSpec, share: ModelSpec) -> "Budget":
        """Return the budget of a share of the heads, if all heads have equal budgets.

        The remainder of the tokens goes to the first heads, layer by layer, so that a head's tokens do not depend on
        the split. Bytes are shared in proportion to tokens. `share` is a `ModelSpec.take_share` of `spec`.
        """
        if share == spec:
            return self
        each, more = divmod(self.tokens, self.heads)
        layers, some = divmod(more, spec.heads)
        among = min(max(some - share.first_head, 0), share.heads)
        tokens = each * share.all_heads + layers * share.heads + among
        budget = Budget(Fraction(tokens), share.full_tokens, share.all_heads)
        if self.bytes is None:
            return budget
        ratio = Fraction(tokens, self.tokens) if self.tokens else Fraction(share.all_heads, self.heads)
        return replace(budget, bytes=self.bytes * ratio, full_bytes=share.full_bytes)

    @property
    def unit(self) -> BudgetUnit:
        """Unit of the limit: `tokens` or `bytes`."""
        return "tokens" if self.bytes is None else "bytes"

    @property
    def share(self) -> Fraction:
        """Fraction of the full cache in the budget's unit: of its tokens, or of its bytes in 16 bits."""
        if self.bytes is None or self.full_bytes is None:
            return self.fraction
        return self.bytes / self.full_bytes

    @property
    def written(self) -> str:
        """The number as given: whole tokens per head or bytes, otherwise a share in up to four digits."""
        if self.given is not None and self.given > 1:
            return str(self.given)
        return f"{float(self.share):.4g}"

    @property
    def exact(self) -> str:
        """The budget as an exact fraction of tokens, or as exact bytes with their unit; identifies it."""
        return str(self.capacity) if self.bytes is None else f"{self.bytes} bytes"

    @property
    def fraction(self) -> Fraction:
        """Fraction of the full cache's tokens; b of a token budget."""
        return self.capacity / self.full

    @property
    def per_head(self) -> Fraction:
        """Mean tokens per head, B / T."""
        return self.capacity / self.heads

    @property
    def head_tokens(self) -> int:
        """Whole tokens that every head can hold at the same time, floor(B / T)."""
        return floor(self.per_head)

    @property
    def tokens(self) -> int:
        """Whole tokens that fit, floor(B)."""
        return floor(self.capacity)


def find_capacity(
    budget: Budget, token_bytes: int | Fraction, plan_bytes: "Callable[[Budget], int | Fraction]"
) -> Budget:
    """Return a byte budget with the largest capacity in tokens at which a static method fits.

    The search is a bisection over whole tokens. The result always fits. It is the largest capacity that fits if more
    capacity never makes the method hold less; otherwise (whole blocks), one more token would not fit.

    Args:
        budget: a budget in bytes; its capacity is guaranteed to fit.
        token_bytes: bytes of the smallest token in one head.
        plan_bytes: returns the peak bytes of one sequence under a budget. It may raise `InfeasibleBudget`; larger
            capacities are then tried.
    """
    allowed = budget.bytes
    assert allowed is not None, "for a byte budget"

    def exceeds(tokens: int) -> bool:
        try:
            return plan_bytes(replace(budget, capacity=Fraction(tokens))) > allowed
        except InfeasibleBudget:
            return False

    fitting, beyond = budget.tokens, min(budget.full, floor(allowed / Fraction(token_bytes))) + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (fitting, middle) if exceeds(middle) else (middle, beyond)
    return replace(budget, capacity=max(budget.capacity, Fraction(fitting)))


def read_number(value: float | int | str, unit: str) -> Fraction:
    """Parse `budget` as written: a decimal, a fraction such as 1/3, or a whole number above 1.

    >>> read_number(0.1, "tokens"), read_number("1/3", "tokens"), read_number(650, "tokens")
    (Fraction(1, 10), Fraction(1, 3), Fraction(650, 1))

    Raises:
        ValueError: the value is not a number, not positive, or above 1 and not whole.
    """
    key = f"budget={shorten(str(value))}" + f" budget_unit={unit}" * (unit == "bytes")
    whole = "bytes of a sequence" if unit == "bytes" else "tokens per head"
    try:
        if not NUMBER.fullmatch(text := str(value)):
            raise ValueError
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{key}: give a fraction in (0, 1] or a number of {whole}") from None
    if number <= 0:
        raise ValueError(f"{key}: must be positive")
    if number > 1 and number.denominator != 1:
        raise ValueError(f"{key}: above 1 it is a number of {whole} and must be whole")
    return number


def name_budget(budget: Budget) -> str:
    """Return a budget as on the command line: as it was given, or a fraction.

    A computed byte budget is a fraction, or bytes if it is below a thousandth of the full cache.
    """
    if budget.given is not None and budget.given > 1:
        return f"budget={budget.given}" + " budget_unit=bytes" * (budget.bytes is not None)
    if budget.bytes is None:
        return f"budget={float(budget.share):g}"
    is_small = budget.bytes > 1 and budget.share < Fraction(1, 1000)
    return f"budget={float(budget.bytes if is_small else budget.share):g} budget_unit=bytes"


class InfeasibleBudget(ValueError):
    """The budget is below what the method must keep; the message names the smallest feasible budget, if one exists."""

    @classmethod
    def of(cls, budget: Budget, needed: int, spec: ModelSpec, why: str) -> "InfeasibleBudget":
        """Return the error of a method that needs `needed` tokens per head; `why` is the subject of the message."""
        factor = Fraction(needed) / budget.per_head
        share = factor * budget.share
        lead = f"{name_budget(budget)}: {why} need {needed} of {spec.cached_length} tokens per head; "
        in_tokens = budget.bytes is None and budget.given is not None and budget.given > 1
        smallest = str(needed) if in_tokens else f"{ceil(share * 10**5) / 10**5:g}"
        if budget.bytes is not None:
            needed_bytes = f"{ceil(factor * budget.bytes)} bytes of a sequence"
            if share > 1:
                return cls(
                    f"{lead}these take up to {needed_bytes}, and a budget has at most {budget.full_bytes}, the full "
                    "cache in 16 bits; set budget_unit=tokens or a cache_dtype of fewer bits"
                )
            smallest = f"{needed_bytes}, or {smallest}"
        elif share > 1:
            return cls(f"{lead}no budget exceeds the full cache")
        return cls(f"{lead}the smallest feasible budget is {smallest}")

    @classmethod
    def of_leading(cls, budget: Budget, leading: int, spec: ModelSpec) -> "InfeasibleBudget":
        """Return the error of `leading` first tokens that alone exceed the budget."""
        return cls(f"{cls.of(budget, leading, spec, 'the protected first tokens')}, or lower `leading`")

    @classmethod
    def of_sinks(cls, budget: Budget, sinks: int, needed: int, spec: ModelSpec) -> "InfeasibleBudget":
        """Return the error of sinks that alone need `needed` tokens per head."""
        if spec.writes_text and not spec.padding_counts and budget.bytes is None:
            chunks = f" and of {sinks - 1} more chunks" if sinks > 1 else ""
            why = f"the tokens of the longest prompt{chunks}, which sinks={sinks} keeps,"
            return cls(f"{cls.of(budget, needed, spec, why)}, or set sinks=0")
        if spec.writes_text and sinks == 1:
            why = f"the tokens of the longest prompt, model.prompt_tokens={needed},"
            return cls(f"{cls.of(budget, needed, spec, why)}, or lower `model.prompt_tokens` or `sinks`")
        kind = "scales" if spec.family == "next-scale" else "segments"
        return cls(f"{cls.of(budget, needed, spec, f'{sinks} sink {kind}')}, or lower `sinks`")
