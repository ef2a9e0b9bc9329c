"""The ports of all processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagestream_cli.ports import free_port, require_free
from pagestream_cli.serve.options import ServeOptions
from pagestream_cli.serve.redis_server import own_redis


@dataclass(frozen=True)
class GatewayPorts:
    """Ports of one gateway."""

    http: int
    grpc: int
    metrics: int | None


@dataclass(frozen=True)
class PortPlan:
    """Ports of all processes."""

    redis_url: str
    redis_socket: Path | None
    """Unix socket of serve's own Redis; None where another one is used."""
    gateways: tuple[GatewayPorts, ...]
    engine_metrics: tuple[int | None, ...]
    """One element for each engine; None without metrics."""


def assign_ports(options: ServeOptions) -> PortPlan:
    """Choose the ports and check that they are free.

    Raises:
        PortTakenError: one that was asked for is in use.
        UsageError: one is out of range or named twice, or Redis' socket has no safe place.
    """
    gateways = tuple(
        GatewayPorts(
            _port(options.http_port, i, options.host),
            _port(options.grpc_port, i, options.host),
            _metrics_port(options, i),
        )
        for i in range(options.gateways)
    )
    num_engines = options.engines + options.warm_spares
    engine_metrics = tuple(_metrics_port(options, options.gateways + i) for i in range(num_engines))
    asked: dict[str, int] = {}
    for i, ports in enumerate(gateways):
        asked[_option("--http-port", i)] = ports.http
        asked[_option("--grpc-port", i)] = ports.grpc
    metrics = [*(ports.metrics for ports in gateways), *engine_metrics]
    require_free(options.host, asked)
    of_metrics = {_option("--metrics-port", i): port for i, port in enumerate(metrics) if port is not None}
    require_free(options.metrics_host, of_metrics, beside=asked)
    if options.redis_url is not None:
        return PortPlan(options.redis_url, None, gateways, engine_metrics)
    redis_url, socket = own_redis(options.data_dir.redis)
    return PortPlan(redis_url, socket, gateways, engine_metrics)


def _port(first: int, offset: int, host: str) -> int:
    return free_port(host) if first == 0 else first + offset


def _metrics_port(options: ServeOptions, offset: int) -> int | None:
    return None if options.metrics_port is None else _port(options.metrics_port, offset, options.metrics_host)


def _option(name: str, offset: int) -> str:
    return name if offset == 0 else f"{name} + {offset}"
