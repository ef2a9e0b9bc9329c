"""When a failed call is retried, where, and when the client gives up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from pagestream_client.endpoints import Endpoints
from pagestream_client.errors import PagestreamError, Unavailable
from pagestream_client.failures import Code, Failure, error_of
from pagestream_client.settings import Reconnection

_HEALTHY_S = {"": 10.0, "GATEWAY_STOPPING": 10.0, "UNAVAILABLE": 140.0}
"""Seconds, by the reason of its end, after which a call counts as progress even if it brought no token: its request
waited in the queue. A dead connection is noticed sooner; a gateway waits for Redis for 120 s, then answers
UNAVAILABLE."""
_ROUND_S = 10.0
"""After a call that lasted this long, the other gateways have not been tried for a while, and are tried at once."""


class RetryState:
    """The failures of one stream, or of one call, since its last progress.

    Args:
        endpoints: the gateways; failures and successes are reported to them.
        clock: returns monotonic seconds.
        rng: draws the random part of delays.
    """

    def __init__(
        self, endpoints: Endpoints, policy: Reconnection, *, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._endpoints = endpoints
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._failing_since: float | None = None
        self._num_tries = 0
        self._num_failures = 0  # since any gateway has answered
        self._num_internal = 0
        self._is_answered = False

    def worked(self, target: str) -> None:
        """Note progress through the gateway `target`."""
        self._endpoints.worked(target)
        self._failing_since, self._num_tries, self._num_internal = None, 0, 0
        self._is_answered = True

    def answered(self) -> None:
        """Note that a gateway has taken the call, though it made no progress yet: later failures are an outage."""
        self._is_answered = True

    def next_delay(self, failure: Failure, target: str, *, lasted_s: float = 0.0) -> float:
        """Return the seconds to wait before the next try, which goes to `endpoints.current`.

        Args:
            failure: what ended the last call.
            target: the gateway of that call.
            lasted_s: seconds for which that call is known to have stood.

        Raises:
            PagestreamError: no further try is made: at once where it would not change anything, else when the limit
                is reached.
        """
        self._num_failures += 1
        self._is_answered = self._is_answered or bool(failure.reason)
        if failure.is_queue_full:
            return self._within_limit(failure, (failure.retry_after_s or 0.0) * self._rng.uniform(1.0, 1.25))
        if failure.code is Code.INTERNAL and failure.reason and self._num_internal < self._policy.internal_tries:
            self._num_internal += 1
        elif not failure.is_transient:
            raise error_of(failure)
        self._endpoints.failed(target)
        if lasted_s >= _HEALTHY_S.get(failure.reason, math.inf):
            self._failing_since = None
        if lasted_s >= _ROUND_S:
            self._num_tries = 0
        self._num_tries += 1
        return self._within_limit(failure, self._delay_s(failure))

    def _delay_s(self, failure: Failure) -> float:
        policy, rounds = self._policy, self._num_tries - len(self._endpoints.targets)
        if rounds < 0:
            return self._rng.uniform(0.0, policy.first_delay_s)  # some gateway has not been tried yet
        longest = min(policy.first_delay_s * 2.0 ** min(rounds, 16), policy.max_delay_s)
        return max(self._rng.uniform(0.5, 1.0) * longest, min(failure.retry_after_s or 0.0, policy.max_delay_s))

    def _within_limit(self, failure: Failure, delay_s: float) -> float:
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        limit_s = self._limit_s()
        if now + delay_s - self._failing_since > limit_s:
            raise self._gives_up(failure, limit_s)
        return delay_s

    def _limit_s(self) -> float:
        first_contact_s = self._policy.first_contact_s
        if self._is_answered or first_contact_s is None:
            return self._policy.limit_s
        return first_contact_s if self._num_failures >= len(self._endpoints.targets) else math.inf

    def _gives_up(self, failure: Failure, limit_s: float) -> PagestreamError:
        error = error_of(failure)
        if isinstance(error, Unavailable) and (limit_s or not failure.reason):
            where = ", ".join(self._endpoints.targets)
            waited = f" for {limit_s:g} s" if limit_s else ""
            error = Unavailable(f"no answer from {where}{waited}; the last error: {failure.message}")
            error.http_status = failure.http_status
        return error
