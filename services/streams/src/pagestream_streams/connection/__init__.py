"""Connections to Redis: topologies, scripts, durability and subscriptions."""

from pagestream_streams.connection.connection import Call, Connection, Subscription, run_on_each
from pagestream_streams.connection.embedded import (
    LEAST_VERSION,
    EmbeddedRedis,
    FolderContent,
    ServerBinary,
    content_of,
    find_servers,
    free_port,
    record_server,
    socket_path,
)
from pagestream_streams.connection.topologies import ClusterTopology, open_topology

__all__ = [
    "LEAST_VERSION",
    "Call",
    "ClusterTopology",
    "Connection",
    "EmbeddedRedis",
    "FolderContent",
    "ServerBinary",
    "Subscription",
    "content_of",
    "find_servers",
    "free_port",
    "open_topology",
    "record_server",
    "run_on_each",
    "socket_path",
]
