"""The client over gRPC for asyncio, and its streams. `client.py`, for programs that block, is generated from this file:
`python tools/generate_blocking_client.py`."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.answers import (
    Chunk,
    Embeddings,
    FinishReason,
    Generation,
    ModelInfo,
    RequestInfo,
    Scores,
    put_together,
)
from pagestream_client.errors import DeadlineExceeded, Position, StreamClosed
from pagestream_client.grpc.calls import (
    AsyncClosing,
    await_status_async,
    connect_async,
    is_call_cancelled,
    read_async,
    sleep_async,
)
from pagestream_client.grpc.connections import Connection, Connections, GrpcConfiguration, Transport
from pagestream_client.grpc.messages import (
    embeddings_of,
    failure_of,
    finish_reason_from_proto,
    model_info_of,
    request_info_of,
    scores_of,
)
from pagestream_client.grpc.stream_state import GrpcStreamState
from pagestream_client.requests import (
    Input,
    OnDisconnect,
    SamplingOptions,
    embed_request,
    generate_request,
    score_request,
)
from pagestream_client.retry import Failure, Reconnection

STATUS_LIMIT_S = 1.0
"""Seconds to wait for a call's status after the last chunk: gateways count a call without one as disconnected."""


class AsyncClient:
    """Call any of several gateways over gRPC, and continue at another one when a connection dies.

    Use it in one event loop, as `async with AsyncClient([...]) as client`, or end it by `close`.

    Args:
        targets: "host:port" of each gateway's gRPC port.
        api_key: sent to the gateways, where they require one.
        credentials: those of a TLS connection, such as `grpc.ssl_channel_credentials()`; None is no TLS.
        transport: how connections are made and watched.

    Raises:
        ValueError: a target is not "host:port".
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        reconnection: Reconnection | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._configuration = GrpcConfiguration(
            targets, api_key=api_key, credentials=credentials, reconnection=reconnection, transport=transport
        )
        self._connections = Connections(self._connect, clock=time.monotonic)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    async def __aenter__(self) -> Self:
        """Return the client; connections are made when they are needed."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """End open streams and calls, whose readers get StreamClosed, and all connections."""
        channels = self._connections.close()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.abandon()
        for channel in channels:
            await channel.close()

    def generate(
        self,
        model: str = "",
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        continue_final_message: bool = False,
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        on_disconnect: OnDisconnect | str = OnDisconnect.CANCEL,
        priority: int = 0,
        client_request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Request a generation. It is sent when the stream is first read, or by its `accepted`.

        Args:
            model: the served name; may be empty where exactly one is served.
            prompt: text; or one of the next two.
            prompt_token_ids: token ids, taken as they are.
            messages: a conversation of `{"role": ..., "content": ...}`.
            continue_final_message: whether the last message is the beginning of the answer.
            deadline_s: seconds after which the request ends with FinishReason.DEADLINE, wherever it is.
            idempotency_key: a later call with the same key and body joins this request; random where it is not given.
            on_disconnect: "cancel" or "continue" when the request has no reader any more.
            priority: 0 is served first.
            client_request_id: the caller's own id, kept as metadata.

        Raises:
            InvalidRequest: an argument cannot be sent. All other errors are raised by the stream.
        """
        request = generate_request(
            model,
            Input(prompt, prompt_token_ids, messages, continue_final_message),
            sampling,
            idempotency_key=idempotency_key,
            on_disconnect=on_disconnect,
            priority=priority,
            client_request_id=client_request_id,
        )
        return self._stream(request, deadline_s)

    def resume(self, request_id: str, next_index: int = 0, digest: str = "") -> AsyncStream:
        """Read a request's stream from a position on; possible until the retention time after its end has passed.

        Args:
            request_id: as `AsyncStream.accepted` or a chunk gave it.
            next_index: that of the last chunk; 0 is from the start.
            digest: that of the last chunk: a log that differs raises DataLoss. Empty is not compared.
        """
        return self._stream(Position(request_id, next_index, digest), None)

    async def embed(
        self,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        on_disconnect: OnDisconnect | str = OnDisconnect.CANCEL,
        priority: int = 0,
    ) -> Embeddings:
        """Return the vectors of texts, or of token ids. A try that fails joins the request of the first one.

        Args:
            model: the served name; may be empty where exactly one is served.
            inputs: texts, or lists of token ids.
            dimensions: leading numbers that are kept, where the model's files say that vectors may be cut; None: all.
            normalize: whether vectors have length 1; None: as the model's files say.
            deadline_s: seconds after which the request ends without vectors.
            idempotency_key: as for `generate`.

        Raises:
            PagestreamError: see errors.py.
        """
        request = embed_request(
            model,
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            idempotency_key=idempotency_key,
            on_disconnect=on_disconnect,
            priority=priority,
        )
        return embeddings_of(await self._call("Embed", request, deadline_s=deadline_s))

    async def score(
        self,
        model: str,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        on_disconnect: OnDisconnect | str = OnDisconnect.CANCEL,
        priority: int = 0,
    ) -> Scores:
        """Return the cosine of each document and its query: the only one, or the one of its number. See `embed`."""
        request = score_request(
            model,
            queries,
            documents,
            idempotency_key=idempotency_key,
            on_disconnect=on_disconnect,
            priority=priority,
        )
        return scores_of(await self._call("Score", request, deadline_s=deadline_s))

    async def cancel(self, request_id: str) -> FinishReason:
        """End a request in any state; return how it ended, now or before. Raises RequestNotFound."""
        answer = await self._ask("Cancel", api.CancelRequest(request_id=request_id))
        return finish_reason_from_proto(answer.finish_reason) or FinishReason.CANCELLED

    async def get_request(self, request_id: str) -> RequestInfo:
        """Return the state of a request. Raises RequestNotFound."""
        return request_info_of(await self._ask("GetRequest", api.GetRequestRequest(request_id=request_id)))

    async def list_models(self) -> list[ModelInfo]:
        """Return the models by name, also those that no engine runs now."""
        answer = await self._ask("ListModels", api.ListModelsRequest())
        return [model_info_of(model) for model in answer.models]

    async def _ask(self, method: str, request: Any) -> Any:
        """Make one call whose answer is there at once."""
        return await self._call(method, request, timeout_s=self._configuration.transport.answer_timeout_s)

    async def _call(
        self, method: str, request: Any, *, timeout_s: float | None = None, deadline_s: float | None = None
    ) -> Any:
        """Make one call, at as many gateways as it takes: all of these calls may be repeated.

        One try may last for `timeout_s`, all of them together for `deadline_s`; None is for ever.
        """
        configuration, retry = self._configuration, self._configuration.retry_state()
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            if end is not None:
                timeout_s = end - time.monotonic()
            target = configuration.endpoints.current
            connection = self._connections.to(target)
            call = getattr(connection.stub, method)
            try:
                answer = await call(request, timeout=timeout_s, metadata=configuration.metadata)
            except grpc.RpcError as error:
                failure = failure_of(error)
                self._connections.failed(connection, failure)
                if end is not None and time.monotonic() >= end:
                    raise DeadlineExceeded(f"the deadline passed before the answer came: {failure.message}") from error
                delay_s = retry.next_delay(failure, target)
            except BaseException as error:
                if self._connections.is_closed and is_call_cancelled(error):
                    raise StreamClosed("the client was closed before the answer came") from error
                raise
            else:
                retry.worked(target)
                return answer
            await sleep_async(delay_s)

    def _stream(self, start: api.GenerateRequest | Position, deadline_s: float | None) -> AsyncStream:
        state = self._configuration.stream_state(start, deadline_s=deadline_s)
        stream = AsyncStream(self._configuration, state, self._connections)
        with self._lock:
            self._streams.add(stream)
        return stream

    def _connect(self, target: str) -> Any:
        configuration = self._configuration
        return connect_async(target, configuration.credentials, configuration.transport.options())


class AsyncStream:
    """The chunks of one request, each once and in order, over as many connections as it takes.

    Iterate over it; leaving its `async with` block, or `aclose`, ends it early. One task reads it.
    """

    def __init__(self, configuration: GrpcConfiguration, state: GrpcStreamState, connections: Connections) -> None:
        """Clients make streams; see their `generate` and `resume`."""
        self._state = state
        self._endpoints = configuration.endpoints
        self._metadata = configuration.metadata
        self._connections = connections
        self._connection: Connection | None = None
        self._call: Any = None
        self._target = ""
        self._ahead: Chunk | None = None
        self._closing = AsyncClosing()
        self._abandoned = False

    @property
    def request_id(self) -> str:
        """Empty until a gateway has accepted the request; see `accepted`."""
        return self._state.position.request_id

    @property
    def position(self) -> Position:
        """The place after the last chunk that was read: what the client's `resume` takes."""
        return self._state.position

    async def accepted(self) -> str:
        """Wait until a gateway has durably accepted the request; return its id. Raises as iterating does."""
        while not self._state.is_accepted:
            self._ahead = await self._advance()
        return self.request_id

    async def collect(self) -> Generation:
        """Read the rest of the answer and put it together. Raises as iterating does."""
        return put_together([chunk async for chunk in self])

    def __aiter__(self) -> Self:
        """Return the stream, which is its own iterator."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises the errors of `pagestream_client.errors`."""
        chunk, self._ahead = self._ahead, None
        while chunk is None:
            if self._closing.is_set() and not self._abandoned:
                raise StopAsyncIteration
            if self._state.is_over:
                await self._finish()
                self._state.raise_failure()
                raise StopAsyncIteration
            chunk = await self._advance()
        return chunk

    async def __aenter__(self) -> Self:
        """Return the stream, which is open already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.aclose()

    def __del__(self) -> None:
        """End the call of a loop that was left by `break`, as `aclose` does."""
        with suppress(RuntimeError):  # the event loop may be closed by now
            self._hang_up()

    async def aclose(self) -> None:
        """End the reading at once; a running request is treated as its `on_disconnect` says. Idempotent."""
        self._closing.set()
        self._hang_up()

    def abandon(self) -> None:
        """Close it because the client closes: its reader gets StreamClosed."""
        self._abandoned = not (self._closing.is_set() or self._state.is_over)
        self._closing.set()
        self._hang_up()

    async def _advance(self) -> Chunk | None:
        """Read one message, or make up for one failed call with the pause after it."""
        if self._closing.is_set():
            raise StreamClosed("the stream was closed before it had ended")
        try:
            is_open, chunk = await self._read()
        except Exception as error:
            failure = self._failure_of(error)
            self._hang_up()
            if failure is None:
                raise
            if self._closing.is_set():
                return None  # the call failed because the stream was closed
            delay_s = self._state.failed(failure, self._target)
        except BaseException as error:  # a cancellation, or KeyboardInterrupt where the main thread waits
            self._hang_up()
            if self._closing.is_set() and is_call_cancelled(error):
                return None  # the call was cancelled because the stream was closed
            raise
        else:
            if is_open:
                return chunk
            self._hang_up()
            delay_s = 0.0 if self._state.is_over else self._state.ended(self._target)
        if not self._state.is_over:
            await self._closing.wait(delay_s)
        return None

    async def _read(self) -> tuple[bool, Chunk | None]:
        """Read one message of the current call, which is begun where there is none. Returns whether the call is still
        open, and the message's chunk, if it has one.
        """
        call = self._call
        if call is None:
            call = self._call = self._called()
            if self._closing.is_set():  # by another thread, which did not see this call
                call.cancel()
        message = await read_async(call)
        return (False, None) if message is None else (True, self._state.read_message(message, self._target))

    def _called(self) -> Any:
        call, self._target = self._state.next_call(), self._endpoints.current
        connection = self._connection = self._connections.to(self._target)
        stub = connection.stub
        method = stub.Generate if isinstance(call.request, api.GenerateRequest) else stub.Resume
        try:
            return method(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except ValueError as error:  # another thread has just closed the channel
            raise StreamClosed("the client was closed before the stream had ended") from error

    def _failure_of(self, error: Exception) -> Failure | None:
        """Return what an error of `_read` says of the call; None where it is not the call's."""
        if not isinstance(error, grpc.RpcError):
            return None
        failure = failure_of(error)
        self._connections.failed(self._connection, failure)
        return failure

    async def _finish(self) -> None:
        """Wait briefly for the proper end of a call whose last chunk has come."""
        call, self._call = self._call, None
        if call is not None:
            try:
                await await_status_async(call, STATUS_LIMIT_S)
            finally:
                call.cancel()
                self._connection = None

    def _hang_up(self) -> None:
        """End the current call, if there is one, and a read that waits for it. Called from any thread."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._connection = None  # after the call's end: it may hold the connection's last reference
