"""The durable token stream: requests and token logs in Redis.

Names are imported when they are used: the protocol's constants can be read without redis-py.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_streams.admin.broker import (
        Broker,
        RequestPage,
        discard_request,
        enlist,
        expire_engine,
        list_requests,
    )
    from pagestream_streams.admin.sweeper import Sweeper, unpublish
    from pagestream_streams.connection.embedded import EmbeddedRedis, ServerBinary, find_server, server_command
    from pagestream_streams.engine.session import EngineSession
    from pagestream_streams.errors import (
        AdapterRefused,
        ClassRefused,
        DataFolderRefused,
        DigestMismatch,
        IdempotencyConflict,
        KnownPoison,
        LogsFull,
        ModelInUse,
        ModelNameRefused,
        ModelNotFound,
        OffsetOutOfRange,
        PartitionGone,
        QueueFull,
        RateLimited,
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
    "AdapterRefused",
    "Append",
    "AppendKind",
    "AppendOutcome",
    "Broker",
    "Claim",
    "ClassRefused",
    "DataFolderRefused",
    "DigestMismatch",
    "EmbeddedRedis",
    "EngineSession",
    "GatewaySession",
    "IdempotencyConflict",
    "KnownPoison",
    "LogsFull",
    "ModelInUse",
    "ModelInfo",
    "ModelNameRefused",
    "ModelNotFound",
    "OffsetOutOfRange",
    "PartitionGone",
    "QuarantinedRequest",
    "QueueFull",
    "RateLimited",
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
    "discard_request",
    "enlist",
    "expire_engine",
    "find_server",
    "list_requests",
    "server_command",
    "settings_from_environment",
    "unpublish",
]

_MODULES = {
    **dict.fromkeys(
        ("Broker", "RequestPage", "discard_request", "enlist", "expire_engine", "list_requests"), "admin.broker"
    ),
    "Sweeper": "admin.sweeper",
    "unpublish": "admin.sweeper",
    **dict.fromkeys(("EmbeddedRedis", "ServerBinary", "find_server", "server_command"), "connection.embedded"),
    "EngineSession": "engine.session",
    **dict.fromkeys(
        (
            "AdapterRefused",
            "ClassRefused",
            "DataFolderRefused",
            "DigestMismatch",
            "IdempotencyConflict",
            "KnownPoison",
            "LogsFull",
            "ModelInUse",
            "ModelNameRefused",
            "ModelNotFound",
            "OffsetOutOfRange",
            "PartitionGone",
            "QueueFull",
            "RateLimited",
            "RequestNotFound",
            "RequestsUnfinished",
            "ServerNotFound",
            "StorageFull",
            "StreamsError",
            "Unavailable",
        ),
        "errors",
    ),
    "GatewaySession": "gateway.session",
    **dict.fromkeys(
        (
            "Append",
            "AppendKind",
            "AppendOutcome",
            "Claim",
            "ModelInfo",
            "QuarantinedRequest",
            "RequestSummary",
            "RequestView",
        ),
        "protocol.records",
    ),
    **dict.fromkeys(("StreamsSettings", "settings_from_environment"), "settings"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
