"""The state of one stream over HTTP: which request is sent next, and what the events mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagestream_client.answers import Chunk, FinishReason, RequestError, Usage
from pagestream_client.errors import Position, ServerError
from pagestream_client.openai.failures import CallRefused, failure_of_event
from pagestream_client.resumable_stream import ResumableStream
from pagestream_client.retry import Code, Failure, RetryState
from pagestream_client.sse import Event

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
DONE = "[DONE]"
"""Data of the event that ends a stream."""
_NOT_FOUND = "REQUEST_NOT_FOUND"


@dataclass(frozen=True)
class HttpRequest:
    """A generation to ask for."""

    path: str
    """COMPLETIONS or CHAT_COMPLETIONS."""
    body: Mapping[str, Any]
    idempotency_key: str


@dataclass(frozen=True)
class HttpCall:
    """The next call of a stream: POST until the request id is known, then GET its events.

    Where Redis has lost the request, PUT accepts it again; its answer is no stream.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None
    headers: Mapping[str, str]

    @property
    def is_stream(self) -> bool:
        """Whether the answer has events."""
        return self.method != "PUT"


class HttpStreamState(ResumableStream):
    """Follow one request to its end over HTTP.

    Args:
        request: what to submit.
        retry: see ResumableStream, as for the other arguments.
    """

    def __init__(self, request: HttpRequest, retry: RetryState, *, settle_s: float, clock: Callable[[], float]) -> None:
        super().__init__(None, retry, deadline_s=None, settle_s=settle_s, clock=clock)
        self._request = request
        self._seed = ""
        self._is_lost = False  # whether Redis has lost the request, so that it is to be accepted again
        self._last_event_id = ""
        self._last_sign_at = self._called_at

    def next_call(self) -> HttpCall:
        """Return what to call now."""
        self.begin_call()
        self._last_sign_at = self._called_at
        name = f"/v1/requests/{self.position.request_id}"
        if self._is_lost or not self.is_accepted:
            headers = {"Idempotency-Key": self._request.idempotency_key}
            if self._is_lost:
                return HttpCall("PUT", name, self._request.body, {**headers, "X-Request-Seed": self._seed})
            return HttpCall("POST", self._request.path, self._request.body, headers)
        last = {"Last-Event-ID": self._last_event_id} if self._last_event_id else {}
        return HttpCall("GET", f"{name}/events", None, last)

    def opened(self, headers: Mapping[str, str]) -> None:
        """Note that a gateway answers with a stream, or that it has accepted a lost request again.

        `headers`: the answer's; case-insensitive, or in lower case. Other servers have no request id there.
        """
        self._retry.answered()
        self._is_lost = False
        if request_id := headers.get("x-request-id", ""):
            self.accept(request_id)
        self._seed = self._seed or headers.get("x-request-seed", "")

    def failed(self, failure: Failure, target: str) -> float:
        """Note that the call has failed; a request that Redis has lost is accepted again by the next one.

        Returns seconds until then. Raises as ResumableStream does.
        """
        is_lost = failure.reason == _NOT_FOUND and self._is_submitted_here and self.is_accepted
        if is_lost and self._seed and not self._is_lost:
            self._is_lost = True
            failure = replace(failure, code=Code.UNAVAILABLE)
        return super().failed(failure, target)

    def note_sign(self) -> None:
        """Note that bytes have come, if only of a comment: the gateway lives."""
        self._last_sign_at = self._clock()

    def read_event(self, event: Event, target: str) -> Chunk | None:
        """Return the chunk of an event; None for an opening without text, and for the event that ends the stream.

        Raises:
            CallRefused: the event is an error that ends this call, not the request.
            DataLoss: it does not follow what came before.
            ServerError: it is not a JSON object.
        """
        if event.data == DONE:
            self.is_over = True
            return None
        body = _body_of(event)
        error = body.get("error")
        if error and (failure := failure_of_event(error)):
            raise CallRefused(failure)
        self.progressed(target)
        place = _place_of(event, body)
        position = _position_of(place, self.position)
        self.accept(position.request_id)
        self._last_event_id = place or self._last_event_id
        if error:
            chunk = _failed_chunk(error, position)
            self.advance(chunk)
            self.end(chunk)
            return chunk
        chunk = _chunk_of(body, position)
        is_opening = place and position.next_index == 0 and not chunk.text
        self.advance(chunk)
        return None if is_opening else chunk

    def _lasted_s(self) -> float:
        return self._last_sign_at - self._called_at  # what came after it is silence, perhaps a dead gateway's


def _body_of(event: Event) -> Mapping[str, Any]:
    """Return the JSON object of an event. Raises ServerError where it is none."""
    try:
        body = json.loads(event.data)
    except ValueError as error:
        raise ServerError("UNKNOWN", f"an event of the stream is not JSON: {event.data[:80]!r}") from error
    if not isinstance(body, dict):
        raise ServerError("UNKNOWN", f"an event of the stream is not a JSON object: {event.data[:80]!r}")
    return body


def _place_of(event: Event, body: Mapping[str, Any]) -> str:
    """Return the place after an event, `<request id>/<next index>/<digest>`: that of its body, else its id.

    It is empty where the server numbers nothing.
    """
    place = body.get("stream_position")
    return place if isinstance(place, str) else event.id


def _position_of(place: str, default: Position) -> Position:
    """Return the position that a place stands for; `default` where it stands for none."""
    request_id, _, rest = place.partition("/")
    index, _, digest = rest.partition("/")
    return Position(request_id, int(index), digest) if index.isdecimal() else default


def _chunk_of(body: Mapping[str, Any], position: Position) -> Chunk:
    """Return the chunk of an event: its first choice, or the usage. OpenAI's events carry no token ids."""
    choice: Mapping[str, Any] = next(iter(body.get("choices") or ()), {})
    return Chunk(
        request_id=position.request_id,
        next_index=position.next_index,
        digest=position.digest,
        choice=choice.get("index", 0),
        token_ids=(),
        text=choice.get("text") or (choice.get("delta") or {}).get("content") or "",
        logprobs=(),
        finish_reason=_finish_reason_of(choice.get("finish_reason")),
        stop_reason=str(choice.get("stop_reason") or ""),
        # Some servers count in each chunk; the usage that ends an answer comes without choices.
        usage=_usage_of(body["usage"]) if body.get("usage") and not body.get("choices") else None,
        error=None,
    )


def _failed_chunk(error: Mapping[str, Any], position: Position) -> Chunk:
    """Return the last chunk of a request that failed."""
    reason = RequestError(str(error.get("code") or ""), str(error.get("message", "")))
    return Chunk(
        request_id=position.request_id,
        next_index=position.next_index,
        digest=position.digest,
        choice=0,
        token_ids=(),
        text="",
        logprobs=(),
        finish_reason=FinishReason.ERROR,
        stop_reason="",
        usage=None,
        error=reason,
    )


def _finish_reason_of(name: str | None) -> FinishReason | None:
    """Return the reason of that name: None for None, ERROR for one that this client lacks."""
    if name is None:
        return None
    try:
        return FinishReason(name)
    except ValueError:
        return FinishReason.ERROR


def _usage_of(body: Mapping[str, Any]) -> Usage:
    """Return OpenAI's usage object as a dataclass."""
    details = body.get("prompt_tokens_details") or {}
    return Usage(body.get("prompt_tokens", 0), body.get("completion_tokens", 0), details.get("cached_tokens", 0))
