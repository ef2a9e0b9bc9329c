"""From a caller's arguments to the body of OpenAI's API."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from pagestream_client.requests import Input, OnDisconnect, SamplingOptions, disconnect_policy

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
REQUESTS = "/v1/requests"


@dataclass(frozen=True)
class HttpRequest:
    """A generation to ask for."""

    path: str
    """COMPLETIONS or CHAT_COMPLETIONS."""
    body: Mapping[str, Any]
    idempotency_key: str


def http_request(
    model: str,
    given: Input,
    options: SamplingOptions,
    *,
    idempotency_key: str | None,
    on_disconnect: OnDisconnect | str,
    priority: int,
    client_request_id: str,
    extra_body: Mapping[str, Any] | None,
) -> HttpRequest:
    """Build the request of a stream. Fields with their default value are left out: other servers do not know ours.

    Raises:
        InvalidRequest: `on_disconnect` is unknown; all other checks are the gateway's.
    """
    body: dict[str, Any] = {"model": model} if model else {}
    if given.messages is None:
        path = COMPLETIONS
        body["prompt"] = given.prompt if given.prompt is not None else list(given.prompt_token_ids or ())
    else:
        path = CHAT_COMPLETIONS
        body["messages"] = [dict(message) for message in given.messages]
        if given.continue_final_message:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    body |= {name: _jsonable(value) for name, value in options.items() if value is not None}
    if path == CHAT_COMPLETIONS and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if disconnect_policy(on_disconnect) is not OnDisconnect.CANCEL:
        body["on_disconnect"] = str(OnDisconnect(on_disconnect))
    if priority:
        body["priority"] = priority
    if client_request_id:
        body["request_id"] = client_request_id
    body |= {"stream": True, "stream_options": {"include_usage": True}, **(extra_body or {})}
    return HttpRequest(path, body, idempotency_key or uuid.uuid4().hex)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return value if isinstance(value, str | int | float) else list(value)


def list_path(limit: int | None, after: str) -> str:
    """Return path and query of a page of the list of requests."""
    query: dict[str, int | str] = {} if limit is None else {"limit": limit}
    if after:
        query["after"] = after
    return f"{REQUESTS}?{urlencode(query)}" if query else REQUESTS
