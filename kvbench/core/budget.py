"""Budgets in exact rational arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal

from kvbench.core.segments import ModelSpec

Unit = Literal["tokens", "bytes"]
UNITS: tuple[Unit, ...] = ("tokens", "bytes")
"""Units of a budget."""


@dataclass(frozen=True)
class Budget:
    """Capacity of one sequence's cache, summed over all layers and KV heads: in tokens, and in bytes if it counts them.

    Methods always receive a capacity in tokens. For a byte budget it is the number of tokens guaranteed to fit.

    Attributes:
        capacity: B = b x T x c_{K-1} tokens, exact (HeatKV Eq. 5 uses the real number, not a rounded one).
        full: T x c_{K-1}, the full cache.
        heads: T, so that `per_head` is the mean the papers quote.
        bytes: the bytes of one sequence that must not be exceeded, exact; None of a budget in tokens.
        full_bytes: bytes of the full cache of one sequence in 16 bits, of a budget in bytes.
    """

    capacity: Fraction
    full: int
    heads: int
    bytes: Fraction | None = None
    full_bytes: int | None = None

    @classmethod
    def parse(cls, value: float | int | str, spec: ModelSpec) -> "Budget":
        """Read a fraction of the full cache in (0, 1] or, above 1, a whole number of mean tokens per head.

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
            ValueError: not a number, not positive, above the full cache, or a broken number of tokens.
        """
        number = _read_number(value, f"budget={value}", "tokens per head")
        if number > 1:
            if number > spec.cached_length:
                raise ValueError(
                    f"budget={value}: {spec.name} caches {spec.cached_length} tokens per head at most"
                )
            number /= spec.cached_length
        return cls(number * spec.full_tokens, spec.full_tokens, spec.all_heads)

    @classmethod
    def parse_bytes(cls, value: float | int | str, spec: ModelSpec, token_bytes: int | Fraction) -> "Budget":
        """Read a fraction in (0, 1] of the bytes of the full cache in 16 bits or, above 1, whole bytes of a sequence.

        Keys and values in 16 bits get the tokens that the same fraction of the full cache in tokens would give them,
        those in 32 bits half as many. More than the full cache is never needed.

        >>> from kvbench.core.segments import next_scale
        >>> spec = ModelSpec("small", layers=2, heads=3, head_dim=8, segments=next_scale([(1, 1), (2, 2), (3, 3)]))
        >>> spec.full_bytes  # 30 tokens, each a key and a value of 8 numbers of 2 bytes
        960
        >>> Budget.parse_bytes(0.1, spec, token_bytes=2 * 8 * 2).capacity
        Fraction(3, 1)
        >>> Budget.parse_bytes(0.1, spec, token_bytes=2 * 8 * 4).capacity
        Fraction(3, 2)
        >>> Budget.parse_bytes(200, spec, token_bytes=2 * 8 * 2).tokens
        6

        Args:
            value: as the configuration has it.
            spec: the model's shapes.
            token_bytes: bytes of a token in one head, its key and its value; where tokens differ, of the largest.

        Raises:
            ValueError: not a number, not positive, above the full cache in 16 bits, or a broken number of bytes.
        """
        key = f"budget={value} budget_unit=bytes"
        number = _read_number(value, key, "bytes of a sequence")
        allowed = number if number > 1 else number * spec.full_bytes
        if allowed > spec.full_bytes:
            raise ValueError(
                f"{key}: a sequence of {spec.name} has {spec.full_bytes} bytes in 16 bits at most; a fraction of "
                "them is in (0, 1]"
            )
        capacity = min(allowed / Fraction(token_bytes), Fraction(spec.full_tokens))
        return cls(capacity, spec.full_tokens, spec.all_heads, allowed, spec.full_bytes)

    def take_share(self, spec: ModelSpec, share: ModelSpec) -> "Budget":
        """Return what a share of the heads has of B where all heads have equally much.

        Tokens that do not divide go to the first heads, layer by layer, so that a head has as many in its share as in
        the whole.

        Args:
            spec: of the whole model, whose budget this is.
            share: of some of its heads (`ModelSpec.take_share`). Bytes are shared out as tokens are.
        """
        if share == spec:
            return self
        each, more = divmod(self.tokens, self.heads)
        layers, some = divmod(more, spec.heads)
        among = min(max(some - share.first_head, 0), share.heads)
        tokens = each * share.all_heads + layers * share.heads + among
        part = Budget(Fraction(tokens), share.full_tokens, share.all_heads)
        if self.bytes is None:
            return part
        ratio = Fraction(tokens, self.tokens) if self.tokens else Fraction(share.all_heads, self.heads)
        return replace(part, bytes=self.bytes * ratio, full_bytes=share.full_bytes)

    @property
    def unit(self) -> Unit:
        """Unit of the limit: `tokens` or `bytes`."""
        return "tokens" if self.bytes is None else "bytes"

    @property
    def share(self) -> Fraction:
        """The budget as a share of the full cache in its own unit: of its tokens, or of its bytes in 16 bits."""
        if self.bytes is None or self.full_bytes is None:
            return self.fraction
        return self.bytes / self.full_bytes

    @property
    def exact(self) -> str:
        """The budget as an exact fraction; that of bytes with its unit. Budgets are equal if these are."""
        return str(self.capacity) if self.bytes is None else f"{self.bytes} bytes"

    @property
    def fraction(self) -> Fraction:
        """The share of the full cache's tokens that `capacity` is; b of a budget in tokens."""
        return self.capacity / self.full

    @property
    def per_head(self) -> Fraction:
        """Mean tokens per head, B / T."""
        return self.capacity / self.heads

    @property
    def head_tokens(self) -> int:
        """Whole tokens that every head can have at once, floor(B / T)."""
        return floor(self.per_head)

    @property
    def tokens(self) -> int:
        """Whole tokens that fit, floor(B)."""
        return floor(self.capacity)


def find_capacity(
    budget: Budget, token_bytes: int | Fraction, plan_bytes: "Callable[[Budget], int | Fraction]"
) -> Budget:
    """Return a budget in bytes with the largest capacity in tokens at which what a static method holds still fits.

    It is found by bisection over whole tokens. What is found fits in any case. It is the largest of all that fit if
    more capacity never makes a method hold less; where it does, as whole blocks may, one more token would not fit.

    Args:
        budget: in bytes; its capacity is sure to fit, all tokens being as large as the largest.
        token_bytes: bytes of the smallest token in one head.
        plan_bytes: returns the most bytes that one sequence holds under a budget, known beforehand. It may raise
            `InfeasibleBudget`; larger capacities are then tried.
    """
    allowed = budget.bytes
    assert allowed is not None, "of a budget in bytes"

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


def _read_number(value: float | int | str, key: str, whole: str) -> Fraction:
    """Read a positive number that counts something, `whole`, if it is above 1; `key` begins the message of errors."""
    try:
        number = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{key}: give a fraction in (0, 1] or a number of {whole}") from None
    if number <= 0:
        raise ValueError(f"{key}: must be positive")
    if number > 1 and number.denominator != 1:
        raise ValueError(f"{key}: above 1 it counts {whole} and must be whole")
    return number


def name_budget(budget: Budget) -> str:
    """Write a budget as the command line has it: a share, or bytes where they are fewer than a thousandth of all."""
    if budget.bytes is None:
        return f"budget={float(budget.share):g}"
    few = budget.bytes > 1 and budget.share < Fraction(1, 1000)
    return f"budget={float(budget.bytes if few else budget.share):g} budget_unit=bytes"


class InfeasibleBudget(ValueError):
    """A budget below what a method must keep; the message names the smallest feasible one."""

    @classmethod
    def of(cls, budget: Budget, needed: int, spec: ModelSpec, why: str) -> "InfeasibleBudget":
        """`why` needs `needed` tokens per head."""
        factor = Fraction(needed) / budget.per_head
        smallest = f"{ceil(factor * budget.share * 10**5) / 10**5:g}"
        if budget.bytes is not None:
            smallest = f"{ceil(factor * budget.bytes)} bytes of a sequence, or {smallest}"
        return cls(
            f"{name_budget(budget)}: {why} need {needed} of {spec.cached_length} tokens per head; the "
            f"smallest feasible budget is {smallest}"
        )

    @classmethod
    def of_sinks(cls, budget: Budget, sinks: int, needed: int, spec: ModelSpec) -> "InfeasibleBudget":
        """The sinks alone need `needed` tokens per head."""
        return cls(f"{cls.of(budget, needed, spec, f'{sinks} sink scales')}, or lower `sinks`")
