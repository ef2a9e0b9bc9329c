"""The gRPC server: Inference, health and reflection, with names of methods that can't end it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from pagestream_telemetry import ALL_ADDRESSES, join_address

from pagestream_gateway.errors import StartupError
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.grpc.receiving import WINDOW_BYTES, Receiver, ReceivingInterceptor
from pagestream_gateway.grpc.service import SERVICE_NAME, InferenceServicer

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
