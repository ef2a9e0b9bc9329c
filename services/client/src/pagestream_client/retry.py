"""When a failed call is retried, at which gateway, and when the client gives up.

`Failure` is a call that failed, over either protocol, and `error_of` the typed error that it becomes where it is not
tried again. `Endpoints` chooses the gateway of the next call; `RetryState` has the delays of one stream or call.
"""

from __future__ import annotations

import enum
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagestream_client import errors
from pagestream_client.errors import PagestreamError, Unavailable


@dataclass(frozen=True)
class Reconnection:
    """Limits of retries, in seconds; the same for calls and streams, over both protocols."""

    limit_s: float = 130.0
    """Longest time without any progress. Longer than an engine, a gateway or Redis takes to restart, and by one more
    try longer than the 120 s for which gateways themselves wait for Redis (`outage_limit_s`)."""
    first_contact_s: float | None = None
    """The same limit until any gateway has answered, when it is more likely that none runs; each gateway is called at
    least once. None: `limit_s`."""
    first_delay_s: float = 0.05
    """Longest delay before the first try at a gateway that has not failed. The delay is drawn from 0 to this, so that
    the clients of a dead gateway do not reach the next one at the same moment."""
    max_delay_s: float = 2.0
    """Longest delay between two rounds over all gateways. The delay doubles up to this; half of it is random."""
    settle_s: float = 5.0
    """How long a stream goes on reading after the request's deadline, to learn how the request ended: the deadline
    ends it in Redis, not at this client."""
    internal_tries: int = 3
    """Most retries of a call that a gateway answers with an internal error: another gateway may not have the fault."""

    def __post_init__(self) -> None:
        limits = (self.limit_s, self.settle_s, self.first_contact_s or 0.0)
        if min(limits) < 0 or not 0 < self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"limits must not be negative, and 0 < first_delay_s <= max_delay_s must hold; got {self}")


class Code(enum.Enum):
    """The canonical codes of google.rpc.Code: gRPC's statuses; HTTP answers are mapped to them."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
"""The reason of a NOT_FOUND that names a model, not a request."""
_BROKEN = (Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL, Code.ABORTED)


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: Code
    message: str
    reason: str = ""
    """The gateway's stable word in upper case, such as "QUEUE_FULL"; empty where the transport failed before a gateway
    gave a reason."""
    field: str | None = None
    """The field of the request that is wrong."""
    retry_after_s: float | None = None
    """Seconds that the gateway asks to wait; None where a retry changes nothing, or where it did not say."""
    http_status: int | None = None
    """Status of the HTTP answer; None over gRPC, and where no answer came."""

    @property
    def is_transient(self) -> bool:
        """Whether another try may help: no gateway answered, or the gateway asks to come back."""
        if self.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            return True
        return self.code in _BROKEN and not self.reason  # a broken connection, if no gateway gives a reason

    @property
    def is_gateway_unable(self) -> bool:
        """Whether a gateway has said that it cannot serve now: it stops, or Redis does not answer it."""
        return self.code is Code.UNAVAILABLE and bool(self.reason)

    @property
    def is_queue_full(self) -> bool:
        """Whether the gateway asks to wait because there is no room."""
        return self.code is Code.RESOURCE_EXHAUSTED and self.retry_after_s is not None


def error_of(failure: Failure) -> errors.PagestreamError:
    """Return the typed error of a failure that is not tried again."""
    error = _typed(failure)
    error.http_status = failure.http_status
    return error


def _typed(failure: Failure) -> errors.PagestreamError:
    if failure.is_transient:
        return errors.Unavailable(failure.message)
    if failure.is_queue_full:
        return errors.QueueFull(failure.message, failure.retry_after_s or 0.0)
    if failure.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED):  # the latter: too many bytes
        return errors.InvalidRequest(failure.field, failure.message)
    if failure.reason == MODEL_NOT_FOUND:
        return errors.ModelNotFound(failure.message)
    kind = _KINDS.get(failure.code)
    return errors.ServerError(failure.code.name, failure.message) if kind is None else kind(failure.message)


_KINDS: dict[Code, type[errors.PagestreamError]] = {
    Code.UNAUTHENTICATED: errors.Unauthenticated,
    Code.NOT_FOUND: errors.RequestNotFound,
    Code.ALREADY_EXISTS: errors.IdempotencyConflict,
    Code.OUT_OF_RANGE: errors.OffsetOutOfRange,
    Code.DATA_LOSS: errors.DataLoss,
}


class Endpoints:
    """Choose the gateway of the next call; all streams of a client share it. Safe to use from several threads.

    A client stays with a gateway that works. The first one is drawn at random, so that many clients spread over the
    gateways.

    Args:
        targets: addresses of the gateways; a repeated one counts once.

    Raises:
        ValueError: there is no target.
    """

    def __init__(self, targets: Sequence[str], rng: random.Random) -> None:
        if not targets:
            raise ValueError("at least one gateway is needed, none was given")
        self.targets = tuple(dict.fromkeys(targets))
        self._lock = threading.Lock()
        self._failed = dict.fromkeys(self.targets, 0)  # number of the failure, counted over all targets; 0: it works
        self._num_failures = 0
        self._current = rng.choice(self.targets)

    @property
    def current(self) -> str:
        """The gateway of the next call."""
        return self._current

    def worked(self, target: str) -> None:
        """Note that a gateway answered."""
        if self._failed[target]:
            with self._lock:
                self._failed[target] = 0

    def failed(self, target: str) -> None:
        """Note that a gateway did not answer, or is stopping; the one whose last failure is the longest ago is next."""
        with self._lock:
            self._num_failures += 1
            self._failed[target] = self._num_failures
            if target == self._current:
                self._current = min(self.targets, key=self._failed.__getitem__)


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


class Configuration:
    """The gateways of a client and how it retries. The protocols add how their calls are made."""

    def __init__(self, targets: Sequence[str], reconnection: Reconnection | None) -> None:
        self._rng = random.Random()
        self.endpoints = Endpoints(targets, self._rng)
        self.reconnection = reconnection or Reconnection()

    def retry_state(self) -> RetryState:
        """Return the retry state of one stream, or of one call."""
        return RetryState(self.endpoints, self.reconnection, clock=time.monotonic, rng=self._rng)
