"""An outage of Redis for ten seconds under load: accepted requests finish, no lease expires, no process restarts."""

import asyncio
import time
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from pagestream.v1.inference_pb2_grpc import InferenceStub
from support.clients.stream_clients import GrpcReader, Outcome
from support.faults.workloads import NUM_TOKENS, chat_request, mixed_requests
from support.processes.stack import Stack, running_stack

pytestmark = pytest.mark.timeout(180)

OUTAGE_S = 10.0
BEFORE = 10


async def run_through_outage(stack: Stack) -> list[Outcome]:
    target = stack.gateways[0].grpc_target
    readers = [GrpcReader([target]) for _ in mixed_requests()]
    tasks = [
        asyncio.create_task(reader.run(request)) for reader, request in zip(readers, mixed_requests(), strict=True)
    ]
    while min(reader.outcome.num_tokens for reader in readers) < BEFORE:
        await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
    stack.redis.kill()
    end = time.monotonic() + OUTAGE_S
    await expect_unavailable(stack)
    await asyncio.sleep(max(0.0, end - time.monotonic()))  # the outage's length is what is tested
    stack.redis.start()
    return list(await asyncio.gather(*tasks))


async def expect_unavailable(stack: Stack) -> None:
    gateway = stack.gateways[0]
    async with grpc.aio.insecure_channel(gateway.grpc_target) as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(chat_request(0), timeout=OUTAGE_S):
                pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with httpx.AsyncClient(timeout=OUTAGE_S) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        response = await client.post(f"{gateway.url}/v1/completions", json=body)
    assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert response.json()["error"]["message"]


def test_accepted_requests_finish_and_no_engine_is_taken_for_dead(tmp_path: Path) -> None:
    with running_stack(tmp_path, engines=2) as stack:
        undisturbed = asyncio.run(_undisturbed(stack))
        pids = [part.process.pid for part in stack.parts if part.process and part is not stack.redis]
        disturbed = asyncio.run(run_through_outage(stack))
        assert [part.process.pid for part in stack.parts if part.process and part is not stack.redis] == pids
        assert all(part.is_alive() for part in stack.parts)
        attempts = [_attempts(stack, outcome.request_id) for outcome in disturbed]
        # New requests are served as before.
        [again] = asyncio.run(_run(stack, 1))

    assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
    assert attempts == [1] * len(disturbed), "a request was taken from a living engine"
    assert again.num_tokens == NUM_TOKENS


async def _run(stack: Stack, count: int) -> list[Outcome]:
    readers = [GrpcReader([stack.gateways[0].grpc_target]) for _ in range(count)]
    return list(await asyncio.gather(*(r.run(q) for r, q in zip(readers, mixed_requests()[:count], strict=True))))


async def _undisturbed(stack: Stack) -> list[Outcome]:
    return await _run(stack, len(mixed_requests()))


def _attempts(stack: Stack, request_id: str) -> int:
    body = httpx.get(f"{stack.gateways[0].url}/v1/requests/{request_id}", timeout=5.0).json()
    attempts: int = body["attempts"]
    return attempts
