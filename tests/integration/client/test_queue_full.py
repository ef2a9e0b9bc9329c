"""A full queue, in the words of a gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_client import AsyncClient, QueueFull, Reconnection
from pagestream_gateway.grpc.status import abort
from pagestream_gateway.problems import problem_of
from pagestream_streams import QueueFull as QueueIsFull

ID = "2a97516c-0000-0123456789abcdef0123456789abcdef"
LIMIT_S = 30.0


class FullServer:
    """Says that the queue is full so many times, as a gateway does, and then answers."""

    def __init__(self, times: int, retry_after_s: float) -> None:
        self.times = times
        self.retry_after_s = retry_after_s
        self.requests: list[api.GenerateRequest] = []
        self.arrivals: list[float] = []

    async def generate(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        self.requests.append(api.GenerateRequest.FromString(data))
        self.arrivals.append(asyncio.get_running_loop().time())
        if len(self.requests) <= self.times:
            full = QueueIsFull(limit="requests", bound=1, queued=1, retry_after_s=self.retry_after_s)
            await abort(context, problem_of(full))
        yield api.GenerateResponse(chunk=api.TokenChunk(request_id=ID), seed=1).SerializeToString()
        chunk = api.TokenChunk(request_id=ID, next_index=1, usage=api.Usage())
        yield api.GenerateResponse(chunk=chunk).SerializeToString()


@asynccontextmanager
async def serving(full: FullServer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(full.generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("pagestream.v1.Inference", {"Generate": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_it_is_waited_for_as_long_as_the_gateway_asks() -> None:
    full = FullServer(times=2, retry_after_s=0.3)
    async with serving(full) as target, asyncio.timeout(LIMIT_S), AsyncClient(target) as client:
        answer = await client.generate("demo", "hello").collect()
    assert answer.request_id == ID
    gaps = [later - earlier for earlier, later in zip(full.arrivals, full.arrivals[1:], strict=False)]
    assert len(gaps) == 2
    assert all(gap >= 0.3 for gap in gaps)
    assert full.requests[0] == full.requests[1] == full.requests[2]


async def test_a_longer_wait_than_the_limit_is_told() -> None:
    full = FullServer(times=1, retry_after_s=90.0)
    async with serving(full) as target, asyncio.timeout(LIMIT_S), AsyncClient(target) as client:
        with pytest.raises(QueueFull, match="1 of at most 1 requests") as caught:
            await client.generate("demo", "hello").collect()
    assert caught.value.retry_after_s == 90.0
    async with serving(full) as target, asyncio.timeout(LIMIT_S):
        patient = AsyncClient(target, reconnection=Reconnection(limit_s=1.0))
        async with patient:
            assert (await patient.generate("demo", "hello").collect()).request_id == ID
