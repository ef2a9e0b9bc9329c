"""Runs the fault tests' workload on a stack while a fault is injected into it."""

import asyncio
from collections.abc import Callable, Sequence

from support.clients.stream_clients import GrpcReader, Outcome
from support.faults.workloads import NUM_TOKENS, mixed_requests
from support.processes.stack import Stack

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
    """Return how many streams have not ended."""
    return len(open_ids(readers))


def open_ids(readers: Sequence[GrpcReader]) -> list[str]:
    """Return the ids of the streams that have not ended."""
    return [reader.outcome.request_id for reader in readers if reader.outcome.usage is None]
