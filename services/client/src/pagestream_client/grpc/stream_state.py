"""The state of one stream over gRPC: which message is sent next, and what the answers mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagestream.v1 import inference_pb2 as api

from pagestream_client.answers import Chunk
from pagestream_client.errors import Position
from pagestream_client.grpc.messages import chunk_of
from pagestream_client.resumable_stream import ResumableStream
from pagestream_client.retry import RetryState

Response = api.GenerateResponse | api.ResumeResponse


@dataclass(frozen=True)
class Call:
    """The next call of a stream: Generate until the request id is known, then Resume."""

    request: api.GenerateRequest | api.ResumeRequest
    timeout_s: float | None
    """gRPC deadline, which is the request's; None is none."""


class GrpcStreamState(ResumableStream):
    """Follow one request to its end over gRPC.

    Args:
        start: the request to submit, or the place to resume from in one that was accepted before.
        retry: see ResumableStream, as for the other arguments.
    """

    def __init__(
        self,
        start: api.GenerateRequest | Position,
        retry: RetryState,
        *,
        deadline_s: float | None,
        settle_s: float,
        clock: Callable[[], float],
    ) -> None:
        position = start if isinstance(start, Position) else None
        super().__init__(position, retry, deadline_s=deadline_s, settle_s=settle_s, clock=clock)
        self._request = start if isinstance(start, api.GenerateRequest) else None

    def next_call(self) -> Call:
        """Return what to call now. Raises DeadlineExceeded instead of submitting a request after its deadline."""
        timeout_s = self.begin_call()
        if not self.is_accepted and self._request is not None:
            return Call(self._request, timeout_s)
        place = api.ResumeRequest(
            request_id=self.position.request_id, next_index=self.position.next_index, digest=self.position.digest
        )
        if self._request is not None:
            place.request.CopyFrom(self._request)
        return Call(place, timeout_s)

    def read_message(self, response: Response, target: str) -> Chunk | None:
        """Return the chunk of a message; None for the first message, which has only the request's id.

        Raises:
            DataLoss: it does not follow what came before.
        """
        self.progressed(target)
        message = response.chunk
        if not self.is_accepted:
            self._keep_seed(response)
        self.accept(message.request_id)
        if not (message.token_ids or message.finish_reason or message.HasField("usage")):
            return None
        chunk = chunk_of(message)
        self.advance(chunk, _num_entries(message))
        return chunk

    def _keep_seed(self, response: Response) -> None:
        if self._request is not None and isinstance(response, api.GenerateResponse) and response.HasField("seed"):
            # From now on it is what any gateway needs to accept the request again, should Redis have lost it.
            again = api.GenerateRequest()
            again.CopyFrom(self._request)
            again.sampling.seed = response.seed
            self._request = again


def _num_entries(message: api.TokenChunk) -> tuple[int, ...]:
    num_tokens = len(message.token_ids)
    if message.HasField("usage"):  # the end is an entry; the last finish may have come along
        return (num_tokens + 1, num_tokens + 2) if message.finish_reason else (num_tokens + 1,)
    return (num_tokens + bool(message.finish_reason),)
