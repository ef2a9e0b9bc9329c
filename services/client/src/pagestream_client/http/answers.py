"""From JSON bodies and stream events to the client's types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagestream_client.chunks import Chunk, FinishReason, RequestError, Usage
from pagestream_client.errors import Position, ServerError
from pagestream_client.http.sse import Event
from pagestream_client.views import ModelInfo, RequestInfo, RequestPage, RequestState, RequestSummary

DONE = "[DONE]"
"""Data of the event that ends a stream."""


def body_of(event: Event) -> Mapping[str, Any]:
    """Return the JSON object of an event. Raises ServerError where it is none."""
    try:
        body = json.loads(event.data)
    except ValueError as error:
        raise ServerError("UNKNOWN", f"an event of the stream is not JSON: {event.data[:80]!r}") from error
    if not isinstance(body, dict):
        raise ServerError("UNKNOWN", f"an event of the stream is not a JSON object: {event.data[:80]!r}")
    return body


def place_of(event: Event, body: Mapping[str, Any]) -> str:
    """Return the place after an event, `<request id>/<next index>/<digest>`: that of its body, else its id.

    It is empty where the server numbers nothing.
    """
    place = body.get("stream_position")
    return place if isinstance(place, str) else event.id


def position_of(place: str, default: Position) -> Position:
    """Return the position that a place stands for; `default` where it stands for none."""
    request_id, _, rest = place.partition("/")
    index, _, digest = rest.partition("/")
    return Position(request_id, int(index), digest) if index.isdecimal() else default


def chunk_of(body: Mapping[str, Any], position: Position) -> Chunk:
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
        finish_reason=finish_reason_of(choice.get("finish_reason")),
        stop_reason=str(choice.get("stop_reason") or ""),
        # Some servers count in each chunk; the usage that ends an answer comes without choices.
        usage=usage_of(body["usage"]) if body.get("usage") and not body.get("choices") else None,
        error=None,
    )


def failed_chunk(error: Mapping[str, Any], position: Position) -> Chunk:
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


def finish_reason_of(name: str | None) -> FinishReason | None:
    """Return the reason of that name: None for None, ERROR for one that this client lacks."""
    if name is None:
        return None
    try:
        return FinishReason(name)
    except ValueError:
        return FinishReason.ERROR


def usage_of(body: Mapping[str, Any]) -> Usage:
    """Return OpenAI's usage object as a dataclass."""
    details = body.get("prompt_tokens_details") or {}
    return Usage(body.get("prompt_tokens", 0), body.get("completion_tokens", 0), details.get("cached_tokens", 0))


def request_info_of(body: Mapping[str, Any]) -> RequestInfo:
    """Return the state of a request as a dataclass."""
    return RequestInfo(
        request_id=body["id"],
        model=body["model"],
        state=RequestState(body["state"]),
        queue_position=body["queue_position"],
        expected_wait_ms=body.get("expected_wait_ms"),
        finish_reason=finish_reason_of(body["finish_reason"]),
        next_index=body["next_index"],
        usage=usage_of(body["usage"]),
        attempts=body["attempts"],
    )


def request_page_of(body: Mapping[str, Any]) -> RequestPage:
    """Return a page of the list of requests as a dataclass."""
    return RequestPage(tuple(map(_request_summary_of, body["data"])), body["has_more"])


def model_info_of(body: Mapping[str, Any]) -> ModelInfo:
    """Return a model of the list as a dataclass."""
    context, engines = body.get("max_model_len"), body.get("engines")
    return ModelInfo(body["id"], context, body.get("created", 0), engines, body.get("parent"))


def _request_summary_of(body: Mapping[str, Any]) -> RequestSummary:
    return RequestSummary(
        request_id=body["id"],
        model=body["model"],
        created=body["created"],
        state=RequestState(body["state"]),
        finish_reason=finish_reason_of(body["finish_reason"]),
        next_index=body["next_index"],
        usage=usage_of(body["usage"]),
        attempts=body["attempts"],
    )
