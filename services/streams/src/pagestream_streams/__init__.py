"""The durable token stream: requests and token logs in Redis."""

from pagestream_streams.admin.broker import Broker, expire_engine
from pagestream_streams.admin.request_lists import RequestPage, enlist, list_requests
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.admin.unpublishing import unpublish
from pagestream_streams.connection.embedded import EmbeddedRedis, ServerBinary, find_server, server_command
from pagestream_streams.engine.session import EngineSession
from pagestream_streams.errors import (
    DigestMismatch,
    IdempotencyConflict,
    LogsFull,
    ModelInUse,
    ModelNameRefused,
    ModelNotFound,
    OffsetOutOfRange,
    QueueFull,
    RequestNotFound,
    RequestsUnfinished,
    ServerNotFound,
    StorageFull,
    StreamsError,
    Unavailable,
)
from pagestream_streams.gateway.session import GatewaySession
from pagestream_streams.protocol.records import (
    Append,
    AppendKind,
    AppendOutcome,
    Claim,
    ModelInfo,
    QuarantinedRequest,
    RequestSummary,
    RequestView,
)
from pagestream_streams.settings import StreamsSettings, settings_from_environment

__all__ = [
    "Append",
    "AppendKind",
    "AppendOutcome",
    "Broker",
    "Claim",
    "DigestMismatch",
    "EmbeddedRedis",
    "EngineSession",
    "GatewaySession",
    "IdempotencyConflict",
    "LogsFull",
    "ModelInUse",
    "ModelInfo",
    "ModelNameRefused",
    "ModelNotFound",
    "OffsetOutOfRange",
    "QuarantinedRequest",
    "QueueFull",
    "RequestNotFound",
    "RequestPage",
    "RequestSummary",
    "RequestView",
    "RequestsUnfinished",
    "ServerBinary",
    "ServerNotFound",
    "StorageFull",
    "StreamsError",
    "StreamsSettings",
    "Sweeper",
    "Unavailable",
    "enlist",
    "expire_engine",
    "find_server",
    "list_requests",
    "server_command",
    "settings_from_environment",
    "unpublish",
]
