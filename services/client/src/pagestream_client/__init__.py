"""The Python client of Pagestream: one unbroken token stream from any of several gateways."""

from pagestream_client.chunks import Chunk, FinishReason, Logprob, RequestError, Usage
from pagestream_client.errors import (
    DataLoss,
    DeadlineExceeded,
    GenerationFailed,
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    OffsetOutOfRange,
    PagestreamError,
    Position,
    Quarantined,
    QueueFull,
    RequestNotFound,
    ServerError,
    StreamClosed,
    Unauthenticated,
    Unavailable,
)
from pagestream_client.generations import Choice, Generation, put_together
from pagestream_client.grpc.async_client import AsyncClient, AsyncStream
from pagestream_client.grpc.client import Client, Stream
from pagestream_client.grpc.transport import Transport
from pagestream_client.requests import OnDisconnect, SamplingOptions
from pagestream_client.settings import Reconnection
from pagestream_client.views import (
    Embeddings,
    ModelInfo,
    RequestInfo,
    RequestState,
    Scores,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "Embeddings",
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
    "Scores",
    "ServerError",
    "Stream",
    "StreamClosed",
    "Transport",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "put_together",
]
