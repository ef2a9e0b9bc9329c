"""What tenants may use, over gateways, engines and their deaths; and that what they used is counted once."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import pytest
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, GatewaySession, QueueFull, RateLimited, expire_engine
from pagestream_streams.limits import admission
from pagestream_streams.limits.usage import read_usage, tenants_with_usage
from pagestream_streams.rates import NO_LIMITS, Limits, Rate
from support.protocol.token_streams import FAST, MODEL, TENANT, card, eventually, read_all, spec, worker
from support.redis.topologies import Place, find_keys

PROMPT, OUTPUT = 3, 50


@dataclasses.dataclass(frozen=True)
class Book:
    """Limits of tenants and of credentials."""

    tenants: Mapping[str, Limits]
    credentials: Mapping[str, Limits] = dataclasses.field(default_factory=dict)

    def of(self, tenant: str, credential: str) -> tuple[Limits, Limits]:
        return self.tenants.get(tenant, NO_LIMITS), self.credentials.get(credential, NO_LIMITS)


def book(**limits: int) -> Book:
    return Book({TENANT: Limits(**limits)})


def request(partition: int = 0, *, credential: str = "", key: str = "", deadline_ms: int = 0) -> RequestSpec:
    made = spec(partition=partition, key=key, deadline_ms=deadline_ms)
    made.sampling.max_tokens = OUTPUT
    made.credential = credential
    return made


async def used(broker: Broker) -> tuple[int, int, int]:
    """Requests, prompt tokens and output tokens of all tenants."""
    rows = await read_usage(broker, since_s=7200)
    return (
        sum(each.requests for each in rows),
        sum(each.prompt_tokens for each in rows),
        sum(each.output_tokens for each in rows),
    )


@pytest.fixture
async def others(redis_url: str, broker: Broker) -> AsyncIterator[Broker]:
    """Another process' connection."""
    async with await Broker.connect(redis_url, FAST) as found:
        yield found


async def refused(gateway: GatewaySession, made: RequestSpec) -> RateLimited | None:
    try:
        await gateway.accept(made)
    except RateLimited as error:
        return error
    return None


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"requests_per_minute": 7}, 7),
        ({"tokens_per_minute": 5 * (PROMPT + OUTPUT) + 1}, 5),
        ({"tokens_per_day": 4 * (PROMPT + OUTPUT)}, 4),
        ({"concurrent_requests": 6}, 6),
        ({"queued_tokens": 3 * PROMPT + 1}, 3),
    ],
)
async def test_racing_gateways_never_accept_more(
    broker: Broker, others: Broker, limits: dict[str, int], most: int
) -> None:
    async with (
        GatewaySession(broker, limits=book(**limits)) as one,
        GatewaySession(others, limits=book(**limits)) as two,
    ):
        made = [request(number % 2) for number in range(40)]
        found = await asyncio.gather(*(refused((one, two)[number // 2 % 2], each) for number, each in enumerate(made)))
        errors = [each for each in found if each is not None]
        assert len(made) - len(errors) == most
        assert {each.rate.name for each in errors} == set(limits)
        assert all((each.retry_after_s or 0) > 0 for each in errors)
        again = await refused(one, next(each for each, error in zip(made, found, strict=True) if error is None))
        assert again is None, "what is accepted can be repeated"


async def test_tenant_and_credential_must_both_admit(broker: Broker) -> None:
    limits = Book({TENANT: Limits(requests_per_minute=5)}, {"a": Limits(requests_per_minute=2)})
    seen: list[Rate] = []
    async with GatewaySession(broker, limits=limits) as gateway:
        for _ in range(2):
            await gateway.accept(request(credential="a"), on_rates=seen.extend)
        error = await refused(gateway, request(credential="a"))
        assert error is not None
        assert error.rate.scope == "credential"
        assert [await refused(gateway, request(credential=name)) for name in "bcd"] == [None] * 3
        error = await refused(gateway, request(credential="e"))
        assert error is not None
        assert (error.rate.scope, error.rate.used) == ("tenant", 5)
    last = {each.scope: (each.limit, each.remaining) for each in seen[-2:]}
    assert last == {"tenant": (5, 3), "credential": (2, 0)}


@pytest.mark.parametrize("end", ["finished", "cancelled", "late", "lost", "dead gateway"])
async def test_whatever_ends_a_request_makes_room(
    broker: Broker, others: Broker, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """At once, on any gateway: before anything is refused, what runs is looked up."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(GatewaySession(broker, limits=book(concurrent_requests=1)))
        two = await stack.enter_async_context(GatewaySession(others, limits=book(concurrent_requests=1)))
        first = request(deadline_ms=100 if end == "late" else 0)
        if end == "dead gateway":
            assert await one.admissions.admit(first, one.acceptor.demand(first, is_length_given=True))
        else:
            await one.accept(first)
        assert await refused(two, request(1)) is not None
        if end == "finished":
            engine = await stack.enter_async_context(worker(broker))
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
        elif end == "cancelled":
            await broker.cancel(first.request_id, TENANT)
        elif end == "lost":
            where = await broker.directory.locate(first.request_id)
            await broker.connection.execute("DEL", where.request(first.request_id))
        if end in ("lost", "dead gateway"):
            assert await refused(two, request(1)) is not None, "its accept may be under way"
            monkeypatch.setattr(admission, "ACCEPT_S", 0.0)
        if end == "late":
            await eventually(lambda: has_ended(broker, first.request_id))
        assert await refused(two, request(1)) is None
        assert await refused(one, request(1)) is not None


async def has_ended(broker: Broker, request_id: str) -> bool:
    where = await broker.directory.locate(request_id)
    found: bytes | None = await broker.connection.execute("HGET", where.request(request_id), "state")
    return found == b"finished"


async def test_a_claimed_prompt_is_not_queued(broker: Broker) -> None:
    async with GatewaySession(broker, limits=book(queued_tokens=PROMPT)) as gateway, worker(broker) as engine:
        await gateway.accept(request())
        assert await refused(gateway, request(1)) is not None
        await engine.claim()
        assert await refused(gateway, request(1)) is None


async def test_what_is_refused_elsewhere_counts_not(redis_url: str) -> None:
    settings = dataclasses.replace(FAST, max_queued_requests=1)
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        seen: list[Rate] = []
        async with GatewaySession(broker, limits=book(requests_per_minute=3)) as gateway:
            await gateway.accept(request())
            for _ in range(5):
                with pytest.raises(QueueFull):
                    await gateway.accept(request(), on_rates=seen.extend)
    assert {each.used for each in seen} == {2}


async def test_joins_and_lost_requests_count_once(broker: Broker) -> None:
    async with GatewaySession(broker, limits=book(requests_per_minute=2)) as gateway, worker(broker) as engine:
        first, retry = request(key="k"), request(key="k")
        for each in (first, retry, request(key="k")):
            found = await gateway.accept_once(each, body_digest="d")
            assert found.request_id == first.request_id
        where = await broker.directory.locate(first.request_id)
        for name in (where.request(first.request_id), where.prefix + "queue:0"):
            await broker.connection.execute("DEL", name)
        assert await gateway.accept(first), "Redis has lost it"
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        await eventually(lambda: counts(broker, (1, PROMPT, 3)))
        assert await gateway.accept(first) is False
        assert await refused(gateway, request()) is None
        assert await refused(gateway, request()) is not None


async def counts(broker: Broker, expected: tuple[int, int, int]) -> bool:
    return await used(broker) == expected


async def test_an_end_that_is_looked_up_before_it_is_counted_is_settled(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals look up what runs, several times between the end of a long answer and its count."""
    monkeypatch.setattr(admission, "ACCEPT_S", 0.0)
    limits = book(tokens_per_minute=100 * (PROMPT + OUTPUT), concurrent_requests=1)
    seen: list[Rate] = []
    async with GatewaySession(broker, limits=limits) as gateway, worker(broker) as engine:
        await gateway.ends.timer.stop()
        await gateway.accept(request())
        [claim] = await engine.claim()
        await engine.generate(claim, 4, finish=True)
        second = request()
        assert await refused(gateway, second) is None
        assert await refused(gateway, request()) is not None
        await broker.cancel(second.request_id, TENANT)
        await gateway.ends.count_partition(await broker.directory.locate(second.request_id))
        await gateway.accept(request(), on_rates=seen.extend)
    [used_tokens] = [each.used for each in seen if each.name == "tokens_per_minute"]
    assert used_tokens == PROMPT + 4 + PROMPT + OUTPUT


async def test_what_was_not_used_is_given_back_and_what_was_more_counts(broker: Broker) -> None:
    limits = book(tokens_per_minute=2 * (PROMPT + OUTPUT))
    async with GatewaySession(broker, limits=limits) as gateway, worker(broker) as engine:
        for _ in range(2):
            await gateway.accept(request())
        assert await refused(gateway, request()) is not None
        for claim in await engine.claim(2):
            await engine.generate(claim, 4, finish=True)
        await eventually(lambda: counts(broker, (2, 2 * PROMPT, 8)))
        unnamed, seen = request(), list[Rate]()
        unnamed.sampling.max_tokens = OUTPUT - 8
        await gateway.accept(unnamed, is_length_given=False, on_rates=seen.extend)
        assert seen[-1].used == 2 * (PROMPT + 4) + PROMPT + OUTPUT - 8
        [claim] = await engine.claim()
        await engine.generate(claim, OUTPUT + 20, finish=True)
        await eventually(lambda: counts(broker, (3, 3 * PROMPT, 8 + OUTPUT + 20)))
        error = await refused(gateway, request())
        assert error is not None
        assert error.rate.used == 3 * PROMPT + 8 + OUTPUT + 20


async def test_candidates_that_are_not_put_out_count(broker: Broker) -> None:
    """They are reserved, and counted by the tokens of those that are."""
    limits = book(tokens_per_minute=8 * (PROMPT + 5 * OUTPUT))
    async with GatewaySession(broker, limits=limits) as gateway, worker(broker) as engine:
        seen: list[Rate] = []
        made = request()
        made.sampling.best_of = 5
        await gateway.accept(made, on_rates=seen.extend)
        assert seen[-1].used == PROMPT + 5 * OUTPUT
        [claim] = await engine.claim()
        await engine.generate(claim, 4, finish=True)
        await eventually(lambda: counts(broker, (1, PROMPT, 5 * 4)))


async def test_a_prompt_that_no_engine_has_had_is_not_used(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        made = request()
        await gateway.accept(made)
        await broker.cancel(made.request_id, TENANT)
        await eventually(lambda: counts(broker, (1, 0, 0)))


@pytest.mark.parametrize("num_gateways", [1, 3])
async def test_each_end_is_counted_once(redis_url: str, broker: Broker, num_gateways: int) -> None:
    """However many processes count, and whatever dies: an engine, or who counts before it deletes."""
    async with AsyncExitStack() as stack:
        gateways = []
        for _ in range(num_gateways):
            other = await stack.enter_async_context(await Broker.connect(redis_url, FAST))
            gateways.append(await stack.enter_async_context(GatewaySession(other)))
        counted: list[str] = []
        for each in gateways:
            each.ends.listeners.append(lambda ends: counted.extend(end.request_id for end in ends))
        dying = await stack.enter_async_context(worker(broker, "dying"))
        made = [request(number % 2, credential="ab"[number % 2]) for number in range(20)]
        for each in made:
            await gateways[0].accept(each)
        for claim in await dying.claim(5):
            await dying.generate(claim, 2)
        await expire_engine(broker, dying.session.engine_id)
        engine = await stack.enter_async_context(worker(broker, "living"))
        for claim in await engine.claim(len(made)):
            await engine.generate(claim, 4, finish=True)
        await eventually(lambda: counts(broker, (20, 20 * PROMPT, 80)))
        places = [await broker.directory.locate(each.request_id) for each in made[:2]]
        for where in places:  # another one read the same ends before they were deleted
            await gateways[0].ends.count_partition(where)

            async def is_deleted(name: str = where.prefix + "ended") -> bool:
                return not await broker.connection.execute("XLEN", name)

            await eventually(is_deleted)
        rows = await read_usage(broker, since_s=7200, tenant=TENANT)
        by_credential = {name: sum(each.requests for each in rows if each.credential == name) for name in "ab"}
        assert by_credential == {"a": 10, "b": 10}
        assert sorted(counted) == sorted(each.request_id for each in made)
        assert await tenants_with_usage(broker) == [TENANT]


async def test_without_limits_and_usage_nothing_is_kept(redis_server: Place, redis_url: str) -> None:
    async with await Broker.connect(redis_url, dataclasses.replace(FAST, usage_days=0)) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            made = request()
            await gateway.accept(made)
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            await read_all(gateway, made.request_id)
        found = find_keys(redis_server, "*")
    assert not [name for name in found if name.startswith(b"ps:limits") or name.endswith(b"ended")]
