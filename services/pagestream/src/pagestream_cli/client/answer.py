"""Models and answers of a deployment in the terminal, with errors in the words of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from pagestream_client import ModelInfo, Reconnection

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.client.gateways import Gateways, Piece, models_of
from pagestream_cli.console import say, show
from pagestream_cli.errors import CliError, UsageError

CANCEL_LIMIT_S = 2.0
"""For the call that cancels an interrupted request. Where it fails, the gateways' grace period ends the request."""


async def stream_answer(
    endpoint: Endpoint, request: Mapping[str, Any], policy: Reconnection | None = None
) -> AsyncGenerator[Piece, None]:
    """Send a request and yield its pieces as they come, each once. Cancel the request where this task is cancelled.
    Where no engine runs its model, that is said on stderr. Arguments and errors are those of `Gateways.stream`.
    """
    ids: list[str] = []
    async with Gateways(endpoint, policy) as gateways:
        try:
            async with (
                telling_unserved(endpoint, request["model"]) as telling,
                aclosing(gateways.stream(request, ids.append)) as pieces,
            ):
                async for piece in pieces:
                    telling.cancel()
                    yield piece
        except asyncio.CancelledError:
            if ids and ids[0]:
                await asyncio.shield(cancel(gateways, ids[0]))
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


async def cancel(gateways: Gateways, request_id: str) -> None:
    """Cancel a request. A server that does not answer is left alone: its grace period ends the request."""
    with suppress(CliError, TimeoutError):
        async with asyncio.timeout(CANCEL_LIMIT_S):
            await gateways.ask("DELETE", f"/v1/requests/{request_id}")


UNSERVED_S = 2.0
"""Seconds without an answer after which a command says that no engine runs its model."""


async def list_models(endpoint: Endpoint) -> dict[str, int | None]:
    """Return served names with their context length in tokens; None where the server does not say.

    Raises as `models_of`.
    """
    return {model.name: model.max_model_len for model in await models_of(endpoint)}


def default_model(endpoint: Endpoint, models: Sequence[ModelInfo]) -> str | None:
    """Return what a command uses that names no model: what serve was started with, else the only model, else the only
    one with engines. None where there is no such one.
    """
    if endpoint.model is not None and any(model.name == endpoint.model for model in models):
        return endpoint.model
    bases = [model for model in models if model.parent is None]
    for found in (models, bases, [model for model in bases if model.is_running]):
        if len(found) == 1:
            return found[0].name
    return None


def marked(model: ModelInfo) -> str:
    """Return a model's name, with a mark where no engine runs it."""
    return model.name if model.is_running else f"{model.name} (no engine)"


async def choose_model(endpoint: Endpoint, asked: str | None) -> str:
    """Return the model that was asked for, else the default.

    Raises:
        UsageError: none was asked for and there is no default.
    """
    if asked is not None:
        return asked
    models = sorted(await models_of(endpoint), key=lambda model: (not model.is_running, model.name))
    if (found := default_model(endpoint, models)) is not None:
        return found
    raise UsageError(
        f"the server has {len(models)} models: {', '.join(map(marked, models)) or 'none yet'}",
        hint="name one with --model",
    )


@asynccontextmanager
async def telling_unserved(endpoint: Endpoint, model: str) -> AsyncIterator[asyncio.Task[None]]:
    """Say after UNSERVED_S that no engine runs a model, where that is so; cancel the task once answers come."""
    telling = asyncio.create_task(_tell_unserved(endpoint, model))
    try:
        yield telling
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell_unserved(endpoint: Endpoint, model: str) -> None:
    await asyncio.sleep(UNSERVED_S)
    with suppress(CliError):  # the request itself says what is wrong with the server
        models = await models_of(endpoint)
        if any(each.name == model and not each.is_running for each in models):
            running = ", ".join(sorted(each.name for each in models if each.is_running)) or "none"
            say(f"no engine runs {model!r} now: the request waits for one (Ctrl-C cancels it); with engines: {running}")
