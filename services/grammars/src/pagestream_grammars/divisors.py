"""Bounds on the `multipleOf` of a JSON schema: its automaton has a state for each remainder."""

from __future__ import annotations

import math
from collections.abc import Collection
from decimal import Decimal

from pagestream_grammars.errors import GrammarError

MAX_DIVISOR = 10_000
"""Of one `multipleOf`, without its decimal point. Compiling takes up to 0.2 s at it, and the time grows with it: 2.4 s
at 999,991, without an end in sight at 99,999,999."""
MAX_COMMON_DIVISOR = 30_000
"""Of the least common multiple of all of a document, without decimal points: parts that hold together have an automaton
for it, 0.2 s at 27,719; parts beside each other have theirs, 0.7 s in sum for all divisors of 27,720."""
_WRAPS_AT = 1 << 32
"""llguidance multiplies divisors as integers of 32 bits, without a check."""


def check_divisors(field: str, divisors: Collection[float]) -> None:
    """Check all values of `multipleOf` of one grammar.

    Args:
        divisors: as they are in the document.

    Raises:
        GrammarError: the automaton of one of them, or of all together, would take long to compile.
    """
    common, largest, most_places = 1, 1, 0
    for given in divisors:
        named = f"multipleOf {str(given)[:40]}"
        if not 0 < given <= MAX_DIVISOR:
            raise GrammarError(field, named, f"more than 0, and at most {MAX_DIVISOR}")
        digits, places = _without_point(given)
        if digits > MAX_DIVISOR:
            raise GrammarError(field, named, f"at most {MAX_DIVISOR} without its decimal point, which is {digits}")
        common = math.lcm(common, digits)
        largest, most_places = max(largest, digits), max(most_places, places)
        if common > MAX_COMMON_DIVISOR:
            raise GrammarError(
                field,
                f"{named} beside others",
                f"a least common multiple of at most {MAX_COMMON_DIVISOR} without decimal points",
            )
    if len(set(divisors)) > 1 and common * largest * 10**most_places >= _WRAPS_AT:
        raise GrammarError(
            field, f"several multipleOf, one with {most_places} decimal places", "fewer places, or smaller values"
        )


def num_remainders(divisors: Collection[float]) -> int:
    """Return how many states the automata of values that were checked may have: of each, and of all together."""
    digits = {_without_point(given)[0] for given in divisors}
    return sum(digits) + (math.lcm(*digits) if len(digits) > 1 else 0)


def _without_point(given: float) -> tuple[int, int]:
    """Return a number times a power of ten, as small as makes it whole, and that power."""
    exact = Decimal(str(given)).normalize()
    places = max(0, -int(exact.as_tuple().exponent))
    return int(exact.scaleb(places)), places
