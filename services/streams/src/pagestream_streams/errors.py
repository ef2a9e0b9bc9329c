"""What can go wrong at this border, as one tree. Redis' own errors never pass it: they are chained to these."""

# ruff: noqa: N818 -- these names are said by users: "the queue is full", not "queue full error"

from __future__ import annotations


class StreamsError(Exception):
    """The root of this package's errors."""


class Unavailable(StreamsError):
    """Redis can't be reached or can't serve now. Trying again later is right."""


class QueueFull(StreamsError):
    """A queue's bound is reached, or the tenant's share of it while others wait.

    `retry_after_s` is the time, by the measured drain rate, until a tenth of the bound is free again.
    """

    def __init__(self, *, limit: str, bound: int, queued: int, retry_after_s: float, tenant: str = "") -> None:
        """`limit` is "requests" or "prompt tokens"; `queued` counts the same thing, of `tenant` alone where given."""
        whose = " of this tenant, others waiting too" if tenant else ""
        super().__init__(
            f"the queue has {queued} of at most {bound} {limit}{whose}, and this request doesn't fit; "
            f"try again in {retry_after_s:.1f} s"
        )
        self.tenant = tenant
        self.limit = limit
        self.bound = bound
        self.queued = queued
        self.retry_after_s = retry_after_s


class RequestNotFound(StreamsError):
    """This tenant has no such request: never accepted, of another tenant, malformed, or past its retention."""

    def __init__(self, request_id: str) -> None:
        """`request_id` is shown as given."""
        super().__init__(f"there is no request {request_id!r}: it was never accepted, or its retention time has passed")
        self.request_id = request_id


class ModelNotFound(StreamsError):
    """No engine has ever published this model."""

    def __init__(self, name: str) -> None:
        """`name` is shown as given."""
        super().__init__(f"there is no model {name!r}; Broker.models() lists those that are known")
        self.name = name


class ModelNameRefused(StreamsError, ValueError):
    """A model's name can't be part of a Redis key, or its tag is taken by another name."""


class OffsetOutOfRange(StreamsError):
    """The offset is past the end of a finished log."""

    def __init__(self, request_id: str, from_index: int, next_index: int) -> None:
        """`next_index` is the length of the log."""
        super().__init__(f"offset {from_index} is past the end of {request_id}, whose log has finished at {next_index}")
        self.request_id = request_id
        self.from_index = from_index
        self.next_index = next_index


class DigestMismatch(StreamsError):
    """The log differs from what the reader has seen before. Going on would mix two generations."""

    def __init__(self, request_id: str, index: int) -> None:
        """`index` is the offset at which the digests were compared."""
        super().__init__(f"the log of {request_id} differs before offset {index} from what was read before")
        self.request_id = request_id
        self.index = index


class IdempotencyConflict(StreamsError):
    """The idempotency key was used before with another body."""

    def __init__(self, key: str) -> None:
        """`key` is the client's."""
        super().__init__(
            f"the idempotency key {key!r} was used before with another body; use a new key for a new request"
        )
        self.key = key


class ServerNotFound(StreamsError):
    """No Redis server of a sufficient version is on this machine."""
