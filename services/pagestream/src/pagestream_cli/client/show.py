"""Shows an answer in the terminal while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pagestream_cli.client.answer import cancel, stream_answer
from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.console import show


async def show_answer(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> str:
    """Stream an answer to stdout and return its text.

    When it is interrupted, the server is told that nobody waits any more.

    Raises:
        RequestRejectedError: the server refuses the request.
        StreamLostError: the stream broke for good.
    """
    pieces: list[str] = []
    request_id = ""
    try:
        async for delta in stream_answer(endpoint, path, body):
            request_id = delta.request_id
            pieces.append(delta.text)
            show(delta.text)
    except asyncio.CancelledError:
        if request_id:
            await asyncio.shield(cancel(endpoint, request_id))
        raise
    finally:
        show("\n")
    return "".join(pieces)
