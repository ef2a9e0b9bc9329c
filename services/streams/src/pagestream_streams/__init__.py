"""The durable token stream: requests and token logs in Redis."""

from pagestream_streams.broker import Broker, expire_engine
from pagestream_streams.embedded import EmbeddedRedis, ServerBinary, find_server, server_command
from pagestream_streams.engine_session import EngineSession
from pagestream_streams.environment import settings_from_environment
from pagestream_streams.errors import (
    DigestMismatch,
    IdempotencyConflict,
    ModelNameRefused,
    ModelNotFound,
    OffsetOutOfRange,
    QueueFull,
    RequestNotFound,
    ServerNotFound,
    StreamsError,
    Unavailable,
)
from pagestream_streams.gateway_session import GatewaySession
from pagestream_streams.records import Append, AppendKind, AppendOutcome, Claim, DeadRequest, ModelInfo, RequestView
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.sweeper import Sweeper

__all__ = [
    "Append",
    "AppendKind",
    "AppendOutcome",
    "Broker",
    "Claim",
    "DeadRequest",
    "DigestMismatch",
    "EmbeddedRedis",
    "EngineSession",
    "GatewaySession",
    "IdempotencyConflict",
    "ModelInfo",
    "ModelNameRefused",
    "ModelNotFound",
    "OffsetOutOfRange",
    "QueueFull",
    "RequestNotFound",
    "RequestView",
    "ServerBinary",
    "ServerNotFound",
    "StreamsError",
    "StreamsSettings",
    "Sweeper",
    "Unavailable",
    "expire_engine",
    "find_server",
    "server_command",
    "settings_from_environment",
]
