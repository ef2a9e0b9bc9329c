"""Connections to Redis: topologies, scripts, durability and subscriptions."""

from pagestream_streams.connection import scripts
from pagestream_streams.connection.cluster import ClusterTopology
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.data_folder import FolderContent, content_of, record_server
from pagestream_streams.connection.embedded import (
    LEAST_VERSION,
    EmbeddedRedis,
    ServerBinary,
    find_servers,
    free_port,
    socket_path,
)
from pagestream_streams.connection.partition_runs import run_on_each
from pagestream_streams.connection.scripts import Script
from pagestream_streams.connection.subscription import Subscription
from pagestream_streams.connection.topologies import open_topology

__all__ = [
    "LEAST_VERSION",
    "Call",
    "ClusterTopology",
    "Connection",
    "EmbeddedRedis",
    "FolderContent",
    "Script",
    "ServerBinary",
    "Subscription",
    "content_of",
    "find_servers",
    "free_port",
    "open_topology",
    "record_server",
    "run_on_each",
    "scripts",
    "socket_path",
]
