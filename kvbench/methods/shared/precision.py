"""Precision in which a method has tokens stored."""

from typing import NamedTuple


class Precision(NamedTuple):
    """Storage of one segment's tokens in one head.

    Attributes:
        bits: 16, 8, 4, 3 or 2; below 16, codes of static codebooks. A segment of one token always has 16.
        shared: unconditional sequences read the codes of their conditional twins and store none.
    """

    bits: int
    shared: bool = False


def find_stored_bits(bits: int, tokens: int) -> int:
    """Return the bits per value of a segment of `tokens` tokens in static codebooks: `bits`, or 16 for one token.

    A single token, such as the first scale, gives calibration one value per prompt and channel, and as a sink its error
    reaches every later token.
    """
    return 16 if tokens == 1 else bits
