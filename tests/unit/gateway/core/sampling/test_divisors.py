"""The bounds on `multipleOf` are those of engines: a request that a gateway accepts is not refused there."""

from __future__ import annotations

import pytest
from pagestream_engine.errors import InvalidSamplingParams
from pagestream_engine.request import divisors as of_engines
from pagestream_gateway.core.sampling import divisors
from pagestream_gateway.core.sampling.divisors import divisors_fault

GIVEN = [(9999.9999,), (9973, 9967), (0,), (float("nan"),), (10_000,), (10_001,), (1e-7, 9973), (0.01, 0.25, 15, 1e3)]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_gateway_and_an_engine_refuse_the_same(given: tuple[float, ...]) -> None:
    try:
        of_engines.check_divisors("json", given)
    except InvalidSamplingParams:
        assert divisors_fault(given) is not None
    else:
        assert divisors_fault(given) is None
    assert divisors.MAX_COMMON_DIVISOR == of_engines.MAX_COMMON_DIVISOR
