"""Engines under 32 streams: Redis is away for ten seconds, an engine is drained, paused past its lease, killed.

One stack serves all tests, and each test's streams are compared with those of one undisturbed run.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import grpc.aio
import httpx
import pytest
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_client import AsyncClient, Reconnection
from support.clients.readers import Content, Reader, question
from support.processes.part import Part, StackError
from support.processes.stack import Stack, running_stack
from support.processes.waiting import wait_until
from support.redis.servers import wait_written

pytestmark = pytest.mark.served

OUTAGE_S = 10.0
NUM_STREAMS, NUM_TOKENS = 16, 160
MIDDLE = NUM_TOKENS // 4
UNBROKEN = Reconnection(limit_s=0.0)
Contents = list[Content]
Disturbance = Callable[[Sequence[Reader]], object]


async def run_all(
    stack: Stack, disturb: Disturbance | None = None, *, reconnection: Reconnection | None = None
) -> list[Reader]:
    """Run the streams; `disturb` is called once half of the requests have a quarter of their tokens in their logs, and
    are not finished. StackError where that never was so.
    """
    readers = [Reader() for _ in range(NUM_STREAMS)]
    targets = [gateway.grpc_target for gateway in stack.gateways]
    async with AsyncClient(targets, reconnection=reconnection) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reader.read(client, "demo", **question(number, NUM_TOKENS)))
            for number, reader in enumerate(readers)
        ]
        if disturb is not None:
            while not await asyncio.to_thread(_are_under_way, stack):
                if all(task.done() for task in tasks):
                    raise StackError("the streams ended before half of them were seen in their middle")
                await asyncio.sleep(0.02)
            await asyncio.to_thread(disturb, readers)
    return readers


def _are_under_way(stack: Stack) -> bool:
    lengths = [length for owned in stack.log_lengths().values() for length in owned.values()]
    return sum(length >= MIDDLE for length in lengths) >= NUM_STREAMS // 2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), engines=2, is_forked=True) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """Two engines: one that the test before has ended is started again."""
    for engine in running.engines:
        if not engine.is_alive():
            start_again(engine)
    return running


@pytest.fixture(scope="module")
def undisturbed(running: Stack) -> Contents:
    return contents(asyncio.run(run_all(running)))


def contents(readers: Sequence[Reader]) -> Contents:
    return [reader.content() for reader in readers]


def start_again(engine: Part) -> None:
    """Start an engine with an empty log, and wait until it is ready."""
    engine.log.unlink()
    engine.start()
    wait_until(engine.has_said_ready, what=engine.name)


def test_no_engine_is_taken_for_dead_while_redis_is_away(stack: Stack, undisturbed: Contents) -> None:
    """Accepted requests finish, no lease expires, no process restarts."""
    others = [part for part in stack.parts if part is not stack.redis]
    pids = [part.pid for part in others]

    def kill_redis(_: Sequence[Reader]) -> None:
        end = time.monotonic() + OUTAGE_S
        wait_written(stack.redis_url)
        stack.redis.kill()
        asyncio.run(expect_unavailable(stack))
        time.sleep(max(0.0, end - time.monotonic()))  # the outage's length is what is tested
        stack.redis.start()

    disturbed = asyncio.run(run_all(stack, kill_redis))
    assert contents(disturbed) == undisturbed
    assert [part.pid for part in others] == pids
    assert all(part.is_alive() for part in stack.parts)
    assert attempts(stack, disturbed) == [1] * len(disturbed), "a request was taken from a living engine"


async def expect_unavailable(stack: Stack) -> None:
    gateway = stack.gateways[0]
    async with grpc.aio.insecure_channel(gateway.grpc_target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in InferenceStub(channel).Generate(
                pb.GenerateRequest(model="demo", prompt="x"), timeout=OUTAGE_S
            ):
                pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with httpx.AsyncClient(timeout=OUTAGE_S) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        response = await client.post(f"{gateway.url}/v1/completions", json=body)
    assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert response.json()["error"]["message"]


def attempts(stack: Stack, outcomes: Sequence[Reader]) -> list[int]:
    with grpc.insecure_channel(stack.gateways[0].grpc_target) as channel:
        stub = InferenceStub(channel)
        return [stub.GetRequest(pb.GetRequestRequest(request_id=each.request_id)).attempts for each in outcomes]


def test_an_engine_hands_back_and_another_continues(stack: Stack, undisturbed: Contents) -> None:
    left: list[Part] = []

    def drain(_: Sequence[Reader]) -> None:
        drained = stack.busiest_engine()
        left.append(drained)
        drained.signal(signal.SIGTERM)
        assert drained.wait() == 0

    disturbed = asyncio.run(run_all(stack, drain))
    handed_back = [line for line in left[0].log_tail().splitlines() if "handed back" in line]
    assert handed_back
    # The log has what it held at SIGTERM; after its exit the other engine may have finished everything already.
    assert "handed back 0" not in handed_back[0]
    assert contents(disturbed) == undisturbed


def test_a_zombie_writes_nothing_and_serves_again(stack: Stack, undisturbed: Contents) -> None:
    """SIGSTOP past its lease, then SIGCONT: another engine has continued, and the resumed one can't write.

    At the end it is the only engine, and is killed: its successor continues.
    """
    paused: list[Part] = []

    def pause(_: Sequence[Reader]) -> None:
        paused.append(stack.busiest_engine())
        paused[0].signal(signal.SIGSTOP)

    disturbed = asyncio.run(run_all(stack, pause))
    assert contents(disturbed) == undisturbed

    zombie = paused[0]
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: "dropped" in zombie.log_tail(), what="the zombie to drop what it had")
    for other in stack.engines:
        if other is not zombie:
            other.stop()
    open_streams: list[int] = []

    def kill(readers: Sequence[Reader]) -> None:
        zombie.kill()
        open_streams.append(sum(not reader.has_ended for reader in readers))
        zombie.start()

    # The gateway keeps every stream open: none is to be resumed.
    again = asyncio.run(run_all(stack, kill, reconnection=UNBROKEN))
    assert open_streams[0] > 0, "the engine was killed after the streams had ended"
    assert contents(again) == undisturbed
    assert all(reader.num_tokens == NUM_TOKENS for reader in again)
