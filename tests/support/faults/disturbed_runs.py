"""Runs the fault tests' workload on a stack while a fault is injected into it."""

import asyncio
from collections.abc import Callable, Sequence

from support.clients.stream_clients import GrpcReader, Outcome
from support.faults.workloads import NUM_STREAMS, NUM_TOKENS, mixed_requests
from support.processes.part import StackError
from support.processes.stack import Stack

MIDDLE = NUM_TOKENS // 4


async def run_all(stack: Stack, *, disturb: Callable[[Sequence[GrpcReader]], object] | None = None) -> list[Outcome]:
    """Run the workload; `disturb` is called once half of the requests have a quarter of their tokens in their logs, and
    are not finished. StackError where that never was so.
    """
    readers = [GrpcReader([gateway.grpc_target for gateway in stack.gateways]) for _ in mixed_requests()]
    tasks = [
        asyncio.create_task(reader.run(request)) for reader, request in zip(readers, mixed_requests(), strict=True)
    ]
    if disturb is not None:
        while not await asyncio.to_thread(_are_under_way, stack):
            await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
            if all(task.done() for task in tasks):
                raise StackError("the streams ended before half of them were seen in their middle")
            for task in tasks:
                if task.done():
                    task.result()
        await asyncio.to_thread(disturb, readers)
    return list(await asyncio.gather(*tasks))


def _are_under_way(stack: Stack) -> bool:
    lengths = [length for owned in stack.log_lengths().values() for length in owned.values()]
    return sum(length >= MIDDLE for length in lengths) >= NUM_STREAMS // 2


def unfinished(readers: Sequence[GrpcReader]) -> int:
    """Return how many streams have not ended."""
    return sum(reader.outcome.usage is None for reader in readers)
