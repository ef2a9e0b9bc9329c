"""SIGKILL of a gateway: clients that reconnect with Last-Event-ID miss nothing and get nothing twice."""

import asyncio
from pathlib import Path

import pytest
from support.clients.stream_clients import SseReader
from support.faults.workloads import QUESTIONS
from support.processes.stack import Gateway, Stack, running_stack

pytestmark = pytest.mark.timeout(120)

NUM_STREAMS = 8
EVENTS_BEFORE = 20


def body(number: int) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": 200,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def run_all(stack: Stack, *, victim: Gateway | None = None, restart: bool = False) -> list[SseReader]:
    readers = [SseReader([gateway.url for gateway in stack.gateways]) for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(reader.run(body(number))) for number, reader in enumerate(readers)]
    if victim is not None:
        while min(len(reader.indices) for reader in readers) < EVENTS_BEFORE:
            done, _ = await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.to_thread(victim.kill)
        if restart:
            victim.start()
    return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("num_gateways", [1, 2], ids=["restarted", "another one"])
def test_clients_reconnect_and_miss_nothing(tmp_path: Path, num_gateways: int) -> None:
    with running_stack(tmp_path, gateways=num_gateways) as stack:
        undisturbed = asyncio.run(run_all(stack))
        disturbed = asyncio.run(run_all(stack, victim=stack.gateways[0], restart=num_gateways == 1))

    assert any(reader.reconnects for reader in disturbed), "no stream met the kill"
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert (after.text, after.finish_reason, after.usage) == (before.text, before.finish_reason, before.usage)
        assert after.indices == sorted(after.indices)
        assert after.position.split("/")[1:] == before.position.split("/")[1:]
