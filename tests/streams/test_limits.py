"""What tenants may use, over gateways, engines and their deaths; and that what they used is counted once."""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession, QueueFull, RateLimited, expire_engine
from pagestream_streams.limits import read_usage, tenants_with_usage
from pagestream_streams.rates import NO_LIMITS, Limits, Rate
from redis import Redis
from support.protocol.token_streams import CALM, MODEL, TENANT, card, eventually, home_of, read_all, spec, worker
from support.protocol.virtual_streams import VirtualStreams
from support.redis.servers import emptied
from support.redis.topologies import Place, find_keys

pytestmark = pytest.mark.served

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
    async with await Broker.connect(redis_url, CALM) as found:
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
        first = request(deadline_ms=3_600_000 if end == "late" else 0)
        if end == "dead gateway":
            assert await one.rate_limiter.admit(first, one.acceptor.demand(first, is_length_given=True))
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
            monkeypatch.setattr(home_of(one.rate_limiter), "ACCEPT_S", 0.0)
        if end == "late":
            where = await broker.directory.locate(first.request_id)
            await broker.connection.execute("ZADD", f"{where.prefix}deadlines", "XX", 1, first.request_id)
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
    settings = dataclasses.replace(CALM, max_queued_requests=1)
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
    limits = book(tokens_per_minute=100 * (PROMPT + OUTPUT), concurrent_requests=1)
    seen: list[Rate] = []
    async with GatewaySession(broker, limits=limits) as gateway, worker(broker) as engine:
        # With this limit a look in the background could come between a reservation and its accept.
        await gateway.rate_limiter.timer.stop()
        monkeypatch.setattr(home_of(gateway.rate_limiter), "ACCEPT_S", 0.0)
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
            other = await stack.enter_async_context(await Broker.connect(redis_url, CALM))
            gateways.append(await stack.enter_async_context(GatewaySession(other)))
        counted: list[str] = []
        for each in gateways:
            each.ends.listeners.append(lambda ends: counted.extend(end.request_id for end in ends))
        dying = await stack.enter_async_context(worker(broker, "dying"))
        made = [request(number % 2, credential="ab"[number % 2]) for number in range(20)]
        for one in made:
            await gateways[0].accept(one)
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
    async with await Broker.connect(redis_url, dataclasses.replace(CALM, usage_days=0)) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            made = request()
            await gateway.accept(made)
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            await read_all(gateway, made.request_id)
        found = find_keys(redis_server, "*")
    assert not [name for name in found if name.startswith(b"ps:limits") or name.endswith(b"ended")]


# -- The limits' scripts against a small model, in virtual time: requests, ends, losses and repeats in any order.


RUN = "boot"
ACCEPT_MS, KEPT_DAYS = 15_000, 400  # no run of the test takes as long
START_MS = 1_800_000_000_123
# Window: slots, ms of a slot, ms that it must hold at least.
WINDOWS = ((60, 1000, 60_000), (60, 1000, 60_000), (96, 900_000, 86_400_000))
REQUESTS, TOKENS, DAY, RUNNING, QUEUED = range(5)
LIMITS = {"": (6, 300, 900, 4, 120), "k": (4, 200, 0, 3, 80), "free": (0, 0, 0, 0, 0)}


@dataclass
class Charge:
    """What counts in the windows for one request."""

    scopes: tuple[str, ...]
    at: int
    tokens: int
    requests: int = 1
    more: tuple[int, int] = (0, 0)
    """When it ended, and the tokens beyond those reserved."""


@dataclass
class Held:
    charge: Charge
    prompt: int
    stage: str = "queued"
    tries: int = 1


@dataclass
class Model:
    charges: list[Charge] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def counted(self, scope: str, kind: int, now: int, *, by_ms: bool = False) -> int:
        """What counts in a window; `by_ms`: of its exact length, without what was used beyond a reservation."""
        slots, slot_ms, length_ms = WINDOWS[kind]
        total = 0
        for each in self.charges:
            if scope in each.scopes:
                for at, amount in (
                    (each.at, each.requests if kind == REQUESTS else each.tokens),
                    (each.more[0], 0 if kind == REQUESTS or by_ms else each.more[1]),
                ):
                    is_in = now - at < length_ms if by_ms else now // slot_ms - at // slot_ms <= slots
                    total += amount if is_in else 0
        return total

    def running(self, scope: str) -> int:
        return sum(scope in each.charge.scopes and each.stage != "ended" for each in self.held.values())

    def queued(self, scope: str) -> int:
        return sum(each.prompt for each in self.held.values() if scope in each.charge.scopes and each.stage == "queued")

    def is_full(self, key: str, prompt: int, tokens: int, now: int) -> set[int]:
        """Places, from 1 on, of the limits that refuse a request."""
        places = set()
        for number, scope in enumerate(scopes_of(key)):
            limits = LIMITS[scope]
            used = [self.counted(scope, kind, now) for kind in range(3)] + [self.running(scope), self.queued(scope)]
            for place, (limit, have, more) in enumerate(zip(limits, used, (1, tokens, tokens, 1, prompt), strict=True)):
                if limit and have + more > limit:
                    places.add(5 * number + place + 1)
        return places


def scopes_of(key: str) -> tuple[str, ...]:
    return ("", key) if key else ("",)


class LimitsMachine(RuleBasedStateMachine):
    client: Redis
    streams: VirtualStreams

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.model = Model()
        self.now = START_MS
        self.ids = 0
        self.outbox: dict[str, list[str | int]] = {}
        self.usage: defaultdict[str, int] = defaultdict(int)
        self.positions = 0

    def run_script(self, name: str, *arguments: str | int) -> list[object]:
        self.streams.expire(self.now)
        reply: list[object] = self.streams.run(name, arguments, self.now, RUN)
        return reply

    @rule(ms=st.sampled_from((0, 1, 999, 1000, 20_000, 60_000, 61_000, 900_000, 86_400_000)))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(
        key=st.sampled_from(("", "k", "free")),
        prompt=st.integers(1, 90),
        output=st.integers(0, 120),
        is_again=st.booleans(),
        bounded=st.sampled_from((1, 1, 1, 0)),
    )
    def admit(self, key: str, prompt: int, output: int, is_again: bool, bounded: int) -> None:
        known = sorted(self.model.held)
        self.ids += 1
        name = known[self.ids % len(known)] if is_again and known else f"r{self.ids}"
        held, tokens = self.model.held.get(name), prompt + output
        full = self.model.is_full(key, prompt, tokens, self.now) if held is None and bounded else set()
        second = LIMITS[key] if key else (0,) * 5
        code, *reply = self.run_script(
            "limits/admit",
            name,
            key,
            prompt,
            tokens,
            bounded,
            ACCEPT_MS,
            0,
            128,
            KEPT_DAYS * 86_400_000,
            *LIMITS[""],
            *second,
        )
        assert bool(code) == (not full), (full, reply)
        if full:
            place, _, wait_ms = reply[:3]
            assert place in full
            self.check_wait(int(str(place)), int(str(wait_ms)), key, prompt, tokens)
            return
        assert reply[0] == (1 if held is None else 0)
        if held is None:
            charge = Charge(scopes_of(key), self.now, tokens)
            self.model.charges.append(charge)
            self.model.held[name] = Held(charge, prompt)
        else:
            held.tries += 1
        self.check_rows(key, reply[1])

    def check_wait(self, place: int, wait_ms: int, key: str, prompt: int, tokens: int) -> None:
        """Were nothing else sent, the request would fit then, and not a ms sooner."""
        if (place - 1) % 5 > DAY:
            assert wait_ms > 0 or prompt > LIMITS[scopes_of(key)[place // 6]][QUEUED]
            return
        if wait_ms < 0:
            assert (1, tokens, tokens)[(place - 1) % 5] > LIMITS[scopes_of(key)[place // 6]][(place - 1) % 5]
            return
        windows = {1, 2, 3, 6, 7, 8}
        assert not self.model.is_full(key, prompt, tokens, self.now + wait_ms) & windows
        assert self.model.is_full(key, prompt, tokens, self.now + wait_ms - 1) & windows

    def check_rows(self, key: str, rows: object) -> None:
        """What answers say of each limit."""
        assert isinstance(rows, list)
        found = {place: used for place, used, _ in rows}
        for number, scope in enumerate(scopes_of(key)):
            for kind, limit in enumerate(LIMITS[scope][:QUEUED]):
                used = self.model.running(scope) if kind == RUNNING else self.model.counted(scope, kind, self.now)
                assert found.get(5 * number + kind + 1) == (used if limit else None)

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99), what=st.sampled_from(("none", "queued", "claimed", "ended", "past", "refused")))
    def note(self, pick: int, what: str) -> None:
        name = sorted(self.model.held)[pick % len(self.model.held)]
        held = self.model.held[name]
        self.run_script("limits/note", ACCEPT_MS, name, what)
        is_old = self.now - held.charge.at >= ACCEPT_MS
        if (what == "refused" and held.tries == 1) or (what == "none" and is_old):
            if held.stage != "ended":
                held.charge.tokens = held.charge.requests = 0
            del self.model.held[name]
        elif what == "claimed" and held.stage == "queued":
            held.stage = "claimed"
        elif what == "past":
            del self.model.held[name]
        elif what == "ended":
            held.stage = "ended"

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99), output=st.integers(0, 200))
    def end(self, pick: int, output: int) -> None:
        """A request's end is written to its partition's stream, where the process that counts it finds it."""
        name = sorted(self.model.held)[pick % len(self.model.held)]
        if any(row[1] == name for row in self.outbox.values()):
            return
        held = self.model.held[name]
        self.positions += 1
        position = f"{self.now}-{self.positions}"
        key = held.charge.scopes[-1]
        self.outbox[position] = [
            *(position, name, key, "m", 1, held.prompt, 0, output),
            *(held.charge.at, self.now),
        ]

    @precondition(lambda self: self.outbox)
    @rule(keeps=st.booleans(), most=st.integers(1, 4))
    def fold(self, keeps: bool, most: int) -> None:
        """`keeps`: the process dies before it deletes what it has counted, and another one counts it again."""
        rows = list(self.outbox.values())[:most]
        reply = self.run_script(
            "limits/fold", "m/0", 300_000, 48, KEPT_DAYS, 1000, *(value for row in rows for value in row)
        )
        for row, is_new in zip(rows, reply, strict=True):
            name, tokens = str(row[1]), int(row[5]) + int(row[7])
            assert is_new == (name not in self.model.ended)
            if is_new:
                self.model.ended.add(name)
                self.usage["requests"] += 1
                self.usage["prompt"] += int(row[5])
                self.usage["output"] += int(row[7])
            held = self.model.held.pop(name, None)
            if is_new and held is not None:
                reserved = held.charge.tokens
                held.charge.tokens = min(reserved, tokens)
                held.charge.more = (self.now, max(0, tokens - reserved))
            if not keeps:
                del self.outbox[str(row[0])]

    @invariant()
    def is_as_the_model_says(self) -> None:
        """What runs and waits, and what was used, is known exactly; nothing leaves a window before its time."""
        for scope in scopes_of("k"):
            for kind in (REQUESTS, TOKENS, DAY):
                exact = self.model.counted(scope, kind, self.now, by_ms=True)
                assert exact <= self.model.counted(scope, kind, self.now)
        found = self.streams.content()
        state = found.get("state", {})
        for scope in ("", "k", "free"):
            assert int(state.get(f"running:{scope}", 0)) == self.model.running(scope)
            assert int(state.get(f"queued:{scope}", 0)) == self.model.queued(scope)
        kept: defaultdict[str, int] = defaultdict(int)
        for name, fields in found.items():
            if name.startswith("usage:d:"):
                for each, value in fields.items():
                    kept[each.partition("\n")[0]] += int(value)
        assert {name: value for name, value in self.usage.items() if value} == dict(kept)
        assert set(found.get("held", {})) == set(self.model.held)
        assert set(found.get("open", {})) == set(self.model.held)


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


def test_any_order_of_requests_and_ends(client: Redis) -> None:
    machine = type("Bound", (LimitsMachine,), {"client": client, "streams": VirtualStreams(client)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize(("behind_ms", "is_refused"), [(0, True), (1000, True), (5000, True), (600_000, False)])
def test_a_clock_that_is_a_little_behind_forgets_nothing(client: Redis, behind_ms: int, is_refused: bool) -> None:
    """As that of the replica that took over; a clock that was set back begins the windows of a minute anew."""
    client.flushall()
    streams = VirtualStreams(client)

    def is_admitted(name: str, now: int) -> bool:
        bounds = ACCEPT_MS, 0, 128, KEPT_DAYS * 86_400_000
        arguments = name, "", 1, 10, 1, *bounds, 2, 20, 40, 0, 0, 0, 0, 0, 0, 0
        code: int = streams.run("limits/admit", arguments, now, RUN)[0]
        return bool(code)

    quarter = START_MS - START_MS % 900_000 + 900_000  # the day's window has a new slot here, too
    assert is_admitted("a", quarter)
    assert is_admitted("b", quarter)
    assert is_admitted("c", quarter - behind_ms) is not is_refused
    later = [is_admitted(f"{name}", quarter + 62_000 * (1 + name // 2)) for name in range(4)]
    assert sum(later) + 2 + (not is_refused) == 4, "no more than four count in the day"
