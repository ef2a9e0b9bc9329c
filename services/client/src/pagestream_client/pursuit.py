"""One stream over any number of calls: which call is next, and what its messages and its failure mean.

Does no input or output: the blocking and the asynchronous client drive the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.chunks import Chunk, FinishReason, chunk_of
from pagestream_client.errors import (
    DataLoss,
    DeadlineExceeded,
    GenerationFailed,
    OffsetOutOfRange,
    PagestreamError,
    Position,
    Quarantined,
)
from pagestream_client.patience import Patience
from pagestream_client.status import Failure, error_of

Response = api.GenerateResponse | api.ResumeResponse
_QUARANTINED = "quarantined"
_MODEL_NOT_FOUND = "MODEL_NOT_FOUND"


@dataclass(frozen=True)
class Call:
    """The next call of a stream: Generate until a gateway has told the request id, then Resume."""

    request: api.GenerateRequest | api.ResumeRequest
    timeout_s: float | None
    """gRPC deadline, which is the request's; None is none."""


class Pursuit:
    """Follows one request to its end."""

    def __init__(
        self,
        start: api.GenerateRequest | Position,
        patience: Patience,
        *,
        deadline_s: float | None,
        settle_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`start` is a request to make, or the place in one that was made before."""
        self._request = start if isinstance(start, api.GenerateRequest) else None
        self.position = start if isinstance(start, Position) else Position("")
        self.is_over = False
        """Whether the last chunk has come."""
        self._patience = patience
        self._deadline = None if deadline_s is None else clock() + deadline_s
        self._settle_s = settle_s
        self._clock = clock
        self._called = clock()
        self._heard = False  # whether the current call has brought a message
        self._own = self._request is not None  # whether everything up to the position was read here
        self._failure: GenerationFailed | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the request id is known."""
        return bool(self.position.request_id)

    def next_call(self) -> Call:
        """What to call now. Raises DeadlineExceeded instead of sending a request after its deadline."""
        self._called, self._heard = self._clock(), False
        if not self.is_accepted and self._request is not None:
            if self._deadline is not None and self._called >= self._deadline:
                raise DeadlineExceeded("the deadline passed before a gateway had accepted the request")
            return Call(self._request, self._timeout_s())
        place = api.ResumeRequest(
            request_id=self.position.request_id, next_index=self.position.next_index, digest=self.position.digest
        )
        if self._request is not None:
            place.request.CopyFrom(self._request)
        return Call(place, self._timeout_s())

    def take(self, response: Response, target: str) -> Chunk | None:
        """The chunk of a message; None for the first message, which has only the request's id.

        Raises DataLoss where it does not follow what came before.
        """
        self._heard = True
        self._patience.worked(target)
        message = response.chunk
        if not self.is_accepted:
            self._accept(response)
        if message.request_id != self.position.request_id:
            raise self._told(DataLoss(f"the stream of {self.position.request_id} went on with {message.request_id}"))
        if not (message.token_ids or message.finish_reason or message.HasField("usage")):
            return None
        self._check_place(message)
        self.position = Position(message.request_id, message.next_index, message.digest)
        chunk = chunk_of(message)
        if chunk.usage is not None:
            self._end(chunk)
        return chunk

    def ended(self, target: str) -> float:
        """The call has ended well. Returns seconds until the next one where the log has not; see `is_over`."""
        if not (self._heard or self._own):
            self.is_over = True  # the caller stands at the log's end: there was nothing more to say
            return 0.0
        return self.failed(Failure(grpc.StatusCode.UNAVAILABLE, "the stream ended before the answer did"), target)

    def failed(self, failure: Failure, target: str) -> float:
        """The call has failed. Returns seconds until the next one; raises the typed error where there is none."""
        if self._own and self.is_accepted and failure.reason == _MODEL_NOT_FOUND:
            # It was there when the request was accepted: Redis has lost it, and the engines publish it again.
            failure = Failure(grpc.StatusCode.UNAVAILABLE, failure.message, failure.reason)
        if self._deadline is not None and self._clock() >= self._deadline:
            return self._after_deadline(failure, target)
        try:
            return self._in_time(failure, self._patience.after(failure, target, lasted_s=self._clock() - self._called))
        except OffsetOutOfRange as error:
            self._told(error)
            if not self._own:
                raise
            raise self._told(DataLoss(f"the log ends before what was read of it: {error}")) from error
        except PagestreamError as error:
            self._told(error)
            raise

    def raise_failure(self) -> None:
        """Raises GenerationFailed after the last chunk of a request that failed."""
        if self._failure is not None:
            raise self._told(self._failure)

    def _accept(self, response: Response) -> None:
        self.position = Position(response.chunk.request_id)
        if self._request is not None and isinstance(response, api.GenerateResponse) and response.HasField("seed"):
            # From now on it is what any gateway needs to accept the request again, should Redis have lost it.
            again = api.GenerateRequest()
            again.CopyFrom(self._request)
            again.sampling.seed = response.seed
            self._request = again

    def _check_place(self, message: api.TokenChunk) -> None:
        entries = len(message.token_ids)
        if message.HasField("usage"):  # the end is an entry; the last finish may have come along
            allowed = (entries + 1, entries + 2) if message.finish_reason else (entries + 1,)
        else:
            allowed = (entries + bool(message.finish_reason),)
        if message.next_index - self.position.next_index not in allowed:
            raise self._told(
                DataLoss(f"{entries} tokens after place {self.position.next_index} cannot end at {message.next_index}")
            )

    def _end(self, chunk: Chunk) -> None:
        self.is_over = True
        if chunk.finish_reason is FinishReason.ERROR:
            code, message = (chunk.error.code, chunk.error.message) if chunk.error else ("", "")
            kind = Quarantined if code == _QUARANTINED else GenerationFailed
            self._failure = kind(code, message)

    def _timeout_s(self) -> float | None:
        if self._deadline is None:
            return None
        left_s = self._deadline - self._called
        return left_s if left_s > 0 else max(left_s + self._settle_s, 0.001)

    def _in_time(self, failure: Failure, delay_s: float) -> float:
        """The delay. Raises where the request is not accepted yet, and its deadline would pass before the next try."""
        if self.is_accepted or self._deadline is None or self._clock() + delay_s < self._deadline:
            return delay_s
        if failure.is_queue_full:
            raise error_of(failure)
        raise DeadlineExceeded(f"the deadline passes before another try; the last error: {failure.message}")

    def _after_deadline(self, failure: Failure, target: str) -> float:
        """The deadline ends the request in Redis; what is left is to hear of it."""
        over = self._deadline is not None and self._clock() >= self._deadline + self._settle_s
        if over or not self.is_accepted:
            raise self._told(DeadlineExceeded(f"the deadline passed, and no gateway told the end: {failure.message}"))
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return 0.0
        try:
            return self._patience.after(failure, target)
        except PagestreamError as error:
            self._told(error)
            raise

    def _told(self, error: PagestreamError) -> PagestreamError:
        if self.is_accepted:
            error.position = self.position
        return error
