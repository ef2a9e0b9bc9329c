"""A worker that ends while all others have another fingerprint: it finishes what has tokens, for a limited time."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, StreamsSettings
from support.engines.arithmetic_worker import (
    LIMIT_S,
    TENANT,
    GatedRunner,
    SlowRunner,
    accepted,
    expected,
    read,
    running_worker,
    tokens,
)
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

PROMPTS = [[number, *range(1, 12)] for number in range(1, 5)]
LONG = 400
SETTINGS = dataclasses.replace(StreamsSettings(), fingerprint_grace_ms=300)


async def begun(broker: Broker, gateway: GatewaySession, *, max_tokens: int) -> list[RequestSpec]:
    """Accept requests, and wait until each has some tokens."""
    specs = [await accepted(gateway, prompt, max_tokens=max_tokens) for prompt in PROMPTS]
    for spec in specs:
        for _ in range(int(LIMIT_S / 0.01)):
            if (await broker.view(spec.request_id, TENANT)).next_index > 3:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail(f"{spec.request_id} has no tokens after {LIMIT_S:.0f} s")
    return specs


async def attempts(broker: Broker, specs: list[RequestSpec]) -> list[int]:
    return [(await broker.view(spec.request_id, TENANT)).attempts for spec in specs]


def check(logs: list[list[LogEntry]], max_tokens: int) -> None:
    for prompt, log in zip(PROMPTS, logs, strict=True):
        assert tokens(log) == expected(prompt, max_tokens)


@pytest.mark.parametrize(("other", "wanted"), [("another", 1), ("one", 2), ("", 2)])
async def test_it_finishes_only_where_no_other_engine_has_its_fingerprint(
    redis_url: str, tmp_path: Path, other: str, wanted: int
) -> None:
    async with await Broker.connect(redis_url, SETTINGS) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, fingerprint="one", finish_timeout_s=LIMIT_S) as old:
            specs = await begun(broker, gateway, max_tokens=LONG)
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            async with running_worker(broker, tmp_path, fingerprint=other) as new:
                old.stop.set()
                later = await accepted(gateway, PROMPTS[0])
                assert tokens(await read(gateway, later)) == expected(PROMPTS[0])
                logs = await asyncio.gather(*readings)
                async with asyncio.timeout(LIMIT_S):
                    await old.task
                assert await attempts(broker, specs) == [wanted] * len(specs)
                # The old one may have had a claim under way when it was told to end, and hands back what that took.
                [num_later] = await attempts(broker, [later])
                assert num_later in {1, 2}
                await new.end()
    check(logs, LONG)


@pytest.mark.parametrize(
    "pause_s", [0.0, *(pytest.param(pause, marks=pytest.mark.slow) for pause in (0.005, 0.05, 0.5))]
)
async def test_engines_of_one_fingerprint_that_end_together_leave_nothing_to_others(
    redis_url: str, tmp_path: Path, pause_s: float
) -> None:
    """Also where the last one has no room when the first hands back."""
    long_grace = dataclasses.replace(SETTINGS, fingerprint_grace_ms=60_000)
    options = {"fingerprint": "one", "finish_timeout_s": LIMIT_S, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    async with await Broker.connect(redis_url, long_grace) as broker, GatewaySession(broker) as gateway:
        async with (
            running_worker(broker, tmp_path, SlowRunner, **options) as first,  # type: ignore[arg-type]
            running_worker(broker, tmp_path, SlowRunner, **options) as last,  # type: ignore[arg-type]
        ):
            specs = await begun(broker, gateway, max_tokens=LONG)
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            async with running_worker(broker, tmp_path, fingerprint="another") as new:
                first.stop.set()
                await asyncio.sleep(pause_s)
                last.stop.set()
                logs = await asyncio.gather(*readings)
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.gather(first.task, last.task)
                views = [await broker.view(spec.request_id, TENANT) for spec in specs]
                assert {view.fingerprint for view in views} == {"one"}
                await new.end()
    check(logs, LONG)


async def test_requests_without_tokens_go_to_the_new_numerics(redis_url: str, tmp_path: Path) -> None:
    """The first step of such a request ends after the engine has handed it back."""
    long_grace = dataclasses.replace(SETTINGS, fingerprint_grace_ms=60_000)
    GatedRunner.gate.clear()
    async with await Broker.connect(redis_url, long_grace) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, GatedRunner, fingerprint="one", finish_timeout_s=LIMIT_S) as old:
            try:
                spec = await accepted(gateway, PROMPTS[0])
                await eventually(lambda: old.worker.load()["running"] == 1)
                reading = asyncio.create_task(read(gateway, spec))
                async with running_worker(broker, tmp_path, fingerprint="another") as new:
                    old.stop.set()
                    log = await reading
                    view = await broker.view(spec.request_id, TENANT)
                    GatedRunner.gate.set()
                    await new.end()
                    async with asyncio.timeout(LIMIT_S):
                        await old.task
            finally:
                GatedRunner.gate.set()
    assert view.fingerprint == "another"
    assert tokens(log) == expected(PROMPTS[0])


async def test_it_hands_back_after_finish_timeout_s(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url, SETTINGS) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, fingerprint="one", finish_timeout_s=0.1) as old:
            specs = await begun(broker, gateway, max_tokens=LONG)
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            async with running_worker(broker, tmp_path, fingerprint="another") as new:
                await old.end()
                logs = await asyncio.gather(*readings)
                assert await attempts(broker, specs) == [2] * len(specs)
                await new.end()
    check(logs, LONG)


async def test_the_only_engine_hands_back_at_once(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url, SETTINGS) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, fingerprint="one", finish_timeout_s=LIMIT_S) as old:
            specs = await begun(broker, gateway, max_tokens=LONG)
            await old.end()
            views = [await broker.view(spec.request_id, TENANT) for spec in specs]
    assert all(3 < view.next_index < LONG for view in views)
