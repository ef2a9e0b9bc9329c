"""Open the topology that an address names: one server, the master that Sentinels name, or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote
from weakref import WeakSet

from pagestream_telemetry.addresses import split_address
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from pagestream_streams.connection.base import Command, Topology, close_idle
from pagestream_streams.connection.cluster import ClusterTopology
from pagestream_streams.connection.gathering import Gathering
from pagestream_streams.connection.light import light
from pagestream_streams.connection.schemes import SCHEMES, split_url
from pagestream_streams.protocol.records import Argument
from pagestream_streams.settings import StreamsSettings

_TLS_OPTIONS = ("ssl_ca_certs", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_PORT, _REDIS_PORT = 26379, 6379


def open_topology(url: str, settings: StreamsSettings) -> Topology:
    """Create the topology that an address names, without connecting. ValueError for a malformed address.

    Forms: redis://[user:password@]host[:port][/db], unix://path, redis+sentinel://[user:password@]host[:port],.../
    service[/db], redis+cluster://[user:password@]host[:port],... With rediss the connections are TLS; its options are
    redis-py's, behind a question mark: ssl_ca_certs (a file), ssl_ca_data (PEM), ssl_certfile, ssl_keyfile,
    ssl_cert_reqs, ssl_check_hostname.
    Sentinels are asked without a password unless sentinel_username and sentinel_password give one.
    """
    if not url.startswith(SCHEMES):
        shown = url.partition("://")[0]
        raise ValueError(
            f"expected a Redis address that begins with {', '.join(SCHEMES)}; got one that begins with {shown!r}"
        )
    kind = url.partition("://")[0].rpartition("+")[2]
    if kind == "sentinel":
        return _sentinel(url, settings)
    if kind == "cluster":
        return _cluster(url, settings)
    # A bound that is never reached: SingleServer admits fewer commands, and waits cheaper than redis-py's pool.
    pool = ConnectionPool.from_url(url, max_connections=4 * settings.max_connections, **_limits(settings))
    pool.connection_class = light(pool.connection_class)
    return SingleServer(Redis(connection_pool=pool), settings.max_connections)


class SingleServer:
    """One server, or the master that Sentinels name."""

    is_cluster = False

    def __init__(self, redis: Redis, max_connections: int, others: Sequence[Redis] = ()) -> None:
        """More commands at once than `max_connections` wait for their turn. `others` are closed with it."""
        self._redis = redis
        self._others = others
        self._turns = asyncio.Semaphore(max_connections)
        self._gathering = Gathering(self._turns, max_connections, redis.execute_command, self._pipeline)

    async def execute(self, *command: Argument) -> Any:
        return await self._gathering.run(command)

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        return await self.pipeline([command])

    async def pipeline(self, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        try:
            async with asyncio.timeout(limit_s), self._turns:
                return await self._pipeline(commands)
        except TimeoutError:
            if limit_s is None:
                raise
            return [TimeoutError(f"no answer within {limit_s:g} s")] * len(commands)

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(await pipe.execute(raise_on_error=False))

    async def pipeline_to(self, key: str, commands: Sequence[Command]) -> list[Any]:
        return await self.pipeline(commands)

    def pubsub(self) -> PubSub:
        return self._redis.pubsub()

    async def drop_idle(self) -> None:
        await close_idle(self._redis.connection_pool._available_connections)

    async def close(self) -> None:
        await self._gathering.stop()
        for each in (self._redis, *self._others):
            await each.aclose()
            await each.connection_pool.disconnect()


class _Address:
    """An address of several hosts, in its parts."""

    def __init__(self, url: str, default_port: int) -> None:
        parts = split_url(url)
        user, _, password = parts.login.partition(":")
        self.tls = parts.scheme.startswith("rediss")
        self.path = parts.path.strip("/")
        self.hosts = [split_address(each, default_port) for each in parts.hosts]
        self.credentials: dict[str, Any] = {
            name: unquote(value) for name, value in (("username", user), ("password", password)) if value
        }
        self.options: dict[str, Any] = {}
        self.sentinel_credentials: dict[str, Any] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in ("sentinel_username", "sentinel_password"):
                self.sentinel_credentials[name.removeprefix("sentinel_")] = value
            elif name in _TLS_OPTIONS and self.tls:
                self.options[name] = value.lower() in ("true", "1", "yes") if name == "ssl_check_hostname" else value
            else:
                raise ValueError(f"unknown option {name!r} in the address; with rediss: {', '.join(_TLS_OPTIONS)}")


def _sentinel(url: str, settings: StreamsSettings) -> Topology:
    address = _Address(url, _SENTINEL_PORT)
    service, _, db = address.path.partition("/")
    if not service or (db and not db.isdecimal()):
        raise ValueError("expected redis+sentinel://host:port,host:port/<service>[/<db>]")
    tls = {"ssl": True, **address.options} if address.tls else {}
    limits = _limits(settings)
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        address.hosts, sentinel_kwargs={**limits, **tls, **address.sentinel_credentials}
    )
    redis: Redis = sentinel.master_for(
        service,
        db=int(db or 0),
        max_connections=4 * settings.max_connections,  # not reached: SingleServer admits fewer commands
        **limits,
        **tls,
        **address.credentials,
    )
    redis.connection_pool.connection_class = light(redis.connection_pool.connection_class)
    return SingleServer(redis, settings.max_connections, sentinel.sentinels)


def _cluster(url: str, settings: StreamsSettings) -> Topology:
    address = _Address(url, _REDIS_PORT)
    if address.path:
        raise ValueError(f"a cluster has one database and no service: remove {address.path!r} after the hosts")
    cluster = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        # A node's pool raises when it is exhausted: ClusterTopology admits fewer commands than it has connections.
        max_connections=2 * settings.max_connections,
        require_full_coverage=False,
        ssl=address.tls,
        **_limits(settings),
        **address.credentials,
        **address.options,
    )
    connections = WeakSet[AbstractConnection]()
    connection_class = light(cluster.connection_kwargs["connection_class"], connections)
    cluster.connection_kwargs["connection_class"] = connection_class  # of nodes that are found later
    for node in cluster.startup_nodes:
        node.connection_class = connection_class
    return ClusterTopology(cluster, connections, settings.max_connections)


def _limits(settings: StreamsSettings) -> Mapping[str, Any]:
    """Return every connection's options. redis-py's own retries are off: scripts say whether they may be repeated."""
    return {
        "socket_timeout": settings.command_timeout_s,
        "socket_connect_timeout": settings.command_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
