"""pagestream.v1.Inference over grpc.aio, with health and reflection: receive, answer, report errors.

Messages are received a few at a time, taken as bytes and parsed here, and every error leaves as a status with details
of google.rpc: grpc.aio itself answers an undecodable message and an unexpected error alike, with INTERNAL or UNKNOWN.
A name of a method that is no text ends no server.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc._cython import cygrpc
from grpc.aio._server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.errors import RequestNotFound, StreamsError
from pagestream_telemetry import ALL_ADDRESSES, join_address

from pagestream_gateway.auth.identity import Credentials, Identity
from pagestream_gateway.calls import CHAT, DISCONNECTED, EMBEDDINGS, OK, RESUME, TEXT_COMPLETION, Call
from pagestream_gateway.error_codes import INTERNAL_ERROR, ErrorReport, error_report, rate_headers
from pagestream_gateway.errors import GatewayError, InvalidRequest, Overloaded, RequestTimeout, StartupError
from pagestream_gateway.gateway import SMALL_BYTES, Gateway, PendingRequests
from pagestream_gateway.grpc.messages import (
    ChunkStream,
    Context,
    embed_draft,
    embed_response,
    generate_draft,
    score_draft,
    score_response,
    with_message_path,
)
from pagestream_gateway.settings import Settings

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
_AnyContext = grpc.aio.ServicerContext[Any, Any]
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
    async def message(self, context: _AnyContext) -> AsyncIterator[bytes]:
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

    async def receive(self, context: _AnyContext) -> Any:
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

            async def answered(_: Any, context: _AnyContext) -> Any:
                return await inner.unary_unary(await self._only(context, parse), context)

            return grpc.stream_unary_rpc_method_handler(answered, **coding)
        if handler.unary_stream is not None:

            async def streamed(_: Any, context: _AnyContext) -> None:
                await inner.unary_stream(await self._only(context, parse), context)

            return grpc.stream_stream_rpc_method_handler(streamed, **coding)

        async def exchanged(_: Any, context: _AnyContext) -> AsyncIterator[Any]:
            async for response in inner.stream_stream(self._all(context, parse), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(exchanged, **coding)

    async def _next(self, context: _AnyContext, parse: Parser) -> Any:
        """Return the call's next message, or grpc.aio.EOF; end the call where it does not arrive or is none."""
        try:
            data = await self._receiver.receive(context)
            return data if data is grpc.aio.EOF else parse(data)
        except GatewayError as error:
            await abort(context, error_report(error))
        except DecodeError:
            await abort(context, error_report(InvalidRequest(None, "the bytes are not a message of this method")))

    async def _only(self, context: _AnyContext, parse: Parser) -> Any:
        message = await self._next(context, parse)
        if message is grpc.aio.EOF:
            await abort(context, error_report(InvalidRequest(None, "the call has no message")))
        return message

    async def _all(self, context: _AnyContext, parse: Parser) -> AsyncIterator[Any]:
        while (message := await self._next(context, parse)) is not grpc.aio.EOF:
            yield message


logger = logging.getLogger(__name__)

_MAX_INDEX = 2**63
_OPERATIONS = {"grpc": TEXT_COMPLETION, "grpc_resume": RESUME, "grpc_embed": EMBEDDINGS, "grpc_score": EMBEDDINGS}
SERVICE_NAME = api.DESCRIPTOR.services_by_name["Inference"].full_name
Method = Callable[[Context, Identity, Call], Awaitable[Any]]


class InferenceServicer:
    """The service's methods, each called with the caller's identity."""

    def __init__(self, gateway: Gateway, receiver: Receiver) -> None:
        self._gateway = gateway
        self._receiver = receiver

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Return the methods' handlers by their names, as a server registers them."""
        # Methods of one message: as handlers of streams they receive it when they ask for it.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Generate": stream(self._guarded("grpc", self.generate), None, api.GenerateResponse.SerializeToString),
            "Resume": stream(self._guarded("grpc_resume", self.resume), None, api.ResumeResponse.SerializeToString),
            "Cancel": unary(self._guarded("grpc_cancel", self.cancel), None, api.CancelResponse.SerializeToString),
            "GetRequest": unary(
                self._guarded("grpc_get_request", self.get_request), None, api.GetRequestResponse.SerializeToString
            ),
            "Embed": unary(self._guarded("grpc_embed", self.embed), None, api.EmbedResponse.SerializeToString),
            "Score": unary(self._guarded("grpc_score", self.score), None, api.ScoreResponse.SerializeToString),
            "ListModels": unary(
                self._guarded("grpc_list_models", self.list_models), None, api.ListModelsResponse.SerializeToString
            ),
        }

    async def generate(self, context: Context, identity: Identity, call: Call) -> None:
        """Accept a request and stream its log. The first message has the request id, its place, and no token."""
        await self._gateway.turns.wait()
        spec = await self._accept(context, identity, call)
        await _send_rates(context, call)
        position = await self._gateway.requests.queue_position(spec)
        first = api.GenerateResponse(
            chunk=api.TokenChunk(request_id=spec.request_id),
            seed=spec.sampling.seed,
            queue_position=None if position is None else position.requests,
            expected_wait_ms=None if position is None else position.wait_ms,
        )
        await context.write(first)  # type: ignore[arg-type]
        stream = ChunkStream(self._gateway, context, spec, call, next_index=0, message=api.GenerateResponse)
        await stream.write("")

    async def resume(self, context: Context, identity: Identity, call: Call) -> None:
        """Stream a log from an offset; accept the request again where Redis has lost it and the caller repeats it."""
        spec, is_complete, index, digest = await self._resumed(context, identity, call)
        call.resumed(spec)
        if not is_complete:
            stream = ChunkStream(self._gateway, context, spec, call, next_index=index, message=api.ResumeResponse)
            await stream.write(digest)

    async def _accept(self, context: Context, identity: Identity, call: Call) -> RequestSpec:
        """Accept a request. Its message is not kept for its stream's life."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.GenerateRequest, data)
            try:
                draft = generate_draft(request, deadline_ms=_deadline_ms(context))
                call.name_operation(CHAT if request.HasField("chat") else TEXT_COMPLETION)
                return await self._gateway.submission.submit(draft, identity, call)
            except InvalidRequest as error:
                raise with_message_path(error) from error.__cause__

    async def _resumed(self, context: Context, identity: Identity, call: Call) -> tuple[RequestSpec, bool, int, str]:
        """Return the request, whether the caller has all of its log, and the position to go on from."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.ResumeRequest, data)
            index, digest = request.next_index, request.digest
            if index >= _MAX_INDEX:
                raise InvalidRequest("next_index", f"expected the index of a log entry, got {index}")
            try:
                view, is_complete = await self._gateway.requests.resume(
                    request.request_id, identity.tenant, from_index=index, digest=digest
                )
            except RequestNotFound:
                if not request.HasField("request"):
                    raise
                return await self._accept_again(request, context, identity, call), False, index, digest
            return view.spec, is_complete, index, digest

    async def _accept_again(
        self, request: api.ResumeRequest, context: Context, identity: Identity, call: Call
    ) -> RequestSpec:
        try:
            draft = generate_draft(request.request, deadline_ms=_deadline_ms(context))
            return await self._gateway.submission.submit_again(draft, identity, request.request_id, call)
        except InvalidRequest as error:
            named = with_message_path(error)
            named.field = f"request.{named.field}"
            raise named from error.__cause__

    async def cancel(self, context: Context, identity: Identity, call: Call) -> api.CancelResponse:
        """End a request; idempotent."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.CancelRequest, data)
        return api.CancelResponse(finish_reason=await self._gateway.cancel(request.request_id, identity))

    async def get_request(self, context: Context, identity: Identity, call: Call) -> api.GetRequestResponse:
        """Return a request's state."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.GetRequestRequest, data)
        view = await self._gateway.requests.view(request.request_id, identity.tenant)
        return api.GetRequestResponse(
            request_id=view.request_id,
            model=view.model,
            state=view.state,
            queue_position=view.queue_position,
            expected_wait_ms=view.expected_wait_ms,
            finish_reason=view.finish_reason,
            next_index=view.next_index,
            usage=view.usage,
            attempts=view.attempts,
        )

    async def embed(self, context: Context, identity: Identity, call: Call) -> api.EmbedResponse:
        """Accept a request for vectors, and return them when all are known."""
        await self._gateway.turns.wait()
        async with self._receiver.message(context) as data:
            draft = embed_draft(parse_message(api.EmbedRequest, data), deadline_ms=_deadline_ms(context))
            spec = await self._gateway.submission.submit(draft, identity, call)
        await _send_rates(context, call)
        return await embed_response(self._gateway, spec)

    async def score(self, context: Context, identity: Identity, call: Call) -> api.ScoreResponse:
        """Accept a request for scores, and return them when all are known."""
        await self._gateway.turns.wait()
        async with self._receiver.message(context) as data:
            draft = score_draft(parse_message(api.ScoreRequest, data), deadline_ms=_deadline_ms(context))
            spec = await self._gateway.submission.submit(draft, identity, call)
        await _send_rates(context, call)
        return await score_response(self._gateway, spec)

    async def list_models(self, context: Context, identity: Identity, call: Call) -> api.ListModelsResponse:
        """Return all models by name."""
        async with self._receiver.message(context) as data:
            parse_message(api.ListModelsRequest, data)
        models = [
            api.Model(name=info.name, max_model_len=card.max_model_len, created=info.created, engines=info.engines)
            for info, card in await self._gateway.models.list_models()
            if self._gateway.submission.tenants.allows(identity, info.name)
        ]
        return api.ListModelsResponse(models=models)

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return `method` with authentication before it, and its errors as statuses; its outcome is measured."""

        async def answered(_: Any, context: Context) -> Any:
            outcome, answer, report = DISCONNECTED, None, None
            metadata = _metadata(context)
            call = self._gateway.calls.begin(name, _OPERATIONS.get(name, ""), metadata)
            try:
                identity = await self._gateway.identify(_credentials(context, metadata))
                call.identified(identity)
                answer = await method(context, identity, call)
                outcome = OK
            except (GatewayError, StreamsError) as error:
                report = error_report(error)
                outcome = report.code
                drop_frames(error)
            except Exception as error:
                logger.exception("call failed", extra={"method": name})
                outcome, report = INTERNAL_ERROR, error_report(error)
                drop_frames(error)
            finally:
                call.end(outcome)
            if report is not None:
                await abort(context, report)
            return answer

        return answered


async def _send_rates(context: Context, call: Call) -> None:
    """Send how far the caller's limits are used, where it has any, as initial metadata."""
    if call.rates:
        await context.send_initial_metadata(tuple(rate_headers(call.rates).items()))


def _metadata(context: Context) -> dict[str, str]:
    given = dict(context.invocation_metadata() or ())
    return {name: value.decode("latin-1") if isinstance(value, bytes) else value for name, value in given.items()}


def _credentials(context: Context, metadata: Mapping[str, str]) -> Credentials:
    certificates = context.auth_context().get("x509_pem_cert", ())  # is there where one is required and checked
    certificate = next(iter(certificates), None)
    return Credentials(
        metadata.get("authorization"), None if certificate is None else certificate.decode("ascii"), context.peer()
    )


def _deadline_ms(context: Context) -> int:
    """Return the milliseconds that the call's deadline leaves; 0 where it has none."""
    remaining_s = context.time_remaining()
    return 0 if remaining_s is None else max(1, round(remaining_s * 1000))


_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]


# grpcio 1.85 ends its server at a path that is not UTF-8; these are private names, so its version stays pinned.
class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls. The name of the overridden method is grpcio's own; a test shows that it is still called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refusals: set[asyncio.Task[None]] = set()
        """Of calls whose method is not registered; each ends with its connection, at the latest."""

    async def _request_call(self) -> Any:
        """Refuse calls of methods that are not registered, for as long as the server runs."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


class _Server(Server):
    """`grpc.aio.server` with that core; the constructor of the base makes one of its own."""

    def __init__(self, core: _Core, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._server = loop, core


def named_calls_server(
    *, options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor]
) -> grpc.aio.Server:
    """Return a server for registered methods alone: `add_registered_method_handlers`."""
    loop = cygrpc.get_working_loop()
    core = _Core(loop, None, (), tuple(interceptors), tuple(options), None)
    return cast(grpc.aio.Server, _Server(core, loop))


async def _refuse(call: Any) -> None:
    header = cygrpc.SendInitialMetadataOperation(None, 0)
    loop = asyncio.get_running_loop()
    try:
        await cygrpc._send_error_status_from_server(call, _UNIMPLEMENTED, "Method not found!", (), header, loop)
    except cygrpc.InternalError:
        return  # the caller has left


_KEEP_ALIVE_MS = 30_000  # below the 60 s after which many proxies drop a silent connection

_LONGEST_TURN_S = 300
_CORE_LOGGER = "grpc._cython.cygrpc"


def _is_no_callers_fault(record: logging.LogRecord) -> bool:
    """Return whether a record is wanted: gRPC logs a traceback for each metadata key of a call that is no UTF-8."""
    return not record.getMessage().startswith("Invalid encoding on ")


class GrpcServer:
    """A server with its port. Call `start`, then `stop`; it refuses connections beyond `max_connections`."""

    def __init__(self, gateway: Gateway, *, max_connections: int) -> None:
        bounds = gateway.settings.connections
        options = (
            ("grpc.max_receive_message_length", gateway.settings.limits.max_body_bytes),
            # What arrives of a message that nobody has asked for. The probe would raise it to megabytes.
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.http2.bdp_probe", 0),
            # Above the first bound gRPC refuses calls at random, above the second all.
            ("grpc.max_metadata_size", bounds.max_header_bytes),
            ("grpc.absolute_max_metadata_size", bounds.max_header_bytes),
            ("grpc.max_concurrent_streams", bounds.max_grpc_streams),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", round(bounds.header_timeout_s * 1000)),
            ("grpc.max_send_message_length", -1),
            # Thousands of calls may come back at once. By default the core cancels those that wait for their turn for
            # 30 s, and, at random, some of more than 1,000.
            ("grpc.server_max_unrequested_time_in_server", _LONGEST_TURN_S),
            ("grpc.server.max_pending_requests", bounds.max_grpc_streams),
            ("grpc.server.max_pending_requests_hard_limit", bounds.max_grpc_streams),
            # With it a second process on the same port would start, and take half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", _KEEP_ALIVE_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        )
        receiver = Receiver(gateway.settings, gateway.pending)
        interceptor = ReceivingInterceptor(receiver, own_service=SERVICE_NAME)
        logging.getLogger(_CORE_LOGGER).addFilter(_is_no_callers_fault)
        self._server = named_calls_server(options=options, interceptors=(interceptor,))
        self._server.add_registered_method_handlers(SERVICE_NAME, InferenceServicer(gateway, receiver).handlers())
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        """Serve, by TLS where there are credentials; return the port that is bound.

        Raises StartupError where it can't be bound.
        """
        address = join_address(host or ALL_ADDRESSES, port)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(
                f"cannot serve gRPC on {address}: the port is taken or the address is not of this machine"
            ) from error
        await self._server.start()
        await self.set_serving(serving=False)
        return bound

    async def set_serving(self, *, serving: bool) -> None:
        """Set the status that health checks report."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)

    async def stop(self, limit_s: float) -> None:
        """Refuse new calls at once, give open ones `limit_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(limit_s)
