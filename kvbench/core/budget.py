"""The one definition of a budget, in exact rational arithmetic."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from kvbench.core.segments import ModelSpec


@dataclass(frozen=True)
class Budget:
    """Capacity B of one sequence's cache: at most B tokens summed over all layers and KV heads.

    Attributes:
        capacity: B = b x T x c_{K-1}, exact (HeatKV Eq. 5 uses the real number, not a rounded one).
        full: T x c_{K-1}, the full cache.
        heads: T, so that `per_head` is the mean the papers quote.
    """

    capacity: Fraction
    full: int
    heads: int

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
        try:
            number = Fraction(str(value))
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"budget={value}: give a fraction in (0, 1] or a number of tokens per head"
            ) from None
        if number <= 0:
            raise ValueError(f"budget={value}: must be positive")
        if number > 1:
            if number.denominator != 1:
                raise ValueError(f"budget={value}: above 1 it counts tokens per head and must be whole")
            if number > spec.cached_length:
                raise ValueError(
                    f"budget={value}: {spec.name} caches {spec.cached_length} tokens per head at most"
                )
            number /= spec.cached_length
        return cls(number * spec.full_tokens, spec.full_tokens, spec.all_heads)

    def take_share(self, spec: ModelSpec, share: ModelSpec) -> "Budget":
        """Return what a share of the heads has of B where all heads have equally much.

        Tokens that do not divide go to the first heads, layer by layer, so that a head has as many in its share as in
        the whole.

        Args:
            spec: of the whole model, whose budget this is.
            share: of some of its heads (`ModelSpec.take_share`).
        """
        if share == spec:
            return self
        least, more = divmod(self.tokens, self.heads)
        layers, some = divmod(more, spec.heads)
        among = min(max(some - share.first_head, 0), share.heads)
        tokens = least * share.all_heads + layers * share.heads + among
        return Budget(Fraction(tokens), share.full_tokens, share.all_heads)

    @property
    def fraction(self) -> Fraction:
        """b, the share of the full cache."""
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


class InfeasibleBudget(ValueError):
    """A budget below what a method must keep; the message names the smallest feasible one."""

    @classmethod
    def of(cls, budget: Budget, needed: int, spec: ModelSpec, why: str) -> "InfeasibleBudget":
        """`why` needs `needed` tokens per head."""
        smallest = ceil(Fraction(needed, spec.cached_length) * 10**5) / 10**5
        return cls(
            f"budget={float(budget.fraction):g}: {why} need {needed} of {spec.cached_length} tokens per head; the "
            f"smallest feasible budget is {smallest:g}"
        )

    @classmethod
    def of_sinks(cls, budget: Budget, sinks: int, needed: int, spec: ModelSpec) -> "InfeasibleBudget":
        """The sinks alone need `needed` tokens per head."""
        return cls(f"{cls.of(budget, needed, spec, f'{sinks} sink scales')}, or lower `sinks`")
