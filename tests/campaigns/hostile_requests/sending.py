"""Sending requests, some of which their clients leave, and what came of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from campaigns.hostile_requests.requests import HostileRequest

LEFT = 0
"""The status of a request whose client left."""
_SERVERS = ("server_error", "api_error", "overloaded_error", "internal_error", "engine_error")


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    status: int
    """Of HTTP; LEFT where its client left, -1 where none came in time."""
    seconds: float
    error: str = ""
    """The server's own fault, from a body or an event; "" where there is none."""
    text: str = ""
    """The beginning of a refusal."""


def server_fault(body: Any) -> str:
    """Return the error of a body or an event that blames the server; "" for any other."""
    if not isinstance(body, Mapping):
        return ""
    response = body.get("response")
    inner = response if isinstance(response, Mapping) else body
    for error in (body.get("error"), inner.get("error"), body if body.get("type") == "error" else None):
        if isinstance(error, Mapping):
            kinds = {str(error.get("type")), str(error.get("code"))}
            if kinds & set(_SERVERS) or str(error.get("code")).startswith("5"):
                return json.dumps(error)[:400]
    return ""


async def sent(client: httpx.AsyncClient, request: HostileRequest, limit_s: float) -> Answer:
    """Send a request and read its answer, up to a limit or until its client leaves."""
    begun = time.monotonic()
    status, error, text = -1, "", ""
    try:
        async with asyncio.timeout(limit_s if request.leaves_after_s is None else request.leaves_after_s):
            async with client.stream("POST", request.path, json=request.body, headers=request.headers) as answer:
                if answer.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
                    async for line in answer.aiter_lines():
                        if '"error"' in line and (data := line.removeprefix("data:").strip()).startswith("{"):
                            error = error or server_fault(json.loads(data))
                else:
                    content = await answer.aread()
                    if not answer.is_success:
                        text = content[:300].decode(errors="replace")
                    elif b'"error"' in content:
                        error = server_fault(json.loads(content))
                status = answer.status_code
    except TimeoutError:
        status = -1 if request.leaves_after_s is None else LEFT
    except httpx.HTTPError as failure:
        error = repr(failure)
    return Answer(status, time.monotonic() - begun, error, text)
