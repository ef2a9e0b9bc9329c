"""Reading: any gateway, any offset, never spliced, bounded in memory."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP, TokenLogprobs
from pagestream.v1.records_pb2 import LogEntry, ModelCard
from pagestream_streams import Broker, DigestMismatch, GatewaySession, OffsetOutOfRange
from pagestream_streams.protocol import chained
from support.protocol.token_streams import (
    CALM,
    LIMIT_S,
    MODEL,
    TENANT,
    append_of,
    eventually,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Place, fresh

pytestmark = pytest.mark.served

COUNT = 12
SHARED_SERVER = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


class TestAnyGatewayAtAnyOffset:
    @given(offset=st.integers(0, COUNT + 2), appended=st.integers(0, COUNT), batch=st.integers(1, 5))
    @settings(max_examples=12, suppress_health_check=SHARED_SERVER)
    def test_the_rest_comes_once_and_in_order(
        self, redis_server: Place, offset: int, appended: int, batch: int
    ) -> None:
        """Whether it is in the log already, comes while reading, or both; the gateway is not the one that accepted."""

        async def run() -> None:
            quick = dataclasses.replace(CALM, read_batch=batch, buffer_bytes=500)
            async with await Broker.connect(fresh(redis_server), quick) as broker:
                await broker.publish_model(ModelCard(name=MODEL, max_model_len=10), partitions=2)
                async with GatewaySession(broker) as one, GatewaySession(broker) as other, worker(broker) as engine:
                    request = spec()
                    await one.accept(request)
                    [claim] = await engine.claim()
                    digest = await engine.generate(claim, appended)
                    reading = asyncio.create_task(read_all(other, request.request_id, offset))
                    rest = dataclasses.replace(claim, next_index=appended, digest=digest)
                    await engine.generate(rest, COUNT, finish=True)
                    whole = await read_all(one, request.request_id)
                    assert numbers(whole) == list(range(100, 100 + COUNT))
                    assert await reading == whole[offset:]

        asyncio.run(run())

    async def test_every_field_survives(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec(n=2)
            await gateway.accept(request)
            [claim] = await engine.claim()
            rich = LogEntry(choice=1, token_id=4_000_000_000, text="é\0\n🙂 ")
            rich.logprobs.CopyFrom(TokenLogprobs())
            rich.logprobs.entries.add(token_id=5, logprob=-0.25, rank=1, text="\x00ü")
            finish = LogEntry(choice=1, text="held back")
            finish.finish.reason, finish.finish.stop_reason = FINISH_REASON_STOP, "###"
            end = LogEntry()
            end.end.reason = FINISH_REASON_STOP
            end.end.usage.prompt_tokens, end.end.usage.completion_tokens, end.end.usage.cached_tokens = 3, 1, 2
            end.end.error.code, end.end.error.message = "engine_error", "it \0 broke"
            entries = chained("", [rich, finish, end])
            live = asyncio.create_task(read_all(gateway, request.request_id))
            await engine.session.append([append_of(claim, 0, entries)])
            assert await live == entries
            assert await read_all(gateway, request.request_id) == entries


class TestOffsets:
    async def test_past_a_finished_log_is_out_of_range(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            await engine.generate(claim, 2, finish=True)
            assert await read_all(gateway, request.request_id, 4) == []
            with pytest.raises(OffsetOutOfRange):
                await read_all(gateway, request.request_id, 5)

    async def test_past_an_unfinished_log_waits(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            within = asyncio.create_task(read_all(gateway, request.request_id, 4))
            beyond = asyncio.create_task(read_all(gateway, request.request_id, 50))
            digest = await engine.generate(claim, 3)
            assert not within.done()
            await engine.generate(dataclasses.replace(claim, next_index=3, digest=digest), 6, finish=True)
            assert numbers(await within) == [104, 105]
            with pytest.raises(OffsetOutOfRange):
                await beyond


class TestNeverSpliced:
    async def test_equal_digest_goes_on_and_another_is_data_loss(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            await engine.generate(claim, 5, finish=True)
            whole = await read_all(gateway, request.request_id)
            for index in range(1, len(whole) + 1):
                assert await read_all(gateway, request.request_id, index, whole[index - 1].digest) == whole[index:]
                with pytest.raises(DigestMismatch):
                    await read_all(gateway, request.request_id, index, "0" * 16)

    async def test_while_the_log_is_still_shorter_than_what_was_seen(self, broker: Broker) -> None:
        """After a loss the tokens are made again: the reader's digest is compared when the log gets there."""
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            seen = tokens([100, 101, 102])
            same = asyncio.create_task(read_all(gateway, request.request_id, 3, seen[-1].digest))
            other = asyncio.create_task(read_all(gateway, request.request_id, 3, "f" * 16))
            await engine.generate(claim, 5, finish=True)
            assert numbers(await same) == [103, 104]
            with pytest.raises(DigestMismatch):
                await other

    async def test_a_log_that_lost_entries_and_ended_before_what_was_read(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            reading = gateway.read(request.request_id, tenant=TENANT)
            await engine.generate(claim, 6)
            async with aclosing(reading):
                assert len(await anext(reading)) > 0
                shorter = tokens([100, 101])
                where = await broker.directory.locate(request.request_id)
                await broker.connection.execute("DEL", where.log(request.request_id))
                key = f"{where.prefix}req:{request.request_id}"
                await broker.connection.execute("HSET", key, "next", 2, "digest", shorter[-1].digest)
                await broker.cancel(request.request_id, TENANT)
                with pytest.raises(DigestMismatch):
                    await rest_of(reading)


async def rest_of(reading: AsyncIterator[list[LogEntry]]) -> list[LogEntry]:
    async with asyncio.timeout(LIMIT_S):
        return [entry async for batch in reading for entry in batch]


async def test_a_slow_reader_is_bounded_in_memory_and_holds_back_nobody(redis_url: str, broker: Broker) -> None:
    small = dataclasses.replace(CALM, buffer_bytes=600, read_batch=7)
    async with await Broker.connect(redis_url, small) as narrow, GatewaySession(narrow) as gateway:
        async with worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            slow: list[LogEntry] = []
            async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches, asyncio.timeout(LIMIT_S):
                digest = await engine.generate(claim, 1)
                slow += await anext(batches)
                quick = asyncio.create_task(read_all(gateway, request.request_id))
                rest = dataclasses.replace(claim, next_index=1, digest=digest)
                await engine.generate(rest, 60, finish=True)
                assert numbers(await quick) == list(range(100, 160))
                assert numbers(slow) == [100]
                async for batch in batches:
                    assert len(batch) <= 7
                    slow += batch
            assert slow == quick.result()


async def test_wake_ups_alone_carry_a_stream(redis_url: str, broker: Broker) -> None:
    """Nothing polls here, so that each token comes by its wake-up or not at all."""
    silent = dataclasses.replace(CALM, poll_ms=1_000_000)
    async with await Broker.connect(redis_url, silent) as narrow, GatewaySession(narrow) as gateway:
        async with worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches, asyncio.timeout(LIMIT_S):
                digest = await engine.generate(claim, 1)
                assert numbers(await anext(batches)) == [100]
                for index in range(1, 10):
                    [entry] = tokens([100 + index], digest)
                    following = asyncio.create_task(anext(batches))
                    await asyncio.sleep(0)
                    await engine.append(claim, index, [entry])
                    assert await following == [entry]
                    digest = entry.digest


async def test_the_log_alone_carries_a_stream(broker: Broker) -> None:
    """Every wake-up is lost: the reader's channel is another's."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        await eventually(lambda: bool(list(gateway.readers.reads)))
        await gateway.subscription.stop()
        await engine.generate(claim, 10, finish=True)
        assert numbers(await reading) == list(range(100, 110))
