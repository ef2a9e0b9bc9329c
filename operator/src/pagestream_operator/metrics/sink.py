"""The OTLP/gRPC endpoint for metrics, which collectors and engines export to. Every replica of the operator has one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from pagestream_telemetry import ALL_ADDRESSES, join_address

from pagestream_operator.errors import SinkUnavailable
from pagestream_operator.metrics.intake import Intake
from pagestream_operator.metrics.sink_access import SinkAccess, SinkAccessSettings
from pagestream_operator.metrics.store import MetricsStore

_SERVICE = metrics_service_pb2.DESCRIPTOR.services_by_name["MetricsService"].full_name
_TURN = 64
"""Resources that are stored before other tasks of the event loop may run."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Bounds of what the sink takes in."""

    host: str = "[::]"
    port: int = 4317
    """OTLP/gRPC's own; 0 takes a free one."""
    max_message_bytes: int = 8 * 1024 * 1024
    """An export of 1,000 pods has about 3 MB."""
    max_concurrent_exports: int = 16
    """Each holds at most one message."""
    grace_s: float = 2.0
    """Seconds for exports in flight when the sink stops."""


class MetricsSink:
    """OTLP's MetricsService, which fills `store`: `async with MetricsSink(store) as sink`.

    It answers UNAUTHENTICATED without its token, INVALID_ARGUMENT to what it can't decode, and RESOURCE_EXHAUSTED to
    messages that are too large and to exports over the concurrency limit. Refused points are counted in the answer
    (partial success).
    """

    def __init__(
        self,
        store: MetricsStore,
        settings: SinkSettings | None = None,
        *,
        access: SinkAccess | None = None,
    ) -> None:
        """Prepare the sink. Without `access` it is plain text, and admits all."""
        self._store = store
        self._settings = settings or SinkSettings()
        self._access = access or SinkAccess(SinkAccessSettings())
        self._server: grpc.aio.Server | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The TCP port, once started."""
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            SinkUnavailable: the address can't be bound.
        """
        settings = self._settings
        server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_concurrent_exports,
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        server.add_generic_rpc_handlers((_handler(self._export),))
        address = join_address(settings.host or ALL_ADDRESSES, settings.port)
        try:
            credentials = self._access.server_credentials()
            if credentials is None:
                self._port = server.add_insecure_port(address)
            else:
                self._port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise SinkUnavailable(address) from error
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Stop listening. Exports in flight have the grace to end."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._settings.grace_s)

    async def __aenter__(self) -> MetricsSink:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    async def _export(
        self, body: bytes, context: grpc.aio.ServicerContext[bytes, ExportMetricsServiceResponse]
    ) -> ExportMetricsServiceResponse:
        if not self._access.admits(context.invocation_metadata()):
            self._store.outcomes["unauthenticated"] += 1
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the header authorization must be `Bearer` and the sink's token"
            )
        if len(body) > self._settings.max_message_bytes:  # gRPC's own limit holds for what came over the wire
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(body)} bytes given, at most {self._settings.max_message_bytes} expected: send smaller batches",
            )
        try:
            request = ExportMetricsServiceRequest.FromString(body)
        except DecodeError as error:
            self._store.outcomes["malformed"] += 1
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"the message is no ExportMetricsServiceRequest: {error}"
            )
        return await self._take(request)

    async def _take(self, request: ExportMetricsServiceRequest) -> ExportMetricsServiceResponse:
        intake = Intake(self._store)
        for index, resource in enumerate(request.resource_metrics):
            if index % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            intake.take(resource)
        self._store.sweep()
        if not intake.rejected:
            return ExportMetricsServiceResponse()
        _logger.debug("refused %d data points: %s", intake.rejected, intake.why())
        partial = ExportMetricsPartialSuccess(rejected_data_points=intake.rejected, error_message=intake.why())
        return ExportMetricsServiceResponse(partial_success=partial)


_Export = Callable[
    [bytes, grpc.aio.ServicerContext[bytes, ExportMetricsServiceResponse]], Awaitable[ExportMetricsServiceResponse]
]


def _handler(export: _Export) -> grpc.GenericRpcHandler:
    """The generated service's handler, except that it gets bytes, so that it can answer decoding errors."""
    method: grpc.RpcMethodHandler[bytes, ExportMetricsServiceResponse] = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=None,
        response_serializer=ExportMetricsServiceResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"Export": method})
