"""The public surface, pinned."""

import subprocess
import sys

import pagestream_client

EXPECTED = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "FinishReason",
    "Generation",
    "GenerationFailed",
    "IdempotencyConflict",
    "InvalidRequest",
    "Logprob",
    "ModelInfo",
    "ModelNotFound",
    "OffsetOutOfRange",
    "OnDisconnect",
    "PagestreamError",
    "Position",
    "Quarantined",
    "QueueFull",
    "Reconnection",
    "RequestError",
    "RequestInfo",
    "RequestNotFound",
    "RequestState",
    "SamplingOptions",
    "ServerError",
    "Stream",
    "StreamClosed",
    "Transport",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "put_together",
]


def test_exported_members() -> None:
    assert sorted(pagestream_client.__all__) == EXPECTED
    assert all(hasattr(pagestream_client, name) for name in EXPECTED)


def test_every_error_can_be_caught_as_one() -> None:
    errors = [getattr(pagestream_client, name) for name in EXPECTED]
    errors = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) == 15
    assert all(issubclass(each, pagestream_client.PagestreamError) for each in errors)


def test_nothing_but_the_wire_contract_and_grpc_is_loaded() -> None:
    code = "import pagestream_client, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert not packages & {"torch", "redis", "httpx", "numpy", "pagestream_streams", "pagestream_gateway"}
    assert "google.rpc" not in loaded.stdout.split()
