"""Receive the messages of gRPC calls a few at a time, parse them, and report errors as gRPC status.

An undecodable message is INVALID_ARGUMENT, with details of google.rpc.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pagestream_gateway.error_codes import ErrorReport, error_report
from pagestream_gateway.errors import GatewayError, InvalidRequest, Overloaded, RequestTimeout
from pagestream_gateway.settings import Settings
from pagestream_gateway.text.tokenization import SMALL_BYTES, PendingRequests

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "pagestream.dev"


async def abort(context: "grpc.aio.ServicerContext[bytes, bytes]", report: ErrorReport) -> NoReturn:
    """End the call with the report's status and details.

    The details name the field that is wrong and the delay after which a retry may succeed, where there is one.
    """
    details = [_packed(detail) for detail in _details(report)]
    status = status_pb2.Status(code=report.grpc_status.value[0], message=report.message, details=details)
    metadata = (*report.headers.items(), (_DETAILS_KEY, status.SerializeToString()))
    await context.abort(report.grpc_status, report.message, metadata)
    raise AssertionError("abort does not return")


def drop_frames(error: BaseException) -> None:
    """Let go of the frames in which an error and its causes were raised, and so of the request's data in them.

    Errors of futures are in cycles with their frames, which would stay until the next garbage collection.
    """
    following: BaseException | None = error
    while following is not None:
        following.__traceback__ = None
        following = following.__cause__ or following.__context__


def _details(report: ErrorReport) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=report.code.upper(), domain=_DOMAIN)]
    if report.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=report.field, description=report.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if report.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(report.retry_after_s * 1e9))
        details.append(retry)
    return details


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


M = TypeVar("M", bound=Message)
_MAX_DEPTH = 100  # protobuf's own limit
# Descriptors are `Any` here: protobuf's C and Python ones share no type.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _CorruptError(Exception):
    """The bytes are not a protobuf message."""


def parse_message(kind: type[M], data: bytes) -> M:
    """Return the message. Raises InvalidRequest, with the field where text in it is not UTF-8."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        field = _find_bad_text(data, kind.DESCRIPTOR)
        if field is not None:
            raise InvalidRequest(field, "is not valid UTF-8") from error
        raise InvalidRequest(None, f"the bytes are not a {kind.DESCRIPTOR.full_name}") from error
    return message


def _find_bad_text(data: bytes, descriptor: Any) -> str | None:
    try:
        return _search(memoryview(data), descriptor, 0)
    except _CorruptError:
        return None


def _search(data: memoryview, descriptor: Any, depth: int) -> str | None:
    if depth > _MAX_DEPTH:
        return None
    for number, value in _texts_and_messages(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                str(value, "utf-8")
            except UnicodeDecodeError:
                return str(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _search(value, field.message_type, depth + 1)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _texts_and_messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield numbers and contents of the length-delimited fields."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, place = _varint(data, place)
        elif wire_type == _FIXED64:
            place += 8
        elif wire_type == _FIXED32:
            place += 4
        elif wire_type == _BYTES:
            length, place = _varint(data, place)
            if length > len(data) - place:
                raise _CorruptError
            yield number, data[place : place + length]
            place += length
        else:
            raise _CorruptError


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise _CorruptError
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _CorruptError


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
