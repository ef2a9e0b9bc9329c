"""Answers in the terminal: streamed by `pagestream_client`, with its errors in the words of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from pagestream_client import Chunk, PagestreamError, Reconnection
from pagestream_client.http import AsyncHttpClient

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.client.failures import cli_error
from pagestream_cli.client.models import telling_unserved
from pagestream_cli.console import show

RECONNECTION = Reconnection(first_contact_s=5.0)
CANCEL_LIMIT_S = 2.0
"""For the call that cancels an interrupted request. Where it fails, the gateways' grace period ends the request."""


async def stream_answer(
    endpoint: Endpoint, request: Mapping[str, Any], policy: Reconnection | None = None
) -> AsyncGenerator[Chunk, None]:
    """Send a request and yield its chunks as they come, each once. Cancel the request where this task is cancelled.
    Where no engine runs its model, that is said on stderr.

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
            async with telling_unserved(endpoint, request["model"]) as telling:
                async for chunk in stream:
                    telling.cancel()
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
