"""When to try again, and when to give up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import grpc

from pagestream_client.endpoints import Endpoints
from pagestream_client.errors import PagestreamError, Unavailable
from pagestream_client.settings import Reconnection
from pagestream_client.status import Failure, error_of

_HEALTHY_S = {"": 10.0, "GATEWAY_STOPPING": 10.0, "UNAVAILABLE": 140.0}
"""By the reason of its end: a call that stood this long has worked, even if it had nothing to say, since its request
waited in the queue. A dead connection is noticed sooner; a gateway waits for Redis for 120 s, then says UNAVAILABLE."""
_ROUND_S = 10.0
"""After a call that stood this long, the other gateways have not been asked for a while, and are asked at once."""


class Patience:
    """Counts the failures of one stream, or of one call, since it last made progress."""

    def __init__(
        self, endpoints: Endpoints, policy: Reconnection, *, clock: Callable[[], float], rng: random.Random
    ) -> None:
        """`clock` tells monotonic seconds."""
        self._endpoints = endpoints
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._since: float | None = None
        self._tries = 0
        self._internal = 0

    def worked(self, target: str) -> None:
        """Progress was made through this gateway."""
        self._endpoints.worked(target)
        self._since, self._tries, self._internal = None, 0, 0

    def after(self, failure: Failure, target: str, *, lasted_s: float = 0.0) -> float:
        """Seconds to wait before the next try, which goes to `endpoints.current`. Raises the typed error where there is
        none: at once where another try changes nothing, else when the limit is reached.

        `lasted_s` is for how long the call stood.
        """
        if failure.is_queue_full:
            return self._waited(failure, (failure.retry_after_s or 0.0) * self._rng.uniform(1.0, 1.25))
        if failure.code is grpc.StatusCode.INTERNAL and failure.reason and self._internal < self._policy.internal_tries:
            self._internal += 1
        elif not failure.is_transient:
            raise error_of(failure)
        self._endpoints.failed(target)
        if lasted_s >= _HEALTHY_S.get(failure.reason, math.inf):
            self._since = None
        if lasted_s >= _ROUND_S:
            self._tries = 0
        self._tries += 1
        return self._waited(failure, self._delay_s(failure))

    def _delay_s(self, failure: Failure) -> float:
        policy, rounds = self._policy, self._tries - len(self._endpoints.targets)
        if rounds < 0:
            return self._rng.uniform(0.0, policy.first_delay_s)  # some gateway has not been asked yet
        longest = min(policy.first_delay_s * 2.0 ** min(rounds, 16), policy.max_delay_s)
        return max(self._rng.uniform(0.5, 1.0) * longest, min(failure.retry_after_s or 0.0, policy.max_delay_s))

    def _waited(self, failure: Failure, delay_s: float) -> float:
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now + delay_s - self._since > self._policy.limit_s:
            raise self._gives_up(failure)
        return delay_s

    def _gives_up(self, failure: Failure) -> PagestreamError:
        error = error_of(failure)
        if isinstance(error, Unavailable):
            where = ", ".join(self._endpoints.targets)
            limit_s = self._policy.limit_s
            return Unavailable(f"no answer from {where} for {limit_s:g} s; the last error: {failure.message}")
        return error
