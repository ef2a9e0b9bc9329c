"""Answers in the terminal: streamed by `pagestream_client`, with its errors in the words of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from pagestream_client import Chunk, GenerationFailed, PagestreamError, Reconnection, Unavailable
from pagestream_client.http import AsyncHttpClient

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.console import show
from pagestream_cli.errors import CliError, RequestRejectedError, StreamLostError

RECONNECTION = Reconnection(first_contact_s=5.0)
CANCEL_LIMIT_S = 2.0
"""For the call that cancels an interrupted request. Where it fails, the gateways' grace period ends the request."""


async def stream_answer(
    endpoint: Endpoint, request: Mapping[str, Any], policy: Reconnection | None = None
) -> AsyncGenerator[Chunk, None]:
    """Send a request and yield its chunks as they come, each once. Cancel the request where this task is cancelled.

    Args:
        request: arguments of `AsyncHttpClient.generate`.

    Raises:
        RequestRejectedError: the server refuses the request, or the answer ends with an error.
        StreamLostError: no gateway answered for as long as the policy says.
    """
    async with AsyncHttpClient(
        endpoint.urls, api_key=endpoint.api_key, reconnection=policy or RECONNECTION, transport=endpoint.transport
    ) as client:
        stream = client.generate(**request)
        try:
            async for chunk in stream:
                yield chunk
        except PagestreamError as error:
            raise cli_error(error) from error
        except asyncio.CancelledError:
            if stream.request_id:
                await asyncio.shield(cancel(client, stream.request_id))
            raise


async def show_answer(endpoint: Endpoint, request: Mapping[str, Any]) -> str:
    """Stream an answer to stdout and return its text. Arguments and errors are those of `stream_answer`."""
    pieces: list[str] = []
    try:
        async with aclosing(stream_answer(endpoint, request)) as chunks:
            async for chunk in chunks:
                pieces.append(chunk.text)
                show(chunk.text)
    finally:
        show("\n")
    return "".join(pieces)


async def show_formatted_answer(endpoint: Endpoint, request: Mapping[str, Any]) -> str:
    """Show an answer that grows, as Markdown, in a terminal; return its text. Else as `show_answer`."""
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

    pieces: list[str] = []
    with Live(console=Console(), refresh_per_second=12, vertical_overflow="visible") as live:
        async with aclosing(stream_answer(endpoint, request)) as chunks:
            async for chunk in chunks:
                pieces.append(chunk.text)
                live.update(Markdown("".join(pieces)))
    return "".join(pieces)


async def cancel(client: AsyncHttpClient, request_id: str) -> None:
    """Cancel a request. A server that does not answer is left alone: its grace period ends the request."""
    with suppress(PagestreamError, TimeoutError):
        async with asyncio.timeout(CANCEL_LIMIT_S):
            await client.cancel(request_id)


def cli_error(error: PagestreamError) -> CliError:
    """Return an error of the client as one of the command line."""
    if isinstance(error, Unavailable):
        hint = "does a server run there?"
        if error.position is not None:
            hint = f"the answer may still be there: GET /v1/requests/{error.position.request_id}/events"
        return StreamLostError(str(error), hint=hint)
    text = f"{error.code}: {error}" if isinstance(error, GenerationFailed) else str(error)
    return RequestRejectedError(error.http_status or 200, text)
