"""Receive the messages of gRPC calls a few at a time, whatever their service is.

The size of a message is known only when it is there, and gRPC's core keeps what arrives after it was asked for a
message. So each message is asked for in its turn; until then flow control leaves all but the first `WINDOW_BYTES` of it
with its sender. Small messages are there when they are asked for, and keep their turn for no time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.grpc.status import abort
from pagestream_gateway.core.tokenization import SMALL_BYTES, PendingRequests
from pagestream_gateway.errors import GatewayError, InvalidRequest, Overloaded, RequestTimeout
from pagestream_gateway.settings import Settings

WINDOW_BYTES = SMALL_BYTES
_PATIENCE_S = 0.5
"""Seconds that a message may wait for its turn before one that has been arriving for as long gives way: it may be a
small one, and those must not wait for large ones.
"""
Context = grpc.aio.ServicerContext[Any, Any]
Parser = Callable[[bytes], Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class Receiver:
    """Bounds the bytes of messages that arrive, and of those that wait to be parsed."""

    def __init__(self, settings: Settings, pending: PendingRequests) -> None:
        """`pending`: bounds what is parsed and tokenized; requests over HTTP count there, too."""
        limits = settings.limits
        self._arriving = PendingRequests(
            limits.max_arriving_bytes, limit_s=limits.tokenize_limit_s, patience_s=_PATIENCE_S
        )
        self._pending = pending
        self._max_message_bytes = limits.max_body_bytes
        self._max_waiting_bytes = limits.max_arriving_bytes // 2
        self._waiting_bytes = 0
        self._timeout_s = settings.connections.body_timeout_s

    @asynccontextmanager
    async def message(self, context: Context) -> AsyncIterator[bytes]:
        """Receive a call's only message, and count it as pending inside the block where it is large.

        Raises InvalidRequest, RequestTimeout, or Overloaded: a large message can't go back to its sender to wait there.
        """
        data = await self.receive(context)
        if data is grpc.aio.EOF:
            raise InvalidRequest(None, "the call has no message")
        size = 0 if len(data) <= SMALL_BYTES else len(data)
        if self._waiting_bytes + size > self._max_waiting_bytes:
            raise Overloaded(f"large messages of {self._waiting_bytes} bytes wait to be parsed", retry_after_s=1.0)
        self._waiting_bytes += size
        try:
            async with self._pending.hold(size):
                self._waiting_bytes -= size
                size = 0
                yield data
        finally:
            self._waiting_bytes -= size

    async def receive(self, context: Context) -> Any:
        """Return a call's next message, or grpc.aio.EOF. Raises RequestTimeout, Overloaded."""
        async with self._arriving.hold(self._max_message_bytes) as place, place.receiving():
            message = asyncio.ensure_future(context.read())
            try:
                done, _ = await asyncio.wait({message}, timeout=self._timeout_s)
                if not done:
                    raise RequestTimeout(f"the message did not arrive within {self._timeout_s:g} s")
                return message.result()
            finally:
                message.cancel()


class ReceivingInterceptor(grpc.aio.ServerInterceptor):
    """Makes the handlers of other services receive their messages in turn, and only small ones."""

    def __init__(self, receiver: Receiver, *, own_service: str) -> None:
        """`own_service`: full name of the one whose handlers do it themselves."""
        self._receiver = receiver
        self._own_prefix = f"/{own_service}/"

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the method's handler."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._own_prefix):
            return handler
        inner: Any = handler
        # Without a deserializer messages come as bytes: gRPC logs a traceback of each that it can't parse.
        coding = {"request_deserializer": None, "response_serializer": handler.response_serializer}
        parse: Parser = inner.request_deserializer
        if handler.unary_unary is not None:

            async def answered(_: Any, context: Context) -> Any:
                return await inner.unary_unary(await self._only(context, parse), context)

            return grpc.stream_unary_rpc_method_handler(answered, **coding)
        if handler.unary_stream is not None:

            async def streamed(_: Any, context: Context) -> None:
                await inner.unary_stream(await self._only(context, parse), context)

            return grpc.stream_stream_rpc_method_handler(streamed, **coding)

        async def exchanged(_: Any, context: Context) -> AsyncIterator[Any]:
            async for response in inner.stream_stream(self._all(context, parse), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(exchanged, **coding)

    async def _next(self, context: Context, parse: Parser) -> Any:
        """Return the call's next message, or grpc.aio.EOF; end the call where it does not arrive or is none."""
        try:
            data = await self._receiver.receive(context)
            return data if data is grpc.aio.EOF else parse(data)
        except GatewayError as error:
            await abort(context, error_report(error))
        except DecodeError:
            await abort(context, error_report(InvalidRequest(None, "the bytes are not a message of this method")))

    async def _only(self, context: Context, parse: Parser) -> Any:
        message = await self._next(context, parse)
        if message is grpc.aio.EOF:
            await abort(context, error_report(InvalidRequest(None, "the call has no message")))
        return message

    async def _all(self, context: Context, parse: Parser) -> AsyncIterator[Any]:
        while (message := await self._next(context, parse)) is not grpc.aio.EOF:
            yield message
