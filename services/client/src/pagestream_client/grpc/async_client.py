"""The client over gRPC for asyncio."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.async_stream import AsyncStream, is_cancelled
from pagestream_client.chunks import FinishReason
from pagestream_client.errors import DeadlineExceeded, Position, StreamClosed
from pagestream_client.grpc.async_stream import AsyncGrpcStream
from pagestream_client.grpc.configuration import GrpcConfiguration
from pagestream_client.grpc.connections import Connections
from pagestream_client.grpc.messages import (
    embeddings_of,
    finish_reason_from_proto,
    model_info_of,
    request_info_of,
    scores_of,
)
from pagestream_client.grpc.requests import embed_request, generate_request, score_request
from pagestream_client.grpc.status import failure_of
from pagestream_client.grpc.transport import Transport
from pagestream_client.requests import Input, OnDisconnect, SamplingOptions
from pagestream_client.settings import Reconnection
from pagestream_client.views import Embeddings, ModelInfo, RequestInfo, Scores


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
        for stream in list(self._streams):
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
        return [model_info_of(model) for model in (await self._ask("ListModels", api.ListModelsRequest())).models]

    async def _ask(self, method: str, request: Any) -> Any:
        """Make one call whose answer is there at once."""
        return await self._call(method, request, timeout_s=self._configuration.transport.answer_timeout_s)

    async def _call(
        self, method: str, request: Any, *, timeout_s: float | None = None, deadline_s: float | None = None
    ) -> Any:
        """Make one call, at as many gateways as it takes: all of these calls may be repeated.

        async try may last for `timeout_s`, all of them together for `deadline_s`; None is for ever.
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
            except asyncio.CancelledError as error:
                if self._connections.is_closed and not is_cancelled():
                    raise StreamClosed("the client was closed before the answer came") from error
                raise
            else:
                retry.worked(target)
                return answer
            await asyncio.sleep(delay_s)

    def _stream(self, start: api.GenerateRequest | Position, deadline_s: float | None) -> AsyncStream:
        state = self._configuration.stream_state(start, deadline_s=deadline_s)
        stream = AsyncGrpcStream(self._configuration, state, self._connections)
        self._streams.add(stream)
        return stream

    def _connect(self, target: str) -> grpc.aio.Channel:
        configuration = self._configuration
        options, credentials = configuration.transport.options(), configuration.credentials
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)
