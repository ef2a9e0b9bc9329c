"""What a tenant's logs may take in Redis, what they take, and that retention gives it back."""

import asyncio
import dataclasses
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, GatewaySession, LogsFull, QueueFull, list_requests
from pagestream_streams.gateway import most_bytes
from pagestream_streams.protocol import Partition
from support.protocol.token_streams import (
    CALM,
    MODEL,
    TENANT,
    append_of,
    card,
    ending,
    eventually,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Place, find_keys

pytestmark = pytest.mark.served

NUM_TOKENS = 50


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reservation may be looked up at any time."""
    monkeypatch.setattr(sys.modules[most_bytes.__module__], "LOOK_UP_AFTER_S", 0.0)
    monkeypatch.setattr(sys.modules[most_bytes.__module__], "LOOK_UP_AGAIN_S", 0.0)


def request(partition: int = 0, tenant: str = TENANT) -> RequestSpec:
    made = spec(partition=partition, tenant=tenant)
    made.sampling.max_tokens = NUM_TOKENS
    return made


EACH = most_bytes(request())
LOOK_UP_AFTER_S = 15.0
"""After which reservations are looked up."""


@pytest.fixture
async def narrow(redis_url: str) -> AsyncIterator[Broker]:
    """Has room for four requests that run."""
    settings = dataclasses.replace(CALM, tenant_log_bytes=4 * EACH, tenant_log_limits={"rich": 100 * EACH})
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        yield broker


async def held(broker: Broker, tenant: str = TENANT) -> int:
    prefix = broker.connection.keyspace.tenant_logs(tenant)
    # At one moment: what has ended is settled in the background.
    both = "return {redis.call('GET', KEYS[1]), redis.call('HVALS', KEYS[2])}"
    found, values = await broker.connection.execute("EVAL", both, 2, f"{prefix}held", f"{prefix}bytes")
    assert int(found or 0) == sum(map(int, values)), "the sum is wrong"
    return int(found or 0)


async def actual(broker: Broker, request_id: str) -> int:
    where = await broker.directory.locate(request_id)
    sizes = [
        await broker.connection.execute("MEMORY", "USAGE", key, "SAMPLES", 0)
        for key in (where.request(request_id), where.log(request_id))
    ]
    return sum(size or 0 for size in sizes)


async def test_a_tenant_is_refused_by_its_own_limit_alone(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway:
        accepted = [request(partition % 2) for partition in range(4)]
        for each in accepted:
            await gateway.accept(each)
        with pytest.raises(LogsFull, match=f"{4 * EACH} of the at most {4 * EACH} bytes") as refused:
            await gateway.accept(request())
        assert 0 < (refused.value.retry_after_s or 0) <= CALM.retry_after_max_s
        assert await gateway.accept(accepted[0]) is False, "what is accepted can be repeated"
        await gateway.accept(request(tenant="other"))
        for _ in range(8):
            await gateway.accept(request(tenant="rich"))
        assert await held(narrow) == 4 * EACH


async def test_what_can_never_fit_is_refused_without_a_time(narrow: Broker) -> None:
    large = request()
    large.sampling.n = 100
    async with GatewaySession(narrow) as gateway:
        with pytest.raises(LogsFull, match="fewer max_tokens") as refused:
            await gateway.accept(large)
    assert refused.value.retry_after_s is None
    assert await held(narrow) == 0


async def test_an_end_gives_back_what_was_not_written(narrow: Broker) -> None:
    """The gateway that reads the end does it; a request that nobody reads is looked up."""
    async with GatewaySession(narrow) as gateway, worker(narrow) as engine:
        read, unread = request(0), request(1)
        for each in (read, unread):
            await gateway.accept(each)
        for claim in await engine.claim(2):
            await engine.generate(claim, 3, finish=True)
        await read_all(gateway, read.request_id)
        exact = await actual(narrow, read.request_id)

        async def is_settled() -> bool:
            return await held(narrow) == exact + EACH

        await eventually(is_settled)
        assert exact < EACH


async def test_a_large_record_counts_whole(narrow: Broker) -> None:
    """One field of a record may be a thousand times as large as the others."""
    async with GatewaySession(narrow) as gateway, worker(narrow) as engine:
        total = 0
        for _ in range(8):
            large = request(tenant="rich")
            large.prompts[0].ids[:] = range(70_000, 75_000)
            await gateway.accept(large)
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            gateway.quota.note_ended("rich", large.request_id)
            total += await actual(narrow, large.request_id)
        await gateway.quota.settle_ended()
        assert await held(narrow, "rich") == pytest.approx(total, rel=0.03)
        assert total > 8 * 15_000


async def test_a_refused_request_keeps_nothing(redis_url: str) -> None:
    settings = dataclasses.replace(CALM, tenant_log_bytes=100 * EACH, max_queued_requests=1)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(MODEL), partitions=1)
        await gateway.accept(request())
        with pytest.raises(QueueFull):
            await gateway.accept(request())
        assert await held(broker) == EACH


async def test_an_expired_log_makes_room(redis_url: str, looks_at_once: None) -> None:
    settings = dataclasses.replace(CALM, tenant_log_bytes=EACH + 100, retention_s=1)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(MODEL), partitions=1)
        first = request()
        await gateway.accept(first)
        await broker.cancel(first.request_id, TENANT)

        async def fits() -> bool:
            try:
                return await gateway.accept(request())
            except LogsFull:
                return False

        await eventually(fits)
        assert await held(broker) == EACH


async def test_a_log_that_retries_renew_keeps_its_place(redis_url: str) -> None:
    """Else its tenant would keep any number of logs."""
    settings = dataclasses.replace(CALM, tenant_log_bytes=EACH + 100, retention_s=2)
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            first, retry = request(), request()
            first.idempotency_key = retry.idempotency_key = "k"
            await gateway.accept_once(first, body_digest="d")
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            await read_all(gateway, first.request_id)
            await gateway.quota.settle_ended()
            prefix = broker.connection.keyspace.tenant_logs(TENANT)
            exact = await actual(broker, first.request_id)
            await broker.connection.execute("ZADD", f"{prefix}kept", 1, first.request_id)  # as if its time had come
            await gateway.accept_once(retry, body_digest="d")
            await gateway.quota.settle_ended()
            with pytest.raises(LogsFull):
                await gateway.accept(request())
            assert await held(broker) == exact
            await broker.connection.execute("ZADD", f"{prefix}kept", 1, first.request_id)
            small = request()
            small.sampling.max_tokens = 1
            await gateway.accept(small)  # takes out what has expired
            await gateway.accept_once(retry, body_digest="d")
            await gateway.quota.settle_ended()
            assert await held(broker) == exact + most_bytes(small), "counted again"


async def test_a_refused_try_leaves_what_another_one_uses(redis_url: str) -> None:
    settings = dataclasses.replace(CALM, tenant_log_bytes=100 * EACH, max_queued_requests=1)
    async with (
        await Broker.connect(redis_url, settings) as broker,
        GatewaySession(broker) as slow,
        GatewaySession(broker) as quick,
    ):
        await broker.publish_model(card(MODEL), partitions=1)
        filler, shared = request(), request()
        await quick.accept(filler)
        write = slow.acceptor.write

        async def accept_late(*arguments: Any, **named: Any) -> bool:
            with pytest.raises(QueueFull):
                await quick.accept(shared)
            await broker.cancel(filler.request_id, TENANT)
            return await write(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slow.acceptor, "write", accept_late)
            assert await slow.accept(shared)
        for gateway in (slow, quick):
            await gateway.quota.settle_ended()
        assert await held(broker) == await actual(broker, filler.request_id) + EACH


@pytest.mark.parametrize("deadline_ms", [0, 50])
async def test_what_ends_unread_makes_room_at_once(redis_url: str, deadline_ms: int) -> None:
    """Cancelled, or past its deadline; without the looks that find what other processes have ended."""
    settings = dataclasses.replace(CALM, tenant_log_bytes=EACH + 8192)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(MODEL), partitions=1)
        first = request()
        first.deadline_ms = deadline_ms
        await gateway.accept(first)
        if not deadline_ms:
            with pytest.raises(LogsFull) as refused:
                await gateway.accept(request())
            assert (refused.value.retry_after_s or 0) <= LOOK_UP_AFTER_S, "then it is looked up"
            await broker.cancel(first.request_id, TENANT)

        async def fits() -> bool:
            try:
                return await gateway.accept(request())
            except LogsFull:
                return False

        await eventually(fits, LOOK_UP_AFTER_S / 2)


async def test_a_lost_request_is_reserved_and_listed_again(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway, worker(narrow) as engine:
        lost = request()
        where = await narrow.directory.locate(lost.request_id)
        await gateway.accept(lost)
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        seen = 0

        async def read() -> None:
            nonlocal seen
            async for batch in gateway.read(lost.request_id, tenant=TENANT, spec=lost):
                seen += len(batch)

        reading = asyncio.create_task(read())
        await eventually(lambda: seen == 2)
        prefix = narrow.connection.keyspace.tenant_logs(TENANT)
        beside = [f"{prefix}{name}" for name in ("bytes", "held", "open")]
        for key in (*beside, where.request(lost.request_id), where.log(lost.request_id)):
            await narrow.connection.execute("DEL", key)

        async def is_back() -> bool:
            listed = (await list_requests(narrow, TENANT, limit=5)).requests
            return [each.request_id for each in listed] == [lost.request_id]

        await eventually(is_back)
        assert await held(narrow) == EACH
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        await reading


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_ends_and_deaths(narrow: Broker, looks_at_once: None, seed: int) -> None:
    """Gateways die between a reservation and its accept. In the end the reservations are what the logs take."""
    chance = random.Random(seed)
    running: list[str] = []
    ended: list[str] = []
    num_refused = 0
    async with GatewaySession(narrow) as gateway, worker(narrow) as engine:
        for _ in range(60):
            made = request(chance.randrange(2))
            act = chance.choice(["accept", "accept", "die", "end", "cancel", "read"])
            try:
                if act == "accept":
                    await gateway.accept(made)
                    running.append(made.request_id)
                elif act == "die":
                    await gateway.quota.reserve(made)
            except LogsFull:
                num_refused += 1
                assert sum([await actual(narrow, each) for each in ended]) + len(running) * EACH > 3 * EACH
            if act == "end" and running:
                [claim] = await engine.claim()
                await engine.generate(claim, chance.randrange(1, NUM_TOKENS), finish=True)
                running.remove(claim.request_id)
                ended.append(claim.request_id)
            elif act == "cancel" and running:
                victim = running.pop(chance.randrange(len(running)))
                await narrow.cancel(victim, TENANT)
                ended.append(victim)
            elif act == "read" and ended:
                await read_all(gateway, chance.choice(ended))
            assert await held(narrow) <= 4 * EACH
        assert num_refused
        for each in running:
            await narrow.cancel(each, TENANT)
        large = request()
        large.sampling.max_tokens = 4 * (NUM_TOKENS - 1)
        for _ in range(2):  # nothing is due twice in one try
            with pytest.raises(LogsFull):
                await gateway.accept(large)
        assert await held(narrow) == sum([await actual(narrow, each) for each in (*ended, *running)])


# -- What a request and a token take of Redis' memory, and that retention gives it back.


HERE = Partition(MODEL, 0)
TOKENS = 2000
MOST_BYTES_A_TOKEN = 64
MOST_BYTES_A_REQUEST = 4096  # without its prompt, which is two to three bytes a token more


async def usage(broker: Broker, key: str) -> int:
    return int(await broker.connection.execute("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)


async def test_a_token_and_a_request_are_small(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        record = await usage(broker, f"{HERE.prefix}req:{request.request_id}")
        assert 0 < record < MOST_BYTES_A_REQUEST
        [claim] = await engine.claim()
        digest = ""
        for first in range(0, TOKENS, 100):
            entries = tokens(range(100 + first, 200 + first), digest)
            digest = entries[-1].digest
            await engine.session.append([append_of(claim, first, entries)])
        log = await usage(broker, HERE.log(request.request_id))
        print(f"{record} bytes a request, {log / TOKENS:.1f} bytes a token")
        assert log / TOKENS < MOST_BYTES_A_TOKEN


async def test_retention_gives_everything_back(redis_url: str, redis_server: Place) -> None:
    short = dataclasses.replace(CALM, retention_s=1)
    async with await Broker.connect(redis_url, short) as broker:
        await broker.publish_model(card(), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            entries = tokens([100])
            entries += ending(entries[-1].digest, count=1)
            await engine.session.append([append_of(claim, 0, entries)])

            await eventually(lambda: not find_keys(redis_server, f"*{request.request_id}*"))
            members = find_keys(redis_server, f"{HERE.prefix}*")
            for key in members:
                assert request.request_id.encode() not in await broker.connection.execute("DUMP", key)
