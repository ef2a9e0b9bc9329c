"""Accepting: idempotent, bounded exactly, one tenant's own, once for an idempotency key; lists; and discarding."""

import asyncio
import dataclasses
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pagestream.v1.inference_pb2 import (
    ON_DISCONNECT_CANCEL,
    ON_DISCONNECT_CONTINUE,
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
    OnDisconnect,
)
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import (
    Broker,
    Claim,
    GatewaySession,
    IdempotencyConflict,
    LogsFull,
    ModelNotFound,
    QueueFull,
    RequestNotFound,
    Unavailable,
    discard_request,
    enlist,
    list_requests,
)
from pagestream_streams.protocol import Keyspace, parse_request_id
from support.protocol.token_streams import CALM, MODEL, TENANT, card, eventually, numbers, read_all, spec, worker
from support.redis.topologies import Place, ask_all, find_keys

pytestmark = pytest.mark.served


async def queued(broker: Broker, partition: int = 0, name: str = "0") -> int:
    return int(await broker.connection.execute("XLEN", f"ps:{{{MODEL}/{partition}}}:queue:{name}"))


async def read_with(gateway: GatewaySession, request: RequestSpec) -> None:
    async for _ in gateway.read(request.request_id, tenant=TENANT, spec=request):
        pass


async def test_accept_is_idempotent_by_id(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        await gateway.accept(request)
        assert await queued(broker) == 1
        [claim] = await engine.claim()
        await gateway.accept(request)
        assert await queued(broker) == 0
        assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_RUNNING
        await engine.generate(claim, 2, finish=True)
        await gateway.accept(request)
        assert numbers(await read_all(gateway, request.request_id)) == [100, 101]


async def test_another_tenants_id_is_not_found(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec()
        await gateway.accept(request)
        stolen = spec()
        stolen.request_id, stolen.tenant = request.request_id, "somebody else"
        with pytest.raises(RequestNotFound):
            await gateway.accept(stolen)
        assert await broker.spec(request.request_id, TENANT) == request
        assert await queued(broker) == 1


async def test_accepted_spec_is_kept_whole(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec(n=3, prompt=range(50), priority=2)
        await gateway.accept(request)
        assert await broker.spec(request.request_id, TENANT) == request


class TestBoundedExactly:
    async def test_in_requests_for_each_class_and_partition(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_requests=3)
        async with await Broker.connect(redis_url, bounded) as narrow, GatewaySession(narrow) as gateway:
            for _ in range(3):
                await gateway.accept(spec())
            with pytest.raises(QueueFull) as caught:
                await gateway.accept(spec())
            assert (caught.value.limit, caught.value.bound, caught.value.queued) == ("requests", 3, 3)
            assert caught.value.retry_after_s > 0
            await gateway.accept(spec(partition=1))
            await gateway.accept(spec(priority=1))
            assert await queued(broker) == 3

    async def test_in_prompt_tokens(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_prompt_tokens=10)
        async with await Broker.connect(redis_url, bounded) as narrow, GatewaySession(narrow) as gateway:
            await gateway.accept(spec(prompt=range(6)))
            with pytest.raises(QueueFull, match="prompt tokens"):
                await gateway.accept(spec(prompt=range(5)))
            await gateway.accept(spec(prompt=range(4)))
            with pytest.raises(QueueFull):
                await gateway.accept(spec(prompt=range(1)))

    async def test_room_comes_back_by_claim_and_by_cancel(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_requests=2, max_queued_prompt_tokens=6)
        async with (
            await Broker.connect(redis_url, bounded) as narrow,
            GatewaySession(narrow) as gateway,
            worker(narrow) as engine,
        ):
            first, second = spec(), spec()
            await gateway.accept(first)
            await gateway.accept(second)
            await broker.cancel(first.request_id, TENANT)
            await broker.cancel(first.request_id, TENANT)
            await gateway.accept(spec())
            with pytest.raises(QueueFull):
                await gateway.accept(spec())
            await engine.claim(2)
            await gateway.accept(spec())
            await gateway.accept(spec())
            with pytest.raises(QueueFull) as caught:
                await gateway.accept(spec())
            assert caught.value.retry_after_s < CALM.retry_after_max_s

    async def test_what_is_handed_back_is_exempt(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_requests=1)
        async with (
            await Broker.connect(redis_url, bounded) as narrow,
            GatewaySession(narrow) as gateway,
            worker(narrow) as engine,
        ):
            await gateway.accept(spec())
            [claim] = await engine.claim()
            await gateway.accept(spec())
            await engine.session.hand_back([claim.request_id])
            assert (await queued(broker), await queued(broker, name="resume")) == (1, 1)

    async def test_many_at_once(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_requests=10)
        async with await Broker.connect(redis_url, bounded) as narrow, GatewaySession(narrow) as gateway:
            results = await asyncio.gather(*(gateway.accept(spec()) for _ in range(40)), return_exceptions=True)
            assert sum(result is True for result in results) == 10
            assert all(result is True or isinstance(result, QueueFull) for result in results)


class TestTenants:
    async def test_another_tenant_s_request_does_not_exist(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            request = spec()
            await gateway.accept(request)
            for ask in (broker.view, broker.spec, broker.cancel):
                with pytest.raises(RequestNotFound):
                    await ask(request.request_id, "tenant-b")
            with pytest.raises(RequestNotFound):
                await anext(aiter(gateway.read(request.request_id, tenant="tenant-b")))
            assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

    @pytest.mark.parametrize("request_id", ["", "x", "00000000-0000-" + "0" * 32, "../../etc", "{}", "A" * 10_000])
    async def test_malformed_and_unknown_ids_don_t_exist(self, broker: Broker, request_id: str) -> None:
        async with GatewaySession(broker) as gateway:
            with pytest.raises(RequestNotFound):
                await broker.view(request_id, TENANT)
            with pytest.raises(RequestNotFound):
                await broker.cancel(request_id, TENANT)
            with pytest.raises(RequestNotFound):
                await anext(aiter(gateway.read(request_id, tenant=TENANT)))


class TestIdempotencyKey:
    async def test_a_retry_joins(self, broker: Broker) -> None:
        async with GatewaySession(broker) as one, GatewaySession(broker) as other:
            first = await one.accept_once(spec(key="k"), body_digest="d")
            assert await other.accept_once(spec(key="k"), body_digest="d") == first
            assert await queued(broker) == 1

    async def test_another_body_is_refused(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            await gateway.accept_once(spec(key="k"), body_digest="d")
            with pytest.raises(IdempotencyConflict):
                await gateway.accept_once(spec(key="k"), body_digest="e")

    async def test_keys_are_each_tenant_s_own(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            first = await gateway.accept_once(spec(key="k"), body_digest="d")
            other = await gateway.accept_once(spec(key="k", tenant="tenant-b"), body_digest="e")
            assert other.request_id != first.request_id

    async def test_a_half_done_accept_is_completed(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gone, GatewaySession(broker) as gateway:
            reserved = spec(key="k")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gone.acceptor, "accept", AsyncMock(side_effect=Unavailable("it has died")))
                with pytest.raises(Unavailable):
                    await gone.accept_once(reserved, body_digest="d")
            running = await gateway.accept_once(spec(key="k"), body_digest="d")
            assert running.request_id == reserved.request_id
            assert (await broker.view(reserved.request_id, TENANT)).state == REQUEST_STATE_QUEUED

    async def test_a_refused_request_frees_its_key(self, redis_url: str, broker: Broker) -> None:
        bounded = dataclasses.replace(CALM, max_queued_requests=1)
        async with await Broker.connect(redis_url, bounded) as narrow, GatewaySession(narrow) as gateway:
            first = spec()
            await gateway.accept(first)
            with pytest.raises(QueueFull):
                await gateway.accept_once(spec(key="k"), body_digest="d")
            await narrow.cancel(first.request_id, TENANT)
            other = spec(key="k", prompt=[1])
            assert await gateway.accept_once(other, body_digest="e") == other

    async def test_a_refusal_leaves_a_key_under_which_another_try_runs(self, broker: Broker) -> None:
        """The queue has room again between the refusal of one try and the freeing of its key."""
        async with GatewaySession(broker) as refused, GatewaySession(broker) as quick:
            late, soon = spec(key="k"), spec(key="k")

            async def refuse(_: RequestSpec, **_options: Any) -> bool:
                await quick.accept_once(soon, body_digest="d")
                raise QueueFull(limit="requests", bound=1, queued=1, retry_after_s=1.0)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(refused.acceptor, "accept", refuse)
                with pytest.raises(QueueFull):
                    await refused.accept_once(late, body_digest="d")
            running = await refused.accept_once(spec(key="k"), body_digest="d")
            assert running.request_id == late.request_id
            assert await queued(broker) == 1

    async def test_a_refusal_leaves_a_key_whose_tries_are_unknown(self, redis_url: str, broker: Broker) -> None:
        """A version without them reserved it; Redis has lost the record, and its reader accepts it again."""
        bounded = dataclasses.replace(CALM, max_queued_requests=1)
        async with (
            GatewaySession(broker) as gateway,
            await Broker.connect(redis_url, bounded) as narrow,
            GatewaySession(narrow) as other,
        ):
            first = await gateway.accept_once(spec(key="k"), body_digest="d")
            await broker.connection.execute("DEL", f"{Keyspace().reservation(TENANT, 'k')}tries")
            where = await broker.directory.locate(first.request_id)
            await broker.connection.execute("DEL", where.request(first.request_id))
            for _ in range(2):
                with pytest.raises(QueueFull):
                    await other.accept_once(spec(key="k"), body_digest="d")
            again = await gateway.accept_once(spec(key="k"), body_digest="d")
            assert again.request_id == first.request_id

    async def test_a_request_of_an_earlier_version_is_kept_as_long_as_its_key(
        self, redis_url: str, broker: Broker
    ) -> None:
        """It has no field for that until a retry joins it."""
        brief = dataclasses.replace(CALM, retention_s=2)
        async with (
            await Broker.connect(redis_url, brief) as short,
            GatewaySession(short) as gateway,
            worker(short) as engine,
        ):
            request = await gateway.accept_once(spec(key="k"), body_digest="d")
            where = await broker.directory.locate(request.request_id)
            record = where.request(request.request_id)
            await broker.connection.execute("HDEL", record, "kept")
            assert await gateway.accept_once(spec(key="k"), body_digest="d") == request
            [claim] = await engine.claim()
            await engine.generate(claim, 1, finish=True)
            key_ms = await broker.connection.execute("PTTL", broker.connection.keyspace.idempotency(TENANT, "k"))
            assert await broker.connection.execute("PTTL", record) >= key_ms > brief.retention_s * 1000

    async def test_a_tenant_s_limit_concerns_no_retry(self, redis_url: str, broker: Broker) -> None:
        """It was accepted where there was no limit yet."""
        limited = dataclasses.replace(CALM, tenant_log_bytes=1)
        async with (
            GatewaySession(broker) as gateway,
            await Broker.connect(redis_url, limited) as narrow,
            GatewaySession(narrow) as other,
        ):
            request = await gateway.accept_once(spec(key="k"), body_digest="d")
            for _ in range(2):
                assert await other.accept_once(spec(key="k"), body_digest="d") == request
            with pytest.raises(LogsFull):
                await other.accept_once(spec(key="other"), body_digest="d")
            assert await gateway.accept_once(spec(key="other"), body_digest="e"), "a refusal frees the key"

    @pytest.mark.parametrize("on_disconnect", [ON_DISCONNECT_CANCEL, ON_DISCONNECT_CONTINUE])
    async def test_a_retry_renews_the_record_with_the_key(
        self, redis_url: str, broker: Broker, on_disconnect: OnDisconnect
    ) -> None:
        brief = dataclasses.replace(CALM, retention_s=8)
        async with (
            await Broker.connect(redis_url, brief) as short,
            GatewaySession(short) as gateway,
            worker(short) as engine,
        ):
            request = await gateway.accept_once(spec(key="k", on_disconnect=on_disconnect), body_digest="d")
            [claim] = await engine.claim()
            await engine.generate(claim, 1, finish=True)
            where = await broker.directory.locate(request.request_id)
            kept = [where.request(request.request_id), where.log(request.request_id)]
            key = broker.connection.keyspace.idempotency(TENANT, "k")
            ages = [await broker.connection.execute("PTTL", each) for each in kept]
            assert min(ages) > brief.retention_s * 1000, "as long as its key"
            for each in kept:  # as if most of the time had passed
                await broker.connection.execute("PEXPIRE", each, 60_000)
            assert await gateway.accept_once(spec(key="k", on_disconnect=on_disconnect), body_digest="d") == request
            key_ms = await broker.connection.execute("PTTL", key)
            for each in kept:
                assert await broker.connection.execute("PTTL", each) >= key_ms - 100 > 1000

    async def test_who_reserved_and_came_second_tells_what_runs(self, broker: Broker) -> None:
        """Its own spec has another seed: asked again with that, the client would get other tokens."""
        async with GatewaySession(broker) as slow, GatewaySession(broker) as quick:
            late, soon = spec(key="k"), spec(key="k")
            late.sampling.seed, soon.sampling.seed = 111, 222
            accept = slow.accept

            async def accept_late(given: RequestSpec, **options: Any) -> bool:
                assert (await quick.accept_once(soon, body_digest="d")).sampling.seed == 222
                return await accept(given, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slow.acceptor, "accept", accept_late)
                running = await slow.accept_once(late, body_digest="d")
            assert (running.request_id, running.sampling.seed) == (late.request_id, 222)
            assert running == await broker.spec(late.request_id, TENANT)

    async def test_a_key_is_reserved_for_as_long_as_its_request_runs(self, redis_url: str, broker: Broker) -> None:
        settings = dataclasses.replace(CALM, retention_s=8)
        async with await Broker.connect(redis_url, settings) as brief, GatewaySession(brief) as gateway:
            first = await gateway.accept_once(spec(key="k"), body_digest="d")
            reader = asyncio.create_task(read_with(gateway, first))
            reserved = Keyspace().idempotency(TENANT, "k")
            tries = f"{Keyspace().reservation(TENANT, 'k')}tries"
            for name in (reserved, tries):
                assert await broker.connection.execute("PERSIST", name)

                async def is_renewed(name: str = name) -> bool:
                    return int(await broker.connection.execute("PTTL", name)) > settings.retention_s * 1000

                await eventually(is_renewed)
            assert await gateway.accept_once(spec(key="k"), body_digest="d") == first
            await brief.cancel(first.request_id, TENANT)
            await reader
            where = await broker.directory.locate(first.request_id)
            log_ms = await broker.connection.execute("PTTL", where.log(first.request_id))
            reserved_ms = await broker.connection.execute("PTTL", reserved)
            assert settings.retention_s * 1000 <= reserved_ms <= log_ms

    async def test_what_nobody_reads_keeps_its_key_for_a_day(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            await gateway.accept_once(spec(key="k", on_disconnect=ON_DISCONNECT_CONTINUE), body_digest="d")
            assert await broker.connection.execute("TTL", Keyspace().idempotency(TENANT, "k")) > 86_000

    async def test_a_discarded_request_frees_its_key(self, broker: Broker) -> None:
        """Else the key would outlive the record, and a try with it would bring the request back under its old id."""
        async with GatewaySession(broker) as gateway:
            first = await gateway.accept_once(spec(key="k"), body_digest="d")
            await discard_request(broker, first.request_id, TENANT)
            other = await gateway.accept_once(spec(key="k"), body_digest="e")
            assert other.request_id != first.request_id
            assert (await broker.view(first.request_id, TENANT)).is_discarded
            await discard_request(broker, first.request_id, TENANT)
            assert await gateway.accept_once(spec(key="k"), body_digest="e") == other, (
                "a late discard is of its own key"
            )

    async def test_a_key_that_outlives_a_discarded_request_is_free(self, broker: Broker) -> None:
        """A version that left it discarded the request, or the try reserved it just before."""
        async with GatewaySession(broker) as gateway:
            first = await gateway.accept_once(spec(key="k"), body_digest="d")
            key = Keyspace().idempotency(TENANT, "k")
            reserved = await broker.connection.execute("GET", key)
            await discard_request(broker, first.request_id, TENANT)
            await broker.connection.execute("SET", key, reserved)
            other = await gateway.accept_once(spec(key="k"), body_digest="d")
            assert other.request_id != first.request_id
            assert await gateway.accept_once(spec(key="k"), body_digest="d") == other

    async def test_many_at_once_are_one(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            tries = (gateway.accept_once(spec(key="k", partition=i % 2), body_digest="d") for i in range(20))
            assert len({each.request_id for each in await asyncio.gather(*tries)}) == 1
            assert await queued(broker) + await queued(broker, 1) == 1


class TestPlacement:
    async def test_what_an_engine_has_claimed_is_found_by_all_gateways_and_left_to_it(self, broker: Broker) -> None:
        """One of two engines steals a prompt; other gateways then place what goes on with it there, for longer."""
        prompt, more = [*range(7, 1000)], [*range(7, 1000), 1]
        async with (
            GatewaySession(broker) as first,
            GatewaySession(broker) as second,
            worker(broker) as one,
            worker(broker) as other,
        ):
            engines = [one.session, other.session]
            for each in engines:
                await each.lease.beat()
            await first.acceptor.engines.read([MODEL], 5.0)
            placed = parse_request_id(await first.place(MODEL, prompt, TENANT))
            assert placed is not None
            [thief] = [each for each in engines if placed.partition not in each.assignment.own]
            await first.accept(spec(partition=placed.partition, prompt=prompt))
            found: list[Claim] = []

            async def is_stolen() -> bool:
                found.extend(await thief.claim(max_requests=1, max_prompt_tokens=10_000))
                return bool(found)

            await eventually(is_stolen)
            await thief.lease.beat()
            await second.acceptor.engines.read([MODEL], 5.0)
            request_id = await second.place(MODEL, more, TENANT)
            follower = parse_request_id(request_id)
            assert follower is not None
            assert follower.partition in thief.assignment.own
            request = spec(partition=follower.partition, prompt=more)
            request.request_id = request_id
            await second.accept(request)
            where = await broker.directory.locate(request_id)
            queue = f"{where.prefix}queue:{request.priority}"
            [[_, fields]] = await broker.connection.execute("XRANGE", queue, "-", "+")
            assert int(fields[b"l"]) == 960 * CALM.steal_held_us // 1000

    async def test_a_refused_request_is_no_work_of_its_engine(self, redis_url: str) -> None:
        settings = dataclasses.replace(CALM, max_queued_requests=0)
        async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
            await broker.publish_model(card(), partitions=1)
            request = spec()
            request.request_id = await gateway.place(MODEL, range(1000), TENANT)
            with pytest.raises(QueueFull):
                await gateway.accept(request)
            assert gateway.acceptor.placer.queued.total() == 0

    async def test_unknown_model(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            with pytest.raises(ModelNotFound, match="nothing"):
                await gateway.place("nothing", [1], TENANT)


async def test_a_full_redis_is_unavailable_with_its_reason(broker: Broker, redis_server: Place) -> None:
    async with GatewaySession(broker) as gateway:
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", "1mb")
        request = spec()
        with pytest.raises(Unavailable, match="maxmemory"):
            await gateway.accept(request)
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", "0")
        with pytest.raises(RequestNotFound):
            await broker.view(request.request_id, TENANT)
        await gateway.accept(request)


async def test_a_lost_request_that_is_accepted_again_keeps_its_deadline(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec(deadline_ms=600_000)
        await gateway.accept(request)
        record = (await broker.directory.locate(request.request_id)).request(request.request_id)
        # As if most of the deadline had passed before the read begins.
        deadline = int(await broker.connection.execute("HINCRBY", record, "deadline", -500_000))
        gateway.readers.registrations.awaited.doubt(request.request_id)  # so that the read asks Redis for it
        reader = asyncio.create_task(read_with(gateway, request))
        await eventually(lambda: any(each.is_registered for each in gateway.readers.reads.of(request.request_id)))
        await broker.connection.execute("DEL", record)

        async def is_accepted_again() -> bool:
            state: bytes | None = await broker.connection.execute("HGET", record, "state")
            return state == b"queued"

        await eventually(is_accepted_again)
        again = int(await broker.connection.execute("HGET", record, "deadline"))
        assert abs(again - deadline) < 10_000, "not ten minutes from now"
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


# -- A discarded request: marked at once, gone soon, and read to its end by those who read it.


async def test_a_discarded_request_ends_and_expires(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 3)
        with pytest.raises(RequestNotFound):
            await discard_request(broker, request.request_id, "another")
        assert not (await broker.view(request.request_id, TENANT)).is_discarded
        for _ in range(2):
            await discard_request(broker, request.request_id, TENANT)
        assert (await broker.view(request.request_id, TENANT)).is_discarded
        where = await broker.directory.locate(request.request_id)
        for key in (f"{where.prefix}req:{request.request_id}", f"{where.prefix}log:{request.request_id}"):
            assert 0 < await broker.connection.execute("TTL", key) <= 60
        assert (await read_all(gateway, request.request_id))[-1].HasField("end")


async def test_a_retry_with_its_key_does_not_renew_what_was_discarded(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        first, retry = spec(key="k"), spec(key="k")
        await gateway.accept_once(first, body_digest="d")
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        await discard_request(broker, first.request_id, TENANT)
        assert await gateway.accept_once(retry, body_digest="d") == retry
        where = await broker.directory.locate(first.request_id)
        for key in (where.request(first.request_id), where.log(first.request_id)):
            assert 0 < await broker.connection.execute("TTL", key) <= 60


# -- The list of a tenant's requests: what it shows, its pages, its bounds.


async def accept(broker: Broker, gateway: GatewaySession, number: int) -> list[str]:
    """Accept and list so many requests; return their ids, newest first."""
    ids = []
    for _ in range(number):
        request = spec()
        await gateway.accept(request)
        await enlist(broker, request.request_id, TENANT)
        ids.append(request.request_id)
    return ids[::-1]


async def pages(broker: Broker, limit: int) -> list[str]:
    found: list[str] = []
    while True:
        page = await list_requests(broker, TENANT, limit=limit, after=found[-1] if found else "")
        found += [each.request_id for each in page.requests]
        if not page.has_more:
            return found
        assert len(page.requests) == limit


async def test_pages_show_each_request_once_with_its_state(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        [done] = await accept(broker, gateway, 1)
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        [running] = await accept(broker, gateway, 1)
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        queued = await accept(broker, gateway, 5)
        expected = [*queued, running, done]
        for limit in (1, 3, 7, 100):
            assert await pages(broker, limit) == expected
        shown = (await list_requests(broker, TENANT, limit=10)).requests
    states = [*[REQUEST_STATE_QUEUED] * 5, REQUEST_STATE_RUNNING, REQUEST_STATE_FINISHED]
    assert [each.state for each in shown] == states
    assert [(each.next_index, each.usage.completion_tokens) for each in shown[-2:]] == [(2, 2), (5, 3)]
    assert [each.accepted_at for each in shown] == sorted((each.accepted_at for each in shown), reverse=True)
    assert (await list_requests(broker, "tenant-b", limit=10)).requests == []


async def test_a_request_whose_record_has_expired_is_taken_out(broker: Broker) -> None:
    name = broker.connection.keyspace.requests(TENANT)
    async with GatewaySession(broker) as gateway:
        ids = await accept(broker, gateway, 5)
        for age, request_id in enumerate(ids[1::2]):
            where = await broker.directory.locate(request_id)
            await broker.connection.execute("DEL", where.request(request_id))
            await broker.connection.execute("ZADD", name, age + 1, request_id)  # an hour and more ago
        assert await pages(broker, 1) == ids[::2]
        with pytest.raises(RequestNotFound):
            await list_requests(broker, TENANT, limit=1, after=ids[1])
    assert await broker.connection.execute("ZCARD", name) == 3
    assert await broker.connection.execute("PTTL", name) > 0


async def test_a_lost_record_that_comes_back_is_shown_again(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        ids = await accept(broker, gateway, 3)
        record = (await broker.directory.locate(ids[1])).request(ids[1])
        await broker.connection.execute("RENAME", record, f"{record}:lost")
        for limit in (1, 2):
            assert await pages(broker, limit) == ids[::2]
        await broker.connection.execute("RENAME", f"{record}:lost", record)
        assert await pages(broker, 1) == ids


async def test_the_newest_are_kept(redis_url: str) -> None:
    async with (
        await Broker.connect(redis_url, replace(CALM, max_listed_requests=3)) as broker,
        GatewaySession(broker) as gateway,
    ):
        await broker.publish_model(card())
        ids = await accept(broker, gateway, 5)
        await enlist(broker, ids[1], TENANT)
        assert await pages(broker, 2) == ids[:3]


async def test_another_tenants_id_is_never_shown(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec()
        await gateway.accept(request)
        await enlist(broker, request.request_id, "tenant-b")
        assert (await list_requests(broker, "tenant-b", limit=5)).requests == []


# -- Two deployments of one model name on one Redis, told apart by their key prefix.


async def test_two_deployments_share_nothing(redis_url: str, redis_server: Place) -> None:
    blue, green = (replace(CALM, key_prefix=f"ns.{name}") for name in ("blue", "green"))
    async with await Broker.connect(redis_url, blue) as ours, await Broker.connect(redis_url, green) as theirs:
        await ours.publish_model(card(MODEL), partitions=1)
        assert await theirs.models() == []
        await theirs.publish_model(card(MODEL), partitions=1)
        async with worker(theirs) as other, GatewaySession(theirs) as far, GatewaySession(ours) as near:
            mine = spec(key="k")
            assert await near.accept_once(mine, body_digest="b") == mine
            # The same key, tenant and model there are another request, which an engine there runs first.
            their_own = spec(key="k")
            assert await far.accept_once(their_own, body_digest="other") == their_own
            [claim] = await other.claim()
            assert claim.request_id == their_own.request_id
            await other.generate(claim, 2, finish=True)
            assert await other.session.claim(max_requests=9, max_prompt_tokens=10**6) == []
            assert numbers(await read_all(far, their_own.request_id)) == [100, 101]
            with pytest.raises(RequestNotFound):
                await ours.view(their_own.request_id, TENANT)
            async with worker(ours) as engine:
                [claim] = await engine.claim()
                assert claim.request_id == mine.request_id
                await engine.generate(claim, 3, finish=True)
                assert numbers(await read_all(near, mine.request_id)) == [100, 101, 102]
    # Nothing lies outside the two prefixes, and the default one would have found none of it.
    assert not [key for key in find_keys(redis_server, "*") if not key.startswith((b"ns.blue:", b"ns.green:"))]
