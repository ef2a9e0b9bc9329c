"""The errors of this package, as one tree. Redis' own errors are chained to them and never raised."""

# ruff: noqa: N818 -- the names say what happened (QueueFull), as the API's error codes do

from __future__ import annotations

from collections.abc import Sequence

from pagestream_streams.rates import Rate


class StreamsError(Exception):
    """The root of this package's errors."""


class Unavailable(StreamsError):
    """Redis can't be reached or can't serve now. Try again later."""


class StorageFull(Unavailable):
    """Redis is at its memory limit and refuses what needs memory: new requests and new log entries."""


class QueueFull(StreamsError):
    """A queue's bound is reached, or the tenant's share of it while other tenants wait.

    `retry_after_s`: seconds until a tenth of the queued requests is gone, by the measured drain rate.
    """

    def __init__(self, *, limit: str, bound: int, queued: int, retry_after_s: float, tenant: str = "") -> None:
        """`limit`: "requests" or "prompt tokens", which `bound` and `queued` count; only those of `tenant` if given."""
        whose = " of this tenant, while other tenants wait" if tenant else ""
        super().__init__(
            f"the queue has {queued} of at most {bound} {limit}{whose}, and this request doesn't fit; "
            f"try again in {retry_after_s:.1f} s"
        )
        self.tenant = tenant
        self.limit = limit
        self.bound = bound
        self.queued = queued
        self.retry_after_s = retry_after_s


class ClassRefused(QueueFull):
    """All engines of the model are short of memory and ask for no more requests of this class."""

    def __init__(self, *, priority: int, least_refused: int, retry_after_s: float) -> None:
        """`least_refused`: the first class that is refused; those after it are, too."""
        super().__init__(limit="requests", bound=0, queued=0, retry_after_s=retry_after_s)
        self.args = (
            f"the engines are short of memory and take no requests of priority {least_refused} and lower now, given "
            f"{priority}; try again in {retry_after_s:.1f} s",
        )
        self.priority = priority
        self.least_refused = least_refused


class KnownPoison(StreamsError, ValueError):
    """An equal request of this tenant has made an engine hang or die, and ended for that."""

    def __init__(self, request_id: str) -> None:
        """`request_id`: of the equal one."""
        super().__init__(
            f"an equal request ({request_id}) was ended lately as the cause of an engine's death; it is not run again "
            "for some minutes: change it"
        )
        self.request_id = request_id


class LogsFull(StreamsError):
    """What a tenant's logs may take in Redis is used up, or too little for this request alone."""

    def __init__(self, *, wanted: int, held: int, limit: int, retry_after_s: float | None) -> None:
        """Bytes; `retry_after_s`: seconds until the next log expires, None where no wait helps."""
        what = f"this request's log may take {wanted} bytes (prompt, tokens times choices, log probabilities)"
        fewer = "ask for fewer max_tokens, choices or log probabilities"
        if retry_after_s is None:
            super().__init__(f"{what}, and all logs of this tenant at most {limit}; {fewer}")
        else:
            super().__init__(
                f"{what}, and {held} of the at most {limit} bytes of this tenant's logs are in use; {fewer}, or try "
                f"again in {retry_after_s:.1f} s: logs of finished requests expire"
            )
        self.wanted = wanted
        self.held = held
        self.limit = limit
        self.retry_after_s = retry_after_s


class RateLimited(StreamsError):
    """A limit of the tenant, or of its credential, has no room for this request."""

    def __init__(self, rate: Rate, *, wanted: int, retry_after_s: float | None, rates: Sequence[Rate] = ()) -> None:
        """`rate`: the limit; `wanted`: what the request adds to it; `retry_after_s`: seconds until it fits, if nothing
        else is sent; None where it never does. `rates`: how far all limits are used.
        """
        what = rate.name.replace("_", " ")
        whose = f"this {rate.scope} may use {rate.limit} {what}"
        if retry_after_s is None:
            super().__init__(
                f"{whose}, and this request asks for {wanted}; ask for less: a shorter prompt, max_tokens, n"
            )
        else:
            super().__init__(
                f"{whose}, {rate.used} are used, and this request asks for {wanted}; try again in {retry_after_s:.1f} s"
            )
        self.rate = rate
        self.rates = tuple(rates)
        self.wanted = wanted
        self.retry_after_s = retry_after_s


class RequestNotFound(StreamsError):
    """This tenant has no such request: never accepted, another tenant's, malformed, or past its retention."""

    def __init__(self, request_id: str) -> None:
        """`request_id`: as given."""
        super().__init__(f"there is no request {request_id!r}: it was never accepted, or its retention time has passed")
        self.request_id = request_id


class PartitionGone(RequestNotFound):
    """The request's model was published anew with fewer partitions: what the request's one has can only be read."""

    def __init__(self, request_id: str, partition: int, partitions: int) -> None:
        """`partition`: of the request; `partitions`: number of the model's now."""
        super().__init__(request_id)
        self.args = (
            f"{request_id!r} is in partition {partition}, and its model was published anew with {partitions}: it can "
            "be read, but not run again under its id or requeued; send it as a new request",
        )


class ModelNotFound(StreamsError):
    """No engine has ever published this model."""

    def __init__(self, name: str) -> None:
        """`name`: as given."""
        super().__init__(f"there is no model {name!r}: no engine has published it, or it was removed")
        self.name = name


class ModelUnavailable(StreamsError):
    """No engine that lists the model can load it."""

    def __init__(self, name: str, reason: str) -> None:
        """`reason`: an engine's."""
        super().__init__(f"the model {name!r} can't be loaded: {reason}")
        self.name = name


class ModelInUse(StreamsError):
    """Engines serve the model, or it was published again meanwhile, so it can't be removed."""

    def __init__(self, name: str, engines: Sequence[str] = ()) -> None:
        """`engines`: ids of those that live; none where it was published again."""
        if len(engines) == 1:
            super().__init__(f"1 engine serves {name!r}: {engines[0]}; stop it first")
        elif engines:
            super().__init__(f"{len(engines)} engines serve {name!r}, such as {min(engines)}; stop them first")
        else:
            super().__init__(f"{name!r} was published again while it was removed; it stays published")
        self.name = name
        self.engines = tuple(engines)


class RequestsUnfinished(StreamsError):
    """Requests of the model have not finished, so it isn't removed."""

    def __init__(self, name: str, count: int) -> None:
        """`count`: so many, or more."""
        super().__init__(f"{count} requests of {name!r} have not finished; let an engine finish them, or end them")
        self.name = name
        self.count = count


class ModelNameRefused(StreamsError, ValueError):
    """A model's name can't be part of a Redis key, or its tag is taken by another name."""


class AdapterRefused(StreamsError, ValueError):
    """A LoRA adapter can't be loaded: its files can't be read, or its name stands for others."""


class OffsetOutOfRange(StreamsError):
    """The offset is past the end of a finished log."""

    def __init__(self, request_id: str, from_index: int, next_index: int) -> None:
        """`next_index`: length of the log."""
        super().__init__(f"offset {from_index} is past the end of {request_id}, whose log has finished at {next_index}")
        self.request_id = request_id
        self.from_index = from_index
        self.next_index = next_index


class DigestMismatch(StreamsError):
    """The log differs from what the reader has seen. Going on would mix two generations."""

    def __init__(self, request_id: str, index: int) -> None:
        """`index`: offset at which the digests differ."""
        super().__init__(f"the log of {request_id} differs before offset {index} from what was read before")
        self.request_id = request_id
        self.index = index


class IdempotencyConflict(StreamsError):
    """The idempotency key was used before with another body."""

    def __init__(self, key: str) -> None:
        """`key`: as given by the client."""
        super().__init__(
            f"the idempotency key {key!r} was used before with another body; use a new key for a new request"
        )
        self.key = key


class ServerNotFound(StreamsError):
    """No Redis server of a sufficient version is installed on this machine."""


class DataFolderRefused(ServerNotFound):
    """A data folder was written by a Redis server that is newer than those of this machine, or of another kind."""

    def __init__(self, message: str, *, name: str, version: str) -> None:
        """`name` and `version`: of the server that wrote it, such as "valkey" and "9.1.2"."""
        super().__init__(message)
        self.name = name
        self.version = version
