"""A rolling upgrade: engines and gateways of an earlier commit and of this one share a Redis.

The two compute under different fingerprints: an earlier engine finishes what it has begun, requests without tokens
cross in both directions, and each side's gateway reads what the other side's engine writes.
"""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from support.clients.stream_clients import GrpcReader, Outcome
from support.faults.workloads import chat_request
from support.processes.earlier import EarlierSources
from support.processes.part import Part
from support.processes.stack import DEMO_MODEL, START_LIMIT_S, Gateway, Stack
from support.processes.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

EARLIER = "b916991639ddcf2827f78f78c2917f5dc9eee928"
"""The last commit before the packages were divided: engine and worker in one package, streams without folders."""
OPTIONS = ("--dtype", "float32", "--max-num-seqs", "64")
THREADS = {"OMP_NUM_THREADS": "1"}
FINISHES = {**THREADS, "PAGESTREAM_WORKER__FINISH_TIMEOUT_S": "60"}
LONG = 600
SHORT = 40


@pytest.fixture
def earlier(tmp_path: Path) -> EarlierSources:
    return EarlierSources(EARLIER, tmp_path / "earlier")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    running = Stack(tmp_path / "stack", model=DEMO_MODEL, engine_options=OPTIONS, is_forked=True)
    running.redis.start()
    try:
        yield running
    except Exception as error:
        for part in running.parts:
            error.add_note(f"--- {part.name}\n{part.log_tail()}")
        raise
    finally:
        running.stop()


def start_all(readers: Sequence[GrpcReader], *, max_tokens: int) -> list[asyncio.Task[Outcome]]:
    requests = [chat_request(number, max_tokens=max_tokens) for number in range(len(readers))]
    return [asyncio.create_task(reader.run(each)) for reader, each in zip(readers, requests, strict=True)]


async def run_through(gateway: Gateway, count: int, *, max_tokens: int = SHORT) -> list[Outcome]:
    tasks = start_all([GrpcReader([gateway.grpc_target]) for _ in range(count)], max_tokens=max_tokens)
    return list(await asyncio.gather(*tasks))


async def until_begun(readers: Sequence[GrpcReader], tasks: Sequence[asyncio.Task[Outcome]]) -> None:
    while min(reader.outcome.num_tokens for reader in readers) < SHORT:
        done, _ = await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


def attempts(gateway: Gateway, outcomes: Sequence[Outcome]) -> list[int]:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = InferenceStub(channel)
        return [stub.GetRequest(pb.GetRequestRequest(request_id=each.request_id)).attempts for each in outcomes]


def claimed(engine: Part, outcomes: Sequence[Outcome]) -> int:
    lines = [line for line in engine.log.read_text(errors="replace").splitlines() if '"claimed"' in line]
    return sum(any(f'"{each.request_id}"' in line for line in lines) for each in outcomes)


def test_begun_streams_end_on_the_earlier_engine_and_others_cross(stack: Stack, earlier: EarlierSources) -> None:
    asyncio.run(_upgrade(stack, earlier))


async def _upgrade(stack: Stack, earlier: EarlierSources) -> None:
    old_engine = earlier.add_engine(stack, DEMO_MODEL, OPTIONS, FINISHES)
    old_gateway = earlier.add_gateway(stack)
    new_gateway = stack.add_gateway()
    await asyncio.to_thread(stack.wait_ready)
    undisturbed = await run_through(old_gateway, 8, max_tokens=LONG)

    # Requests that this commit's gateway accepts run on the earlier engine, and come back the same.
    crossed = await run_through(new_gateway, 4)
    assert claimed(old_engine, crossed) == len(crossed)

    targets = [old_gateway.grpc_target, new_gateway.grpc_target]
    readers = [GrpcReader(targets) for _ in undisturbed]
    tasks = start_all(readers, max_tokens=LONG)
    await until_begun(readers, tasks)
    new_engine = stack.add_engine()
    await asyncio.to_thread(wait_until, new_engine.has_said_ready, limit_s=START_LIMIT_S, what=new_engine.name)
    assert not any(task.done() for task in tasks)

    # The rollout ends the earlier pods: what they have begun ends there, what comes now runs on this commit's engine.
    old_engine.signal(signal.SIGTERM)
    later = await run_through(old_gateway, 4)
    assert claimed(new_engine, later) == len(later)
    old_gateway.signal(signal.SIGTERM)
    outcomes = await asyncio.gather(*tasks)

    assert [outcome.content() for outcome in outcomes] == [outcome.content() for outcome in undisturbed]
    assert attempts(new_gateway, outcomes) == [1] * len(outcomes)
    assert claimed(new_engine, outcomes) == 0
    assert await asyncio.to_thread(old_engine.wait) == 0
    assert await asyncio.to_thread(old_gateway.wait) == 0
    # The same request through either commit's processes has the same tokens: the arithmetic has not changed.
    assert [each.content() for each in later] == [each.content() for each in crossed]


def test_begun_streams_cross_when_their_fingerprint_is_gone(
    stack: Stack, earlier: EarlierSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, the earlier engine can't finish: its streams wait for the grace, then go on at this commit's engine."""
    monkeypatch.setenv("PAGESTREAM_BROKER__FINGERPRINT_GRACE_MS", "2000")
    asyncio.run(_lose_the_earlier_engine(stack, earlier))


async def _lose_the_earlier_engine(stack: Stack, earlier: EarlierSources) -> None:
    old_engine = earlier.add_engine(stack, DEMO_MODEL, OPTIONS, THREADS)
    gateway = stack.add_gateway()
    await asyncio.to_thread(stack.wait_ready)
    readers = [GrpcReader([gateway.grpc_target]) for _ in range(4)]
    tasks = start_all(readers, max_tokens=LONG)
    await until_begun(readers, tasks)
    old_engine.kill()
    new_engine = stack.add_engine()
    await asyncio.to_thread(wait_until, new_engine.has_said_ready, limit_s=START_LIMIT_S, what=new_engine.name)
    outcomes = await asyncio.gather(*tasks)
    assert claimed(new_engine, outcomes) == len(outcomes)
    assert attempts(gateway, outcomes) == [2] * len(outcomes)
    assert [outcome.num_tokens for outcome in outcomes] == [LONG] * len(outcomes)
