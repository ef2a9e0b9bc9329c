"""What each setting admits, shown row by row as docs/durability.md says it: a process dies, or its machine with
whatever the disk did not have yet.

How the disk is slow is each test's own choice, see `WatchedServer`: "late" makes the time between two syncs as long as
the test needs it, "stuck" makes one sync take so long.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import (
    AppendKind,
    AppendOutcome,
    Broker,
    Claim,
    GatewaySession,
    RequestNotFound,
    Unavailable,
)
from pagestream_streams.connection.embedded import LEAST_VERSION, ServerBinary, find_servers
from support.protocol.token_streams import (
    FAST,
    LIMIT_S,
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
from support.redis.servers import skip_for_want_of
from support.redis.synced_files import WatchedServer, built_watch, is_watched

# A lease that no disk lets lapse: only servers die here. No command is given up while a disk is stuck.
CALM = dataclasses.replace(FAST, lease_ms=6000, sweep_gap_ms=4000, command_timeout_s=15.0)
STUCK_S = 0.3
"""For so long nothing may be heard from a server whose disk is stuck."""

T = TypeVar("T")


class Row(NamedTuple):
    """Of the table."""

    appendfsync: str
    wait_fsync: bool = False
    wait_timeout_ms: int = 1000

    @property
    def least_version(self) -> tuple[int, int]:
        """Of a server that can do it: WAITAOF is from 7.2 on."""
        return (7, 2) if self.wait_fsync else LEAST_VERSION


ROWS = {
    "everysec": Row("everysec"),
    "always": Row("always"),
    "always and WAIT_FSYNC": Row("always", wait_fsync=True),
    # Less than the two seconds for which the server holds back what it writes behind a sync.
    "everysec and WAIT_FSYNC": Row("everysec", wait_fsync=True, wait_timeout_ms=300),
}


def rows(*settings: str) -> pytest.MarkDecorator:
    """On the oldest server and on the newest; WAITAOF is the newest one's alone."""
    cases = [
        pytest.param(ROWS[setting], age, id=f"{setting}-{age}")
        for setting in settings
        for age in (("newest",) if ROWS[setting].wait_fsync else ("oldest", "newest"))
    ]
    return pytest.mark.parametrize(("row", "age"), cases)


class Watch(NamedTuple):
    """What sees syncs, and whose."""

    library: Path
    servers: list[ServerBinary]
    unseen: list[ServerBinary]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    folder = tmp_path_factory.mktemp("watch")
    library = built_watch(folder)
    seen: dict[bool, list[ServerBinary]] = {True: [], False: []}
    for number, binary in enumerate(find_servers()):
        seen[is_watched(binary, library, folder / str(number))].append(binary)
    return Watch(library, seen[True], seen[False])


@pytest.fixture
def server(row: Row, age: str, watch: Watch, tmp_path: Path) -> Iterator[WatchedServer]:
    """Of the servers that can do what is asked for and whose syncs are seen, the oldest or the newest."""
    able = sorted((each for each in watch.servers if each.version >= row.least_version), key=lambda each: each.version)
    if not able or (age == "oldest" and able[0].version == able[-1].version):
        least = ".".join(map(str, row.least_version))
        unseen = ", ".join(f"{each.path} (linked statically?)" for each in watch.unseen) or "none"
        skip_for_want_of(
            "redis7", f"no {age} server from {least} on whose syncs are seen; of these they are not: {unseen}"
        )
    one = WatchedServer.of(able[0 if age == "oldest" else -1], watch.library, tmp_path / "data", row.appendfsync)
    one.start_and_wait()
    try:
        yield one
    finally:
        one.kill()


@pytest.fixture
async def broker(row: Row, server: WatchedServer) -> AsyncIterator[Broker]:
    settings = dataclasses.replace(CALM, wait_fsync=row.wait_fsync, wait_timeout_ms=row.wait_timeout_ms)
    async with await Broker.connect(server.url, settings) as broker:
        await broker.publish_model(card(), partitions=2)
        yield broker


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[GatewaySession]:
    async with GatewaySession(broker) as gateway:
        yield gateway


class Reader:
    """A client's stream with what it has seen. Without `keeps_spec` nothing accepts a lost request again."""

    def __init__(self, gateway: GatewaySession, request: RequestSpec, *, keeps_spec: bool) -> None:
        self.seen: list[LogEntry] = []
        self._stream = gateway.read(request.request_id, tenant=TENANT, spec=request if keeps_spec else None)

    async def run(self) -> None:
        async with aclosing(self._stream) as batches:
            async for batch in batches:
                self.seen += batch

    async def has_seen(self, count: int) -> None:
        await eventually(lambda: len(self.seen) >= count)


@asynccontextmanager
async def reading(gateway: GatewaySession, request: RequestSpec, *, keeps_spec: bool) -> AsyncIterator[Reader]:
    """To the request's end, which comes before the block's or soon after it."""
    reader = Reader(gateway, request, keeps_spec=keeps_spec)
    async with asyncio.timeout(2 * LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(reader.run())
        yield reader


async def length(broker: Broker, request: RequestSpec) -> int | None:
    """Of its log; None where Redis doesn't know the request."""
    try:
        return (await once_there(lambda: broker.view(request.request_id, TENANT))).next_index
    except RequestNotFound:
        return None


async def is_known(broker: Broker, request: RequestSpec) -> bool:
    return await length(broker, request) is not None


async def appended(engine: Worker, claim: Claim, first: int, entries: Sequence[LogEntry]) -> AppendOutcome:
    return await once_there(lambda: engine.append(claim, first, entries))


async def all_synced(server: WatchedServer) -> None:
    """Until the disk has what was answered before."""
    await eventually(server.has_written)
    size = server.num_written()
    await eventually(lambda: server.num_synced() >= size)


async def begin_a_sync(server: WatchedServer, gateway: GatewaySession) -> None:
    """It is under way until the disk recovers."""
    before = server.met("stuck")
    server.get_stuck()
    with suppress(Unavailable):
        await gateway.accept(spec())
    await eventually(lambda: server.met("stuck") > before)


ENTRIES = tokens(range(100, 106))
END = ending(ENTRIES[-1].digest, count=len(ENTRIES))


@rows("everysec", "always", "always and WAIT_FSYNC")
async def test_the_process_dies_and_nothing_is_lost(
    server: WatchedServer, broker: Broker, gateway: GatewaySession
) -> None:
    """The disk has none of it, as it is late; the machine lives, and keeps what the process has written."""
    running, waiting = spec(), spec()
    async with worker(broker) as engine:
        server.be_late()
        await gateway.accept(running)
        [claim] = await engine.claim()
        assert (await engine.append(claim, 0, ENTRIES[:3])).kind is AppendKind.OK
        await gateway.accept(waiting)
        # The next test shows what a sync does that is under way.
        await eventually(server.has_written)
        server.kill()
        assert server.num_synced() < server.num_written()
        await asyncio.to_thread(server.lose_process)
        assert await length(broker, running) == 3
        assert await length(broker, waiting) == 0


@rows("everysec")
async def test_the_process_dies_while_a_sync_is_under_way_and_what_was_answered_meanwhile_is_lost(
    server: WatchedServer, broker: Broker, gateway: GatewaySession
) -> None:
    """Behind a sync that is under way the server writes nothing for up to two seconds, and answers all the same. The
    disk is stuck, so that the sync takes long enough.
    """
    for _ in range(5):
        kept, lost = spec(), spec()
        await once_there(partial(gateway.accept, kept))
        await all_synced(server)
        await begin_a_sync(server, gateway)
        before = server.num_written()
        await gateway.accept(lost)
        server.kill()
        after = server.num_written()
        await asyncio.to_thread(server.lose_process)
        if before == after:
            break  # else this machine was too busy: the two seconds were over
    assert await is_known(broker, kept)
    assert not await is_known(broker, lost)
    await once_there(partial(gateway.accept, lost))
    assert await is_known(broker, lost)


class TestTheMachineDies:
    @rows("everysec")
    async def test_a_request_that_was_accepted_after_the_last_sync_is_lost_and_can_be_accepted_again(
        self, server: WatchedServer, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The disk is late: the machine dies before the next sync."""
        kept, lost = spec(), spec()
        await gateway.accept(kept)
        await all_synced(server)
        server.be_late()
        await gateway.accept(lost)
        await asyncio.to_thread(server.lose_machine)
        assert await is_known(broker, kept)
        assert not await is_known(broker, lost), "the test should show a loss"
        await once_there(partial(gateway.accept, lost))
        async with reading(gateway, lost, keeps_spec=False) as reader, worker(broker) as engine:
            claims = {claim.request_id: claim for claim in await engine.claim(2)}
            await engine.generate(claims[lost.request_id], 3, finish=True)
            await reader.has_seen(3)
        assert numbers(reader.seen) == [100, 101, 102]

    @rows("everysec")
    async def test_a_stream_whose_request_is_lost_is_accepted_again_by_its_gateway(
        self, server: WatchedServer, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The disk is late: the machine dies before the next sync."""
        request = spec()
        await all_synced(server)
        server.be_late()
        await gateway.accept(request)
        async with reading(gateway, request, keeps_spec=True) as reader, worker(broker, "first") as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 3)
            await reader.has_seen(3)
            await asyncio.to_thread(server.lose_machine)
            async with worker(broker, "second") as second:
                [again] = await once_there(second.claim)
                assert (again.request_id, again.next_index) == (request.request_id, 0), "the test should show a loss"
                await second.generate(again, 6, finish=True)
        assert numbers(reader.seen) == list(range(100, 106))

    @rows("everysec")
    async def test_tokens_that_were_appended_after_the_last_sync_are_lost_and_sent_again_by_their_engine(
        self, server: WatchedServer, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The disk is late: the machine dies before the next sync."""
        request = spec()
        await gateway.accept(request)
        async with reading(gateway, request, keeps_spec=False) as reader, worker(broker) as engine:
            [claim] = await engine.claim()
            await engine.append(claim, 0, ENTRIES[:2])
            await all_synced(server)
            server.be_late()
            await engine.append(claim, 2, ENTRIES[2:4])
            await reader.has_seen(4)
            await asyncio.to_thread(server.lose_machine)
            outcome = await appended(engine, claim, 4, ENTRIES[4:])
            assert (outcome.kind, outcome.next_index) == (AppendKind.GAP, 2), "the test should show a loss"
            assert (await appended(engine, claim, 2, ENTRIES[2:])).kind is AppendKind.OK
            assert (await appended(engine, claim, 6, END)).kind is AppendKind.OK
        assert numbers(reader.seen) == list(range(100, 106))

    @rows("always", "always and WAIT_FSYNC")
    async def test_nothing_that_was_answered_is_lost(
        self, server: WatchedServer, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The disk is as it is: the machine dies right behind the last answer. Lost entries could not be restored."""
        running, waiting = spec(), spec()
        await gateway.accept(running)
        async with reading(gateway, running, keeps_spec=False) as reader, worker(broker) as engine:
            [claim] = await engine.claim()
            for index in range(4):
                assert (await engine.append(claim, index, ENTRIES[index : index + 1])).kind is AppendKind.OK
            await gateway.accept(waiting)
            await asyncio.to_thread(server.lose_machine)
            assert await length(broker, running) == 4
            assert await length(broker, waiting) == 0
            assert (await appended(engine, claim, 4, [*ENTRIES[4:], *END])).kind is AppendKind.OK
        assert numbers(reader.seen) == list(range(100, 106))

    @rows("always", "always and WAIT_FSYNC")
    async def test_what_the_disk_does_not_have_yet_was_not_answered(
        self, server: WatchedServer, broker: Broker, gateway: GatewaySession
    ) -> None:
        """The disk is stuck: the machine dies in the middle of a sync. What is lost was never acknowledged."""
        running, waiting = spec(), spec()
        await gateway.accept(running)
        async with reading(gateway, running, keeps_spec=False) as reader, worker(broker) as engine:
            [claim] = await engine.claim()
            await engine.append(claim, 0, ENTRIES[:2])
            await reader.has_seen(2)
            async with unanswered(server, gateway.accept(waiting), engine.append(claim, 2, ENTRIES[2:4])) as asked:
                assert len(reader.seen) == 2
                server.kill()
                answers = await asyncio.gather(*asked, return_exceptions=True)
                assert [type(answer) for answer in answers] == [Unavailable, Unavailable]
                await asyncio.to_thread(server.lose_machine)
            assert await length(broker, running) == 2
            assert not await is_known(broker, waiting)
            assert (await appended(engine, claim, 2, [*ENTRIES[2:], *END])).kind is AppendKind.OK
        assert numbers(reader.seen) == list(range(100, 106))


@rows("always", "always and WAIT_FSYNC")
async def test_nothing_is_answered_before_the_disk_has_it(
    server: WatchedServer, broker: Broker, gateway: GatewaySession
) -> None:
    """The disk is stuck and recovers: then the answers come, and a machine that dies takes none of them back."""
    running, waiting = spec(), spec()
    await gateway.accept(running)
    async with reading(gateway, running, keeps_spec=False) as reader, worker(broker) as engine:
        [claim] = await engine.claim()
        async with unanswered(server, gateway.accept(waiting), engine.append(claim, 0, ENTRIES[:4])) as asked:
            assert not reader.seen
            server.recover()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*asked)
        await reader.has_seen(4)
        await asyncio.to_thread(server.lose_machine)
        assert await length(broker, running) == 4
        assert await length(broker, waiting) == 0
        assert (await appended(engine, claim, 4, [*ENTRIES[4:], *END])).kind is AppendKind.OK
    assert numbers(reader.seen) == list(range(100, 106))


@asynccontextmanager
async def unanswered(
    server: WatchedServer, *asked: Coroutine[Any, Any, object]
) -> AsyncIterator[list[asyncio.Task[object]]]:
    """The disk gets stuck, and none of what is asked then has an answer."""
    server.get_stuck()
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        await eventually(lambda: server.met("stuck") > 0)
        done, _ = await asyncio.wait(tasks, timeout=STUCK_S)
        assert not done
        yield tasks
    finally:
        server.recover()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@rows("everysec and WAIT_FSYNC")
async def test_what_a_server_answers_too_early_is_lost_when_the_machine_dies(
    server: WatchedServer, broker: Broker, gateway: GatewaySession
) -> None:
    """The disk is stuck before the request comes, so an answer is one too early: the machine dies before the sync ends,
    and has nothing of it. A server that keeps its promise doesn't answer.
    """
    for _ in range(5):
        request = spec()
        await all_synced(server)
        server.get_stuck()
        with suppress(Unavailable):
            await gateway.accept(request)
            break
        server.recover()
    else:
        pytest.skip("this server answers WAITAOF under everysec after the sync only: docs/durability.md may say so")
    await asyncio.to_thread(server.lose_machine)
    assert not await is_known(broker, request)
    await once_there(partial(gateway.accept, request))
    assert await is_known(broker, request)


@rows("everysec and WAIT_FSYNC")
async def test_what_a_sync_under_way_holds_back_is_not_answered(
    server: WatchedServer, broker: Broker, gateway: GatewaySession
) -> None:
    """The disk is stuck. Without the wait it would be answered, and lost with the process."""
    for _ in range(5):
        request = spec()
        await begin_a_sync(server, gateway)
        before = server.num_written()
        [refusal] = await asyncio.gather(gateway.accept(request), return_exceptions=True)
        if isinstance(refusal, Unavailable):
            break
        # This machine was too busy: two seconds were over, then the server writes.
        assert server.num_written() > before
        server.recover()
        await all_synced(server)
    assert "its own disk" in str(refusal)
    server.recover()
    await once_there(partial(gateway.accept, request))
    assert await is_known(broker, request)
