"""The public surface, pinned."""

import pagestream_streams

EXPECTED = [
    "AdapterRefused",
    "Append",
    "AppendKind",
    "AppendOutcome",
    "Broker",
    "Claim",
    "ClassRefused",
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


def test_exported_members() -> None:
    assert sorted(pagestream_streams.__all__) == EXPECTED
    assert all(hasattr(pagestream_streams, name) for name in EXPECTED)
