"""A gateway process from start to end."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin.sweeper import UnservedRequests
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import ByteBudget, Periodic, Turns
from pagestream_telemetry import catalog
from pagestream_telemetry.process import Telemetry, running_telemetry

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.authenticator import Identities, Reload
from pagestream_gateway.batches.driver import BatchDispatcher
from pagestream_gateway.batches.jobs import JobApi
from pagestream_gateway.batches.uploads import Batches
from pagestream_gateway.calls import Calls, Metrics, RedisTimeout
from pagestream_gateway.encoder import EncoderPool, TokenizePool
from pagestream_gateway.errors import StartupError
from pagestream_gateway.gateway import AcceptedRequests, Gateway, OpenStreams, PendingRequests, Submission
from pagestream_gateway.grpc.server import GrpcServer
from pagestream_gateway.http.app import build_admin_app, build_app, build_metrics_app
from pagestream_gateway.http.callers import CorsHeaders
from pagestream_gateway.http.server import ConnectionLimits, HttpServer
from pagestream_gateway.limits import LimitFile, TenantLimits, TenantMetrics
from pagestream_gateway.models import Models
from pagestream_gateway.monitors import EngineMonitor, MemoryMonitor, QueueMonitor
from pagestream_gateway.settings import Settings
from pagestream_gateway.tls import Certificate, load_certificate

logger = logging.getLogger(__name__)
_HEALTH_PERIOD_S = 1.0
_START_POLL_S = 0.03  # it adds to the time to ready
_PRELOAD_PERIOD_S = 1.0  # one round trip, and a second one for each model
_SERVICE = "pagestream-gateway"
_OWN_FILES = 256  # open files beside those of clients' connections: to Redis, to the collector, logs


class _Stopped(Exception):  # noqa: N818 - reads as what happened
    """SIGTERM or SIGINT came before a port was bound."""


@dataclass(frozen=True)
class Ports:
    """The TCP ports that a running gateway has bound."""

    http: int
    grpc: int
    metrics: int | None
    admin: int | None = None


@contextlib.asynccontextmanager
async def running_gateway(
    settings: Settings, *, before_binding: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Ports]:
    """Run a gateway that serves inside the block, in this event loop.

    `before_binding` is awaited when all but the ports is ready; what it raises ends the gateway.

    Raises SettingsError for a file of credentials or a certificate that is wrong, StartupError when Redis does not
    answer or a port is taken.
    """
    identities = Identities(settings.gateway)
    limit_file = None if settings.gateway.limits is None else LimitFile(settings.gateway.limits)
    certificate = load_certificate(settings.gateway)
    watches = [*identities.watches, *(each.watch() for each in (limit_file, certificate) if each is not None)]
    async with (
        _gateway(settings, identities, limit_file) as gateway,
        _servers(gateway, certificate, watches, before_binding) as ports,
    ):
        try:
            yield ports
        finally:
            await gateway.streams.drain(settings.shutdown.drain_s)


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    before_binding = partial(_wait_for_start, settings.gateway.start_file, stop)
    with contextlib.suppress(_Stopped):
        async with running_gateway(settings, before_binding=before_binding) as ports:
            logger.info(
                "serving",
                extra={
                    "host": settings.gateway.host,
                    "http_port": ports.http,
                    "grpc_port": ports.grpc,
                    "metrics_port": ports.metrics,
                    "admin_port": ports.admin,
                },
            )
            await stop.wait()
            logger.info("stopping")
    logger.info("stopped")


async def _wait_for_start(file: Path | None, stop: asyncio.Event) -> None:
    """Wait for a file, as long as that takes. Raises _Stopped if `stop` is set before."""
    while not _exists(file):
        try:
            async with asyncio.timeout(_START_POLL_S):
                await stop.wait()
        except TimeoutError:
            continue
        raise _Stopped


def _exists(file: Path | None) -> bool:
    return file is None or file.exists()


@contextlib.asynccontextmanager
async def _gateway(settings: Settings, identities: Identities, limit_file: LimitFile | None) -> AsyncIterator[Gateway]:
    async with await _connect(settings) as broker, _gateway_of(broker, settings, identities, limit_file) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def _gateway_of(
    broker: Broker, settings: Settings, identities: Identities, limit_file: LimitFile | None
) -> AsyncIterator[Gateway]:
    limits = settings.limits
    pool = TokenizePool(
        workers=limits.tokenize_workers, max_pending=limits.tokenize_queue, limit_s=limits.tokenize_limit_s
    )
    with (
        running_telemetry(
            settings.telemetry, service=_SERVICE, instance_id=_instance_id(settings), environ=os.environ
        ) as telemetry,
        contextlib.closing(Audit(settings.audit, is_on=settings.audits)) as audit,
    ):
        tenants = TenantLimits() if limit_file is None else limit_file.limits
        opening = GatewaySession(broker, settings.gateway.id, limits=None if limit_file is None else tenants)
        async with opening as session, pool:
            telemetry.registry.on_collect(lambda: _count_reclaims(telemetry, session))
            metrics = Metrics(telemetry.registry)
            tenant_metrics = TenantMetrics(telemetry.registry, settings.gateway.metric_tenants)
            session.ends.listeners.append(tenant_metrics.ended)
            limit = RedisTimeout(settings.gateway.answer_limit_s)
            own = settings.gateway
            models = Models(broker, pool, limit, settings.formats, own.model_aliases, default=own.default_model)
            yield Gateway(
                settings=settings,
                broker=broker,
                limit=limit,
                authenticator=identities.authenticator,
                models=models,
                submission=Submission(
                    broker, session, models, EncoderPool(pool, limits), limit, settings, tenants, tenant_metrics
                ),
                requests=AcceptedRequests(broker, session, metrics, limit),
                pool=pool,
                pending=PendingRequests(limits.max_pending_bytes, limit_s=limits.tokenize_limit_s),
                streams=OpenStreams(metrics),
                calls=Calls(metrics, telemetry.tracer, audit),
                queue=QueueMonitor(broker, telemetry.registry),
                memory=MemoryMonitor(broker, session, telemetry.registry),
                engines=EngineMonitor(broker, limit),
                telemetry=telemetry,
                answer_budget=ByteBudget(settings.stream.whole_answers_bytes),
                batches=Batches(broker, limit, settings.batches),
                audit=audit,
                reloads=[*identities.reloads, *([] if limit_file is None else [Reload("limits", limit_file.reload)])],
                turns=Turns(),
            )


async def _connect(settings: Settings) -> Broker:
    try:
        return await Broker.connect(settings.gateway.redis, settings.broker)
    except Unavailable as error:
        raise StartupError(
            f"Redis does not answer at {_without_password(settings.gateway.redis)} (--redis): {error}"
        ) from error
    except ValueError as error:
        raise StartupError(f"--redis: {error}") from error


def _instance_id(settings: Settings) -> str:
    return settings.gateway.id or f"{socket.gethostname()}-{os.getpid()}"


def _count_reclaims(telemetry: Telemetry, session: GatewaySession) -> None:
    telemetry.registry.number(catalog.RECLAIMS).series().set(session.num_reclaimed)


@contextlib.asynccontextmanager
async def _servers(
    gateway: Gateway,
    certificate: Certificate | None,
    watches: Sequence[Periodic],
    before_binding: Callable[[], Awaitable[None]] | None,
) -> AsyncIterator[Ports]:
    listen, limit_s = gateway.settings.gateway, gateway.settings.shutdown.close_limit_s
    async with contextlib.AsyncExitStack() as stack:
        tls, credentials = (certificate.context, certificate.grpc_credentials()) if certificate else (None, None)
        max_connections = _max_connections(gateway.settings)
        limits = ConnectionLimits(
            gateway.settings.connections,
            gateway.settings.limits.max_body_bytes,
            max_connections,
            on_refusal=lambda code: gateway.calls.begin("http", "", {}).end(code),
            cors=CorsHeaders(listen.origins),
        )
        http = HttpServer(build_app(gateway), limits, close_limit_s=limit_s, tls=tls)
        if before_binding is not None:
            await before_binding()
        http_port = await http.start(listen.host, listen.http_port)
        stack.push_async_callback(http.stop)
        metrics_port = None
        if listen.metrics_port is not None:
            unreadable = replace(limits, cors=CorsHeaders([]))  # web pages may not call this port
            metrics = HttpServer(build_metrics_app(gateway), unreadable, close_limit_s=limit_s)
            metrics_port = await metrics.start(listen.metrics_address, listen.metrics_port)
            stack.push_async_callback(metrics.stop)
        admin_port = None
        if listen.admin_port is not None:
            admin = HttpServer(build_admin_app(gateway), limits, close_limit_s=limit_s, tls=tls)
            admin_port = await admin.start(listen.host, listen.admin_port)
            stack.push_async_callback(admin.stop)
        grpc_server = GrpcServer(gateway, max_connections=max_connections)
        stack.push_async_callback(grpc_server.stop, limit_s)
        grpc_port = await grpc_server.start(listen.host, listen.grpc_port, credentials)
        timers: list[Periodic | UnservedRequests | BatchDispatcher] = [
            Periodic("health", _HEALTH_PERIOD_S, lambda: _set_health(gateway, grpc_server))
        ]
        timers.append(Periodic("preload models", _PRELOAD_PERIOD_S, gateway.models.preload))
        timers += watches
        timers.append(BatchDispatcher(gateway, JobApi(gateway)))
        timers.append(UnservedRequests(gateway.broker, gateway.settings.limits.no_engine_deadline_s))
        if gateway.settings.telemetry.exports:
            interval_s = gateway.settings.telemetry.export_interval_s
            timers += [gateway.queue.watch(interval_s), gateway.memory.watch(interval_s)]
        for timer in timers:
            timer.start()
            stack.push_async_callback(timer.stop)
        yield Ports(http_port, grpc_port, metrics_port, admin_port)


def _max_connections(settings: Settings) -> int:
    """Return how many connections each API may keep, with as many files as the process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return settings.connections.max_connections
    found = min(settings.connections.max_connections, max(1, (most - _OWN_FILES) // 2))
    if found < settings.connections.max_connections:
        logger.warning(
            "each API keeps at most %d connections, since the process may open %d files (ulimit -n)", found, most
        )
    return found


async def _set_health(gateway: Gateway, server: GrpcServer) -> None:
    """Set what gRPC health checks report: what /readyz answers, and NOT_SERVING where the check itself fails."""
    try:
        serving = await gateway.is_ready()
    except Exception:
        await server.set_serving(serving=False)
        raise
    await server.set_serving(serving=serving)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
