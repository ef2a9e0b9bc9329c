"""The HTTP API of a deployment: its models and answers in the terminal, with errors in the words of the command line.

The transport is that of `pagestream_client.openai`: a broken stream goes on at another gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2
from pagestream_client import GenerationFailed, ModelInfo, PagestreamError, Reconnection, Unavailable
from pagestream_client.openai import HttpTransport, transport
from pagestream_client.sse import Event, SseDecoder

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.console import say, show
from pagestream_cli.errors import CliError, RequestRejectedError, ServerNotFoundError, StreamLostError, UsageError

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


RECONNECTION = Reconnection(first_contact_s=5.0)
LIMITS = httpx2.Timeout(10.0, connect=5.0)
"""Seconds for a call that is no stream."""
_AWAY = (502, 503, 504)
"""A gateway that stops or has no Redis, and proxies without a gateway."""
_AGAIN_S = 0.2
_FULL = 429
_FULL_S = 1.0
"""For a full queue that does not say when to come back."""
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """An event of a streamed answer."""

    text: str
    next_index: int
    """Log entries up to here; 0 where the server numbers nothing."""
    completion_tokens: int | None
    """Of the usage, which comes last."""


class Gateways:
    """Ask the gateways of an endpoint. Use as `async with`."""

    def __init__(self, endpoint: Endpoint, policy: Reconnection | None = None) -> None:
        self._policy = policy or RECONNECTION
        limits = HttpTransport(ca_file=endpoint.ca_file)
        self._http = httpx2.AsyncClient(
            base_url=endpoint.urls[0],
            headers=endpoint.headers,
            timeout=LIMITS,
            transport=transport(endpoint.urls, reconnection=self._policy, limits=limits),
        )

    async def __aenter__(self) -> Self:
        """Return it; connections are made when they are needed."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def stream(
        self, request: Mapping[str, Any], on_accepted: Callable[[str], None] = lambda _: None
    ) -> AsyncGenerator[Piece, None]:
        """Send a request and yield its pieces as they come, each once. A full queue is waited for.

        Args:
            request: the body, with `messages` or `prompt`; what is None is left out.
            on_accepted: called with the request's id once a gateway has accepted it.

        Raises:
            RequestRejectedError: the server refuses the request, or the answer ends with an error.
            StreamLostError: no gateway answered for as long as the policy says.
        """
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        body = {name: value for name, value in request.items() if value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Idempotency-Key": uuid.uuid4().hex}  # all tries are one request
        ends_s = time.monotonic() + self._policy.limit_s
        try:
            while True:
                async with self._http.stream("POST", path, json=body, headers=headers) as response:
                    if response.status_code == httpx2.codes.OK:
                        on_accepted(response.headers.get("x-request-id", ""))
                        async for piece in _pieces(response):
                            yield piece
                        return
                    wait_s = _wait_s(response)
                    if wait_s is None or time.monotonic() + wait_s > ends_s:
                        raise RequestRejectedError(response.status_code, error_message(await response.aread()))
                await asyncio.sleep(wait_s)
        except httpx2.TransportError as error:
            raise _lost(error) from error

    async def ask(self, method: str, path: str) -> Mapping[str, Any]:
        """Make a call whose answer is there at once, at any gateway, until the policy's limit.

        Raises:
            RequestRejectedError: the server refuses it.
            StreamLostError: no gateway answered.
        """
        ends_s = time.monotonic() + self._policy.limit_s
        while True:
            try:
                response = await self._http.request(method, path)
            except httpx2.TransportError as error:
                if time.monotonic() >= ends_s:
                    raise _lost(error) from error
            else:
                if response.status_code not in _AWAY or time.monotonic() >= ends_s:
                    return _body(response)
            await asyncio.sleep(_AGAIN_S)


async def models_of(endpoint: Endpoint) -> list[ModelInfo]:
    """Return what a server knows; each gateway is called at most once, since a person waits.

    Raises:
        ServerNotFoundError: no gateway answers.
        RequestRejectedError: the server refuses, for example without an API key.
    """
    failed: CliError | None = None
    tls = endpoint.tls()
    async with httpx2.AsyncClient(
        headers=endpoint.headers, timeout=LIMITS, verify=False if tls is None else tls
    ) as http:
        for url in endpoint.urls:
            try:
                response = await http.get(f"{url}/v1/models")
            except httpx2.TransportError as error:
                failed = ServerNotFoundError(
                    f"no server answers: no answer from {', '.join(endpoint.urls)}; the last error: {error}",
                    hint="start one with `pagestream serve`, or check --url",
                )
                continue
            if response.status_code in _AWAY:
                failed = RequestRejectedError(response.status_code, error_message(response.content))
                continue
            return [_model_of(model) for model in _body(response)["data"]]
    raise failed or ServerNotFoundError("no server is known")


def error_message(content: bytes) -> str:
    """Return the message of an OpenAI error body; the body itself where it is none."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


def next_index_of(event: Event, body: Mapping[str, Any]) -> int:
    """Return the index in the place after an event, `<request id>/<next index>/<digest>`; -1 where it has none.

    It is that of its body, else of its id.
    """
    place = body.get("stream_position")
    index = (place if isinstance(place, str) else event.id).split("/")[1:2]
    return int(index[0]) if index and index[0].isdecimal() else -1


async def _pieces(response: httpx2.Response) -> AsyncGenerator[Piece, None]:
    """Raises RequestRejectedError where the answer ends with an error."""
    decoder = SseDecoder()
    async for data in response.aiter_raw():
        for event in decoder.feed(data):
            if event.data == _DONE:
                return
            body = json.loads(event.data)
            if error := body.get("error"):
                raise RequestRejectedError(response.status_code, f"{error.get('code')}: {error.get('message')}")
            choice: Mapping[str, Any] = next(iter(body.get("choices") or ()), {})
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            usage = body.get("usage") if not choice else None
            yield Piece(text, max(0, next_index_of(event, body)), usage["completion_tokens"] if usage else None)


def _wait_s(response: httpx2.Response) -> float | None:
    """Return the seconds until another try, of a queue that is full; None where that changes nothing."""
    if response.status_code != _FULL:
        return None
    try:
        return float(response.headers.get("retry-after", _FULL_S))
    except ValueError:  # a date
        return _FULL_S


def _body(response: httpx2.Response) -> Mapping[str, Any]:
    """Return the body of an answer. Raises RequestRejectedError."""
    if response.status_code != httpx2.codes.OK:
        raise RequestRejectedError(response.status_code, error_message(response.content))
    body: Mapping[str, Any] = response.json()
    return body


def _model_of(body: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(
        body["id"], body.get("max_model_len"), body.get("created", 0), body.get("engines"), body.get("parent")
    )


def _lost(error: httpx2.TransportError) -> CliError:
    """Return the error of a stream that was given up; its cause is the client's."""
    cause = error.__cause__
    if isinstance(cause, GenerationFailed):
        return RequestRejectedError(httpx2.codes.OK, f"{cause.code}: {cause}")
    if isinstance(cause, PagestreamError) and not isinstance(cause, Unavailable):
        return RequestRejectedError(cause.http_status or httpx2.codes.OK, str(cause))
    position = cause.position if isinstance(cause, PagestreamError) else None
    hint = "does a server run there?"
    if position is not None:
        hint = f"the answer may still be there: GET /v1/requests/{position.request_id}/events"
    return StreamLostError(str(cause or error), hint=hint)
