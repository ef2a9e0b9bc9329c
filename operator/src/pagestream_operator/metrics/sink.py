"""The OTLP/gRPC endpoint for metrics, which collectors and engines export to: its certificate and token, and the points
that it stores, drops or refuses. Every replica of the operator has one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics
from pagestream_telemetry import ALL_ADDRESSES, join_address

from pagestream_operator.errors import SinkFileInvalid, SinkUnavailable
from pagestream_operator.metrics.points import (
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    QUEUE_GAUGES,
    TIME_TO_FIRST_TOKEN,
    Source,
    histogram_of,
    is_delta,
    is_stale,
    number_of,
    source_of,
)
from pagestream_operator.metrics.series import Taken
from pagestream_operator.metrics.store import MetricsStore

_READ_AGAIN_S = 1.0
_PREFIX = "Bearer "
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkAccessSettings:
    """Files of the sink's certificate and token; None where it has none."""

    certificate_file: Path | None = None
    """PEM, with the chain. Each connection gets the certificate that is in the file then."""
    key_file: Path | None = None
    token_file: Path | None = None
    """The token that senders must have, one or several, one a line."""
    rotation_s: float = 600.0
    """Seconds for which a replaced token still counts: senders get the new one at another time than the sink, a mounted
    Secret within about a minute and some only by a restart."""


class SinkAccess:
    """Credentials for the server, and the check of each export's token."""

    def __init__(self, settings: SinkAccessSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files.

        Raises:
            SinkFileInvalid: a file can't be read, or has no token in it.
        """
        self._settings, self._clock = settings, clock
        self._pair = self._read_pair()
        self._tokens: frozenset[bytes] = frozenset()
        self._until: dict[bytes, float] = {}
        """Replaced tokens, and when they cease to count."""
        self._read_s = clock()
        if settings.token_file is not None:
            self._tokens = _tokens_in(settings.token_file)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials that follow the files; None without a certificate."""
        if self._pair is None:
            return None
        first = grpc.ssl_server_certificate_configuration([self._pair])
        return grpc.dynamic_ssl_server_credentials(first, self._renewed)  # type: ignore[arg-type]

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether an export with these headers may be stored."""
        if self._settings.token_file is None:
            return True
        self._read_token_again()
        given = next((value for name, value in metadata or () if name == "authorization"), "")
        text = given if isinstance(given, str) else given.decode(errors="replace")
        if not text.startswith(_PREFIX):
            return False
        token = text.removeprefix(_PREFIX).strip().encode()
        return any(hmac.compare_digest(token, known) for known in (*self._tokens, *self._until))

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate for a new connection; None: as before. Called by gRPC, in a thread of its own."""
        try:
            found = self._read_pair()
        except SinkFileInvalid as error:
            _logger.warning("the sink keeps its certificate: %s", error)
            return None
        if found is None or found == self._pair:
            return None
        self._pair = found
        _logger.info("the sink has a new certificate")
        return grpc.ssl_server_certificate_configuration([found])

    def _read_pair(self) -> tuple[bytes, bytes] | None:
        certificate, key = self._settings.certificate_file, self._settings.key_file
        if certificate is None or key is None:
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")  # the two belong together
            return key.read_bytes(), certificate.read_bytes()
        except OSError as error:
            raise SinkFileInvalid(
                f"the certificate of the metrics sink ({certificate}, {key}) can't be used: {error}"
            ) from error

    def _read_token_again(self) -> None:
        file, now = self._settings.token_file, self._clock()
        if file is None or now - self._read_s < _READ_AGAIN_S:
            return
        self._read_s = now
        self._until = {token: until for token, until in self._until.items() if until > now}
        try:
            found = _tokens_in(file)
        except SinkFileInvalid as error:
            _logger.warning("the sink keeps its token: %s", error)
            return
        if found != self._tokens:
            replaced = self._tokens - found
            self._until |= dict.fromkeys(replaced, now + self._settings.rotation_s)
            self._tokens = found
            _logger.info("the sink has a new token", extra={"seconds": self._settings.rotation_s})


def _tokens_in(file: Path) -> frozenset[bytes]:
    try:
        found = frozenset(file.read_bytes().split())
    except OSError as error:
        raise SinkFileInvalid(f"the token of the metrics sink can't be read: {error}") from error
    if not found:
        raise SinkFileInvalid(f"{file} has no token: write one or several, one a line")
    return found


_READ = frozenset(ENGINE_GAUGES) | ENGINE_COUNTERS | frozenset(QUEUE_GAUGES) | {TIME_TO_FIRST_TOKEN}
_KINDS = dict.fromkeys(ENGINE_COUNTERS, ("sum",)) | {TIME_TO_FIRST_TOKEN: ("histogram",)}
_GAUGE_KINDS = ("gauge", "sum")
"""An UpDownCounter arrives as a cumulative sum that isn't monotonic: its value is the level."""
_REFUSED = {
    Taken.FUTURE: "from the future",
    Taken.ABSURD: "not what the metric is",
    Taken.OVERFLOW: "over the bound of what is kept",
}


class Intake:
    """Stores one export, and counts the refused points."""

    def __init__(self, store: MetricsStore) -> None:
        """Prepare for one export."""
        self._store = store
        self._refused: Tally[str] = Tally()

    @property
    def rejected(self) -> int:
        """Number of refused data points. Points of unknown metrics and repeated ones aren't refused."""
        return self._refused.total()

    def why(self) -> str:
        """The reasons of the refusals, for the answer."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self._refused.items()))

    def store(self, resource: ResourceMetrics) -> None:
        """Store the metrics of one process."""
        source: Source | None = None
        outcomes = self._store.outcomes
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name not in _READ:
                    outcomes["unknown"] += 1
                    continue
                source = source or source_of(resource.resource)
                if source is None:
                    self._refuse("anonymous", "from a resource without k8s.pod.name or service.instance.id", metric)
                else:
                    self._store_metric(source, metric)

    def _refuse(self, outcome: str, reason: str, metric: Metric) -> None:
        kind = metric.WhichOneof("data")
        points = len(getattr(metric, kind).data_points) if kind is not None else 0
        self._store.outcomes[outcome] += points
        self._refused[reason] += points

    def _store_metric(self, source: Source, metric: Metric) -> None:
        kind = metric.WhichOneof("data")
        if kind is None:
            return
        if kind not in _KINDS.get(metric.name, _GAUGE_KINDS):
            self._refuse("absurd", f"of {metric.name} as {kind}", metric)
        elif kind == "histogram":
            self._take_histogram(source, metric)
        elif kind == "sum":
            self._take_sum(source, metric)
        else:
            for point in metric.gauge.data_points:
                number = number_of(point)
                if number is not None:
                    self._count(self._store.take_number(source, metric.name, number, delta=None))

    def _take_sum(self, source: Source, metric: Metric) -> None:
        delta = is_delta(metric.sum.aggregation_temporality)
        is_level = metric.name not in ENGINE_COUNTERS
        if delta is None or (is_level and delta) or (not is_level and not metric.sum.is_monotonic):
            self._refuse("absurd", f"of {metric.name} with a temporality that it can't have", metric)
            return
        for point in metric.sum.data_points:
            number = number_of(point)
            if number is not None:
                self._count(self._store.take_number(source, metric.name, number, delta=None if is_level else delta))

    def _take_histogram(self, source: Source, metric: Metric) -> None:
        delta = is_delta(metric.histogram.aggregation_temporality)
        if delta is None:
            self._refuse("absurd", f"of {metric.name} without a temporality", metric)
            return
        for point in metric.histogram.data_points:
            if is_stale(point):
                continue
            histogram = histogram_of(point)
            if histogram is None:
                self._count(Taken.ABSURD)
            else:
                self._count(self._store.take_latency(source, histogram, delta=delta))

    def _count(self, taken: Taken) -> None:
        self._store.outcomes[taken.value] += 1
        reason = _REFUSED.get(taken)
        if reason is not None:
            self._refused[reason] += 1


_SERVICE = metrics_service_pb2.DESCRIPTOR.services_by_name["MetricsService"].full_name
_TURN = 64
"""Resources that are stored before other tasks of the event loop may run."""


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
            intake.store(resource)
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
