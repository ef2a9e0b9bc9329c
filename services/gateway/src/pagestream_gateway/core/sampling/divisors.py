"""Bounds on the `multipleOf` of a JSON schema, which are those of engines: `pagestream_engine.request.divisors`."""

import math
from collections.abc import Collection
from decimal import Decimal

MAX_DIVISOR = 10_000
"""Of one `multipleOf`, without its decimal point: the time to compile grows with it."""
MAX_COMMON_DIVISOR = 30_000
"""Of the least common multiple of all, likewise."""
_WRAPS_AT = 1 << 32
"""llguidance multiplies divisors as integers of 32 bits, without a check."""


def divisors_fault(divisors: Collection[float]) -> str | None:
    """Return what is wrong with the values of `multipleOf` of one grammar."""
    common, largest, most_places = 1, 1, 0
    for given in divisors:
        if not 0 < given <= MAX_DIVISOR:
            return f"multipleOf {str(given)[:40]}, must be more than 0 and at most {MAX_DIVISOR}"
        exact = Decimal(str(given)).normalize()
        places = max(0, -int(exact.as_tuple().exponent))
        digits = int(exact.scaleb(places))
        if digits > MAX_DIVISOR:
            return f"multipleOf {given}, must be at most {MAX_DIVISOR} without its decimal point, is {digits}"
        common = math.lcm(common, digits)
        largest, most_places = max(largest, digits), max(most_places, places)
        if common > MAX_COMMON_DIVISOR:
            return (
                f"multipleOf {given} beside others; their least common multiple must be at most {MAX_COMMON_DIVISOR} "
                "without decimal points"
            )
    if len(set(divisors)) > 1 and common * largest * 10**most_places >= _WRAPS_AT:
        return f"several multipleOf, one with {most_places} decimal places; must have fewer places, or smaller values"
    return None
