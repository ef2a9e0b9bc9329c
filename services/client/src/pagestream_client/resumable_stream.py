"""One stream over any number of calls: which call is next, and what its chunks and its failure mean.

Does no input or output: the blocking and the asynchronous client of both protocols drive the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from pagestream_client.answers import Chunk, FinishReason
from pagestream_client.errors import (
    DataLoss,
    DeadlineExceeded,
    GenerationFailed,
    OffsetOutOfRange,
    PagestreamError,
    Position,
    Quarantined,
)
from pagestream_client.retry import MODEL_NOT_FOUND, Code, Failure, RetryState, error_of

_QUARANTINED = "quarantined"


class ResumableStream:
    """Follow one request to its end.

    A protocol's subclass turns `begin_call` into the request to send (submit until the request id is known, then
    resume from `position`) and what the gateway answers into `accept` and `advance`.

    Args:
        start: the place to resume from; None where a request is to be submitted first.
        retry: delays and limits of this stream.
        deadline_s: seconds from now after which the request ends; None is never.
        settle_s: seconds after the deadline for which the end is still read.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        start: Position | None,
        retry: RetryState,
        *,
        deadline_s: float | None,
        settle_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.position = start or Position("")
        """After the last chunk; its request id is empty until a gateway has accepted the request."""
        self.is_over = False
        """Whether the last chunk has come."""
        self._retry = retry
        self._deadline = None if deadline_s is None else clock() + deadline_s
        self._settle_s = settle_s
        self._clock = clock
        self._called_at = clock()
        self._is_answered = False  # whether the current call has brought a message
        self._is_submitted_here = start is None  # so that everything up to the position was read here
        self._failure: GenerationFailed | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the request id is known."""
        return bool(self.position.request_id)

    def begin_call(self) -> float | None:
        """Note that the next call begins now. Returns the seconds until its deadline; None is none.

        Raises:
            DeadlineExceeded: the request is not accepted yet and its deadline has passed, so it is not sent.
        """
        self._called_at, self._is_answered = self._clock(), False
        if not self.is_accepted and self._deadline is not None and self._called_at >= self._deadline:
            raise DeadlineExceeded("the deadline passed before a gateway had accepted the request")
        return self._timeout_s()

    def accept(self, request_id: str) -> None:
        """Note the request id that a gateway's answer carries.

        Raises:
            DataLoss: it is another request's.
        """
        if not self.is_accepted:
            self.position = Position(request_id)
        elif request_id != self.position.request_id:
            raise self._at_position(DataLoss(f"the stream of {self.position.request_id} went on with {request_id}"))

    def progressed(self, target: str) -> None:
        """Note that the current call has made progress through the gateway `target`."""
        self._is_answered = True
        self._retry.worked(target)

    def advance(self, chunk: Chunk, num_entries: Collection[int] | None = None) -> None:
        """Move past a chunk.

        Args:
            num_entries: numbers of log entries that the chunk may stand for; None where the protocol does not say.

        Raises:
            DataLoss: the chunk does not follow what came before.
        """
        moved = chunk.next_index - self.position.next_index
        if moved < 0 or (num_entries is not None and moved not in num_entries):
            text = f"{len(chunk.token_ids)} tokens after index {self.position.next_index} cannot end at"
            raise self._at_position(DataLoss(f"{text} {chunk.next_index}"))
        self.position = chunk.position
        if chunk.usage is not None:
            self.end(chunk)

    def end(self, chunk: Chunk) -> None:
        """Note that this chunk was the last one; `raise_failure` then raises where it is that of a failure."""
        self.is_over = True
        if chunk.finish_reason is FinishReason.ERROR or chunk.error is not None:
            code, message = (chunk.error.code, chunk.error.message) if chunk.error else ("", "")
            kind = Quarantined if code == _QUARANTINED else GenerationFailed
            self._failure = kind(code, message)

    def ended(self, target: str) -> float:
        """Note that the call has ended without an error. Returns seconds until the next one; see `is_over`."""
        if not (self._is_answered or self._is_submitted_here):
            self.is_over = True  # the caller stands at the log's end: there was nothing more to send
            return 0.0
        return self.failed(Failure(Code.UNAVAILABLE, "the stream ended before the answer did"), target)

    def failed(self, failure: Failure, target: str) -> float:
        """Note that the call has failed. Returns seconds until the next one.

        Raises:
            PagestreamError: there is no next one.
        """
        if self._is_submitted_here and self.is_accepted and failure.reason == MODEL_NOT_FOUND:
            # It was there when the request was accepted: Redis has lost it, and the engines publish it again.
            failure = replace(failure, code=Code.UNAVAILABLE)
        if self._deadline is not None and self._clock() >= self._deadline:
            return self._after_deadline(failure, target)
        try:
            return self._in_time(failure, self._retry.next_delay(failure, target, lasted_s=self._lasted_s()))
        except OffsetOutOfRange as error:
            self._at_position(error)
            if not self._is_submitted_here:
                raise
            raise self._at_position(DataLoss(f"the log ends before what was read of it: {error}")) from error
        except PagestreamError as error:
            self._at_position(error)
            raise

    def raise_failure(self) -> None:
        """Raise GenerationFailed where the last chunk was that of a request that failed."""
        if self._failure is not None:
            raise self._at_position(self._failure)

    def _lasted_s(self) -> float:
        """Seconds for which the current call is known to have stood."""
        return self._clock() - self._called_at

    def _timeout_s(self) -> float | None:
        if self._deadline is None:
            return None
        left_s = self._deadline - self._called_at
        return left_s if left_s > 0 else max(left_s + self._settle_s, 0.001)

    def _in_time(self, failure: Failure, delay_s: float) -> float:
        """Return the delay. Raises where the deadline of a request that is not accepted passes before the next try."""
        if self.is_accepted or self._deadline is None or self._clock() + delay_s < self._deadline:
            return delay_s
        if failure.is_queue_full:
            raise error_of(failure)
        raise DeadlineExceeded(f"the deadline passes before another try; the last error: {failure.message}")

    def _after_deadline(self, failure: Failure, target: str) -> float:
        """The deadline ends the request in Redis; what is left is to read how."""
        over = self._deadline is not None and self._clock() >= self._deadline + self._settle_s
        if over or not self.is_accepted:
            text = "the deadline passed, and no gateway sent how the request ended"
            raise self._at_position(DeadlineExceeded(f"{text}: {failure.message}"))
        if failure.code is Code.DEADLINE_EXCEEDED:
            return 0.0
        try:
            return self._retry.next_delay(failure, target)
        except PagestreamError as error:
            self._at_position(error)
            raise

    def _at_position(self, error: PagestreamError) -> PagestreamError:
        if self.is_accepted:
            error.position = self.position
        return error
