"""kill -9 of an engine under 32 streams: another one, or its successor, goes on, and no client can tell."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stack import Part, Stack, running_stack
from stream_clients import GrpcReader, Outcome
from workloads import NUM_TOKENS, mixed_requests

pytestmark = pytest.mark.timeout(180)

MIDDLE = NUM_TOKENS // 4


async def run_all(stack: Stack, *, disturb: Callable[[Sequence[GrpcReader]], object] | None = None) -> list[Outcome]:
    """Run the workload; `disturb` is called once every stream has a quarter of its tokens."""
    readers = [GrpcReader([gateway.grpc_target for gateway in stack.gateways]) for _ in mixed_requests()]
    tasks = [
        asyncio.create_task(reader.run(request)) for reader, request in zip(readers, mixed_requests(), strict=True)
    ]
    if disturb is not None:
        while min(reader.outcome.num_tokens for reader in readers) < MIDDLE:
            await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        await asyncio.to_thread(disturb, readers)
    return list(await asyncio.gather(*tasks))


def unfinished(readers: Sequence[GrpcReader]) -> int:
    return sum(reader.outcome.usage is None for reader in readers)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_streams_go_on_as_if_nothing_had_happened(tmp_path: Path, num_engines: int) -> None:
    with running_stack(tmp_path, engines=num_engines) as stack:
        undisturbed = asyncio.run(run_all(stack))
        open_streams = []

        def kill_first_engine(readers: Sequence[GrpcReader]) -> None:
            victim: Part = stack.engines[0]
            victim.kill()
            open_streams.append(unfinished(readers))
            if num_engines == 1:
                victim.start()

        disturbed = asyncio.run(run_all(stack, disturb=kill_first_engine))

    assert open_streams[0] > 0, "the engine was killed after the streams had ended"
    assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
    assert all(outcome.num_tokens == NUM_TOKENS for outcome in disturbed)
    assert not any(outcome.reconnects for outcome in disturbed), "the gateway should have kept every stream open"
