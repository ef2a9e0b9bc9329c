"""Redis loses its last moment while clients and engines keep theirs: what was lost is accepted or sent again,
what was seen is compared, and two histories are never mixed.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_RUNNING
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import (
    AppendKind,
    Broker,
    Claim,
    DigestMismatch,
    EmbeddedRedis,
    GatewaySession,
    QueueFull,
    RequestNotFound,
    Unavailable,
)
from pagestream_streams.protocol import Partition, new_request_id
from support.protocol.token_streams import (
    CALM,
    LIMIT_S,
    MODEL,
    TENANT,
    Worker,
    card,
    ending,
    eventually,
    numbers,
    once_there,
    spec,
    tokens,
    worker,
)
from support.redis.servers import DiskState, die_behind, disk_state, newest_server, oldest_server, running_server

pytestmark = pytest.mark.served

OLDEST = pytest.param(oldest_server, id="oldest", marks=pytest.mark.slow)


@pytest.fixture(params=[OLDEST, pytest.param(newest_server, id="newest")])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis"), request.param()) as server:
        yield server


@pytest.fixture
async def broker(server: EmbeddedRedis) -> AsyncIterator[Broker]:
    async with await Broker.connect(server.url, CALM) as broker:
        await broker.publish_model(card(), partitions=2)
        yield broker


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[GatewaySession]:
    async with GatewaySession(broker) as gateway:
        yield gateway


class Cut(StrEnum):
    """Where the file ends in the last script's writes, which are between MULTI and EXEC."""

    BEFORE_MULTI = "before-multi"
    BEHIND_MULTI = "behind-multi"
    IN_THE_FIRST_WRITE = "in-the-first-write"
    BEHIND_THE_FIRST_WRITE = "behind-the-first-write"
    IN_THE_LAST_WRITE = "in-the-last-write"
    BEFORE_EXEC = "before-exec"
    IN_EXEC = "in-exec"
    BEHIND_EXEC = "behind-exec"


TORN = (Cut.BEHIND_MULTI, Cut.IN_THE_LAST_WRITE, Cut.BEFORE_EXEC)
TORN_COMMANDS = (Cut.IN_THE_LAST_WRITE, Cut.IN_EXEC)


async def cut_state(server: EmbeddedRedis, broker: Broker, key: str, cut: Cut) -> DiskState:
    """Return the file's state with the last script that wrote to `key` cut off at `cut`.

    ValueError where no script did in more than one write.
    """
    state = await disk_state(server, broker)
    data = state.file.read_bytes()[: state.size]
    return DiskState(state.file, _place(data, _last_transaction(data, key.encode()), cut))


class Command(NamedTuple):
    """A command in an append-only file, from byte `begin` up to, not including, `end`."""

    begin: int
    end: int
    arguments: Sequence[bytes]


def commands(data: bytes) -> Iterator[Command]:
    """Parse all commands; ValueError where the file has anything else."""
    place = 0
    while place < len(data):
        begin, arguments = place, []
        count, place = _number(data, place, b"*")
        for _ in range(count):
            length, place = _number(data, place, b"$")
            arguments.append(data[place : place + length])
            place += length + len(b"\r\n")
        yield Command(begin, place, arguments)


def _number(data: bytes, place: int, kind: bytes) -> tuple[int, int]:
    """Parse a line of this type; return its number and where the next line begins."""
    end = data.index(b"\r\n", place)
    if data[place : place + 1] != kind:
        raise ValueError(f"expected {kind!r} at byte {place}, got {data[place:end]!r}")
    return int(data[place + 1 : end]), end + len(b"\r\n")


def _last_transaction(data: bytes, key: bytes) -> Sequence[Command]:
    """Return the commands from MULTI to EXEC."""
    found: Sequence[Command] = ()
    running: list[Command] = []
    for command in commands(data):
        if command.arguments[0] == b"MULTI":
            running = []
        running.append(command)
        if command.arguments[0] == b"EXEC":
            if any(each.arguments[1:2] == [key] for each in running):
                found = running
            running = []
    if len(found) < len(("MULTI", "a write", "a write", "EXEC")):
        raise ValueError(f"no script wrote to {key!r} in more than one write")
    return found


def _place(data: bytes, transaction: Sequence[Command], cut: Cut) -> int:
    multi, first, *_, last, end = transaction
    return {
        Cut.BEFORE_MULTI: multi.begin,
        Cut.BEHIND_MULTI: multi.end,
        Cut.IN_THE_FIRST_WRITE: _middle(data, first),
        Cut.BEHIND_THE_FIRST_WRITE: first.end,
        Cut.IN_THE_LAST_WRITE: _middle(data, last),
        Cut.BEFORE_EXEC: end.begin,
        Cut.IN_EXEC: _middle(data, end),
        Cut.BEHIND_EXEC: end.end,
    }[cut]


def _middle(data: bytes, command: Command) -> int:
    """Return the length of its longest argument."""
    longest = max(command.arguments, key=len)
    return data.index(longest, command.begin) + len(longest) // 2


def cuts(all_of: Iterable[Cut], *chosen: Cut) -> list[Any]:
    """Return the cuts as parameters; all but those chosen are slow."""
    return [pytest.param(cut, marks=[] if cut in chosen else [pytest.mark.slow]) for cut in all_of]


async def start_again(server: EmbeddedRedis, broker: Broker) -> None:
    """Kill the server once its file is complete, and restart it."""
    await disk_state(server, broker)
    server.kill()
    await server.start()


class Reader:
    """A client's stream with what it has seen."""

    def __init__(self, gateway: GatewaySession, request: RequestSpec, *, keeps_spec: bool = True) -> None:
        self.seen: list[LogEntry] = []
        self._gateway, self._request, self._spec = gateway, request, request if keeps_spec else None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        stream = self._gateway.read(self._request.request_id, tenant=TENANT, spec=self._spec)
        async with asyncio.timeout(LIMIT_S), aclosing(stream) as batches:
            async for batch in batches:
                self.seen += batch

    async def has_seen(self, count: int) -> None:
        await eventually(lambda: len(self.seen) >= count)


async def appended(engine: Worker, claim: Claim, first: int, entries: Sequence[LogEntry]) -> AppendKind:
    async def step() -> AppendKind:
        return (await engine.append(claim, first, entries)).kind

    return await once_there(step)


async def claimed(engine: Worker) -> Claim:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                [claim] = await engine.claim()
            except Unavailable:
                await asyncio.sleep(0.02)
            else:
                return claim


class TestTheRecordIsLost:
    async def begin(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, engine: Worker, *, keeps_spec: bool = True
    ) -> tuple[Reader, Claim]:
        """Three tokens are seen; then Redis knows nothing of the request."""
        before, request = await disk_state(server, broker), spec()
        await gateway.accept(request)
        reader = Reader(gateway, request, keeps_spec=keeps_spec)
        [claim] = await engine.claim()
        await engine.generate(claim, 3)
        await reader.has_seen(3)
        await die_behind(server, before)
        return reader, claim

    async def test_it_is_accepted_again_and_goes_on(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as engine, worker(broker, "b") as other:
            reader, old = await self.begin(server, broker, gateway, engine)
            new = await claimed(other)
            assert (new.request_id, new.spec, new.next_index) == (old.request_id, old.spec, 0)
            kind = await appended(engine, old, 3, tokens([9], reader.seen[-1].digest))
            assert kind in (AppendKind.MISSING, AppendKind.FENCED)
            await other.generate(new, 6, finish=True)
            await reader.task
            assert numbers(reader.seen) == list(range(100, 106))
            await eventually(lambda: engine.lost == [old.request_id] or old.request_id not in engine.session.held)

    async def test_other_tokens_are_data_loss(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as engine, worker(broker, "b") as other:
            reader, _ = await self.begin(server, broker, gateway, engine)
            new = await claimed(other)
            await appended(other, new, 0, tokens([100, 101, 7, 103]))
            with pytest.raises(DigestMismatch):
                await reader.task
            assert numbers(reader.seen) == [100, 101, 102]

    async def test_an_earlier_end_is_data_loss(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as engine, worker(broker, "b") as other:
            reader, _ = await self.begin(server, broker, gateway, engine)
            new = await claimed(other)
            await appended(other, new, 0, ending("", count=0))
            with pytest.raises(DigestMismatch):
                await reader.task
            assert numbers(reader.seen) == [100, 101, 102]

    async def test_without_its_spec_it_is_not_found(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as engine:
            reader, _ = await self.begin(server, broker, gateway, engine, keeps_spec=False)
            with pytest.raises(RequestNotFound):
                await reader.task

    async def test_a_client_brings_it_to_another_gateway(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as engine, worker(broker, "b") as other:
            reader, old = await self.begin(server, broker, gateway, engine, keeps_spec=False)
            await asyncio.wait([reader.task])
            assert isinstance(reader.task.exception(), RequestNotFound)
            async with GatewaySession(broker) as second:
                rest: list[LogEntry] = []

                async def resume() -> None:
                    stream = second.read(
                        old.request_id, tenant=TENANT, from_index=3, digest=reader.seen[-1].digest, spec=old.spec
                    )
                    async with aclosing(stream) as batches:
                        async for batch in batches:
                            rest.extend(batch)

                resuming = asyncio.create_task(resume())
                await other.generate(await claimed(other), 5, finish=True)
                await asyncio.wait_for(resuming, LIMIT_S)
            assert numbers(rest) == [103, 104]

    async def test_a_stream_goes_past_the_bounds_a_newcomer_does_not(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        """What was accepted once must not be refused for want of room; a request that only claims to have been is."""
        full = dataclasses.replace(CALM, max_queued_requests=1)
        async with await Broker.connect(server.url, full) as narrow, GatewaySession(narrow) as small:
            before, lost = await disk_state(server, broker), spec()
            await small.accept(lost)
            reader = Reader(small, lost)
            await eventually(lambda: any(each.is_registered for each in small.readers.reads))
            await die_behind(server, before)
            await stubbornly_accept(gateway, spec())
            await eventually(lambda: is_known(broker, lost))
            newcomer = spec()
            stream = small.read(newcomer.request_id, tenant=TENANT, spec=newcomer)
            with pytest.raises(QueueFull):
                await anext(stream)
            async with worker(broker, "a") as engine:
                claim = await claimed(engine)
                assert claim.request_id == lost.request_id, "it is served first"
                await engine.generate(claim, 2, finish=True)
                await reader.task

    async def test_another_s_spec_is_refused(self, gateway: GatewaySession) -> None:
        for wrong in (spec(), spec("", tenant="tenant-b")):
            with pytest.raises(ValueError, match="the spec is"):
                await anext(gateway.read(new_request_id(MODEL, 0, TENANT), tenant=TENANT, spec=wrong))


async def stubbornly_accept(gateway: GatewaySession, request: RequestSpec) -> None:
    async def step() -> AppendKind:
        await gateway.accept(request)
        return AppendKind.OK

    await once_there(step)


async def is_known(broker: Broker, request: RequestSpec) -> bool:
    try:
        await broker.view(request.request_id, TENANT)
    except (RequestNotFound, Unavailable):
        return False
    return True


class TestTokensAreLost:
    async def test_the_engine_sends_them_again(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            reader = Reader(gateway, request)
            [claim] = await engine.claim()
            entries = tokens(range(100, 106))
            await engine.append(claim, 0, entries[:2])
            before = await disk_state(server, broker)
            await engine.append(claim, 2, entries[2:4])
            await reader.has_seen(4)
            await die_behind(server, before)

            async def step() -> AppendKind:
                outcome = await engine.append(claim, 4, entries[4:])
                assert (outcome.kind, outcome.next_index) == (AppendKind.GAP, 2)
                return outcome.kind

            await once_there(step)
            assert await appended(engine, claim, 2, entries[2:]) is AppendKind.OK
            assert await appended(engine, claim, 6, ending(entries[-1].digest, count=6)) is AppendKind.OK
            await reader.task
            assert numbers(reader.seen) == list(range(100, 106))
            assert engine.lost == []

    async def test_the_end_is_lost_and_somebody_ends_it_again(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The engine holds it no longer, and Redis shows it as its own: it is handed back, and goes on elsewhere."""
        async with worker(broker, "a") as engine, worker(broker, "b") as other:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            digest = await engine.generate(claim, 2)
            before = await disk_state(server, broker)
            await engine.generate(dataclasses.replace(claim, next_index=2, digest=digest), 4, finish=True)
            reader = Reader(gateway, request)
            await reader.task
            await die_behind(server, before)
            again = await claimed(other)
            assert (again.request_id, again.next_index, again.log.tokens[0].tolist()) == (
                request.request_id,
                2,
                [100, 101],
            )
            await other.generate(again, 4, finish=True)
            repeated = Reader(gateway, request)
            await repeated.task
            assert repeated.seen == reader.seen


class TestTheClaimIsLost:
    async def lose_claim(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, engine: Worker
    ) -> tuple[Claim, Reader]:
        request = spec()
        await gateway.accept(request)
        reader = Reader(gateway, request)
        before = await disk_state(server, broker)
        [claim] = await engine.claim()
        await engine.generate(claim, 3)
        await reader.has_seen(3)
        await die_behind(server, before)
        return claim, reader

    async def test_an_epoch_that_is_issued_twice_splices_nothing(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as a, worker(broker, "b") as b:
            old, reader = await self.lose_claim(server, broker, gateway, a)
            new = await claimed(b)
            assert (new.epoch, new.next_index) == (old.epoch, 0)
            assert new.nonce != old.nonce
            digest = reader.seen[-1].digest
            assert await appended(a, old, 3, tokens([7], digest)) is AppendKind.FENCED
            assert await appended(a, old, 0, tokens([7])) is AppendKind.FENCED
            await b.generate(new, 5, finish=True)
            await reader.task
            assert numbers(reader.seen) == list(range(100, 105))
            await eventually(lambda: old.request_id not in a.session.held)

    async def test_its_former_owner_drops_it_before_anybody_has_it(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
    ) -> None:
        async with worker(broker, "a") as a:
            old, _ = await self.lose_claim(server, broker, gateway, a)
            await eventually(lambda: a.lost == [old.request_id])


async def test_a_hand_back_that_is_lost_is_done_again(
    server: EmbeddedRedis, broker: Broker, gateway: GatewaySession
) -> None:
    """Redis shows the first engine as the owner, the second works on it: neither can splice, and one goes on."""
    async with worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        reader = Reader(gateway, request)
        [first] = await a.claim()
        digest = await a.generate(first, 2)
        before: DiskState = await disk_state(server, broker)
        await a.session.hand_back([request.request_id])
        [second] = await b.claim()
        entries = tokens([102, 103], digest)
        await b.append(second, 2, entries)
        await reader.has_seen(4)
        await die_behind(server, before)
        assert await appended(b, second, 4, tokens([104], entries[-1].digest)) is AppendKind.FENCED
        third = await claimed(b)
        assert (third.next_index, third.digest) == (2, digest)
        await b.generate(third, 6, finish=True)
        await reader.task
        assert numbers(reader.seen) == list(range(100, 106))
        assert (await broker.view(request.request_id, TENANT)).state != REQUEST_STATE_RUNNING


WHERE = Partition(MODEL, 0)


async def written(broker: Broker, request: RequestSpec, engine: Worker) -> list[Any]:
    """What an append or a claim writes: the record, the log, what the engine owns, the queue and its account."""
    queue = f"{WHERE.prefix}queue:0"
    commands = (
        ("HGETALL", WHERE.request(request.request_id)),
        ("XRANGE", WHERE.log(request.request_id), "-", "+"),
        ("SMEMBERS", owned(engine)),
        ("XRANGE", queue, "-", "+"),
        ("XPENDING", queue, "engines"),
        ("HGETALL", f"{WHERE.prefix}tenants:0"),
        ("HMGET", f"{WHERE.prefix}meta", "tokens:0", "weights:0", "drained"),
    )
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await broker.connection.pipeline(commands)
            except Unavailable:
                await asyncio.sleep(0.02)


async def finished(engine: Worker, claim: Claim, count: int) -> None:
    """All tokens in one append, then the end."""
    entries = tokens(range(100, 100 + count))
    for first, some in ((0, entries), (count, ending(entries[-1].digest, count=count))):
        assert await appended(engine, claim, first, some) is AppendKind.OK


def owned(engine: Worker) -> str:
    return f"{WHERE.prefix}owned:{engine.session.engine_id}"


async def everything(gateway: GatewaySession, request: RequestSpec) -> list[LogEntry]:
    """What a client gets that comes now."""
    reader = Reader(gateway, request)
    await reader.task
    return reader.seen


class TestTheFileEndsInTheMiddleOfATransaction:
    """What a script wrote is wholly there after the start, or not at all."""

    async def lose_append(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, engine: Worker, cut: Cut
    ) -> tuple[Reader, RequestSpec, Claim]:
        """Five tokens are seen, the last three of them by the append in which the file ends."""
        request = spec()
        await stubbornly_accept(gateway, request)
        reader = Reader(gateway, request)
        claim = await claimed(engine)
        entries = tokens(range(100, 105))
        assert await appended(engine, claim, 0, entries[:2]) is AppendKind.OK
        before = await written(broker, request, engine)
        assert await appended(engine, claim, 2, entries[2:]) is AppendKind.OK
        await reader.has_seen(5)
        after = await written(broker, request, engine)
        await die_behind(server, await cut_state(server, broker, WHERE.log(request.request_id), cut))
        assert await written(broker, request, engine) == (after if cut is Cut.BEHIND_EXEC else before)
        return reader, request, claim

    async def lose_claim(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, engine: Worker, cut: Cut
    ) -> tuple[Reader, RequestSpec, Claim]:
        """Three tokens are seen; the file ends in the claim before them."""
        request = spec()
        await stubbornly_accept(gateway, request)
        reader = Reader(gateway, request)
        before = await written(broker, request, engine)
        claim = await claimed(engine)
        after = await written(broker, request, engine)
        disk = await cut_state(server, broker, owned(engine), cut)
        assert await appended(engine, claim, 0, tokens(range(100, 103))) is AppendKind.OK
        await reader.has_seen(3)
        await die_behind(server, disk)
        assert await written(broker, request, engine) == (after if cut is Cut.BEHIND_EXEC else before)
        return reader, request, claim

    @pytest.mark.parametrize("cut", cuts(Cut, Cut.IN_THE_LAST_WRITE, Cut.BEHIND_EXEC))
    async def test_an_append_is_there_wholly_or_not_at_all_and_goes_on(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, cut: Cut
    ) -> None:
        async with worker(broker) as engine:
            reader, request, claim = await self.lose_append(server, broker, gateway, engine, cut)
            entries = tokens(range(100, 107))
            if cut is Cut.BEHIND_EXEC:
                assert await appended(engine, claim, 5, entries[5:]) is AppendKind.OK
            else:
                assert await appended(engine, claim, 5, entries[5:]) is AppendKind.GAP
                assert await appended(engine, claim, 2, entries[2:]) is AppendKind.OK
            assert await appended(engine, claim, 7, ending(entries[-1].digest, count=7)) is AppendKind.OK
            await reader.task
            assert numbers(reader.seen) == list(range(100, 107))
            assert engine.lost == []
            await start_again(server, broker)
            assert await everything(gateway, request) == reader.seen

    @pytest.mark.parametrize("cut", cuts(Cut, Cut.BEFORE_EXEC, Cut.BEHIND_EXEC))
    async def test_a_claim_is_there_wholly_or_not_at_all_and_goes_on(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, cut: Cut
    ) -> None:
        async with worker(broker, "a") as a, worker(broker, "b") as b:
            reader, request, claim = await self.lose_claim(server, broker, gateway, a, cut)
            if cut is Cut.BEHIND_EXEC:
                rest = tokens([103], reader.seen[-1].digest)
                assert await appended(a, claim, 3, rest) is AppendKind.GAP
                await finished(a, claim, 6)
            else:
                again = await claimed(b)
                assert (again.epoch, again.attempts, again.next_index) == (1, 1, 0)
                await finished(b, again, 6)
            await reader.task
            assert numbers(reader.seen) == list(range(100, 106))
            await start_again(server, broker)
            assert await everything(gateway, request) == reader.seen

    @pytest.mark.parametrize("cut", cuts(TORN, Cut.BEHIND_MULTI))
    async def test_an_epoch_that_is_issued_twice_splices_nothing(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, cut: Cut
    ) -> None:
        async with worker(broker, "a") as a, worker(broker, "b") as b:
            reader, request, old = await self.lose_claim(server, broker, gateway, a, cut)
            new = await claimed(b)
            assert new.epoch == old.epoch
            assert new.nonce != old.nonce
            others = tokens([7, 8])
            assert await appended(b, new, 0, others) is AppendKind.OK
            for first, entries in ((0, tokens([100])), (2, tokens([9], others[-1].digest))):
                assert await appended(a, old, first, entries) is AppendKind.FENCED
            assert await appended(b, new, 2, ending(others[-1].digest, count=2)) is AppendKind.OK
            with pytest.raises(DigestMismatch):
                await reader.task
            assert numbers(reader.seen) == [100, 101, 102]
            assert numbers(await everything(gateway, request)) == [7, 8]

    async def replace_half(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, engine: Worker, other: Worker, *, cut: Cut
    ) -> RequestSpec:
        """Where half an append was, another engine puts other tokens: who saw the first ones hears of it."""
        reader, request, _ = await self.lose_append(server, broker, gateway, engine, cut)

        async def hand_back() -> AppendKind:
            await engine.session.hand_back([request.request_id])
            return AppendKind.OK

        await once_there(hand_back)
        claim = await claimed(other)
        assert (claim.next_index, claim.log.tokens[0].tolist()) == (2, [100, 101])
        others = tokens([7, 8], claim.digest)
        assert await appended(other, claim, 2, [*others, *ending(others[-1].digest, count=4)]) is AppendKind.OK
        with pytest.raises(DigestMismatch):
            await reader.task
        assert numbers(reader.seen) == list(range(100, 105))
        assert numbers(await everything(gateway, request)) == [100, 101, 7, 8]
        return request

    @pytest.mark.parametrize("cut", cuts(TORN_COMMANDS, Cut.IN_EXEC))
    async def test_other_tokens_in_the_place_of_half_an_append_are_data_loss_and_so_they_stay(
        self, server: EmbeddedRedis, broker: Broker, gateway: GatewaySession, cut: Cut
    ) -> None:
        """Also after a second start, which on some servers would run the half that the first one did not."""
        async with worker(broker, "a") as a, worker(broker, "b") as b:
            request = await self.replace_half(server, broker, gateway, a, b, cut=cut)
            before = await written(broker, request, a)
            await start_again(server, broker)
            assert await written(broker, request, a) == before
            assert numbers(await everything(gateway, request)) == [100, 101, 7, 8]
