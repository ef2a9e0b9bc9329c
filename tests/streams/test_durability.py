"""What each setting admits when a process dies, or its machine: the rows of docs/durability.md, each shown.

A server's syncs are recorded by `synced_files.c`, which is preloaded: so the death of its machine can be simulated.
What this doesn't model: the machine keeps the names of files as the server gave them, and what the disk has of a file
is its beginning. How the disk is slow is each test's own choice: "late" makes the time between two syncs as long as the
test needs it, "stuck" makes one sync take so long.
"""

import asyncio
import dataclasses
import shutil
import subprocess
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
    ServerBinary,
    StreamsSettings,
    Unavailable,
)
from pagestream_streams.connection import LEAST_VERSION, find_servers
from redis.crc import key_slot
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    TENANT,
    Worker,
    card,
    ending,
    eventually,
    numbers,
    once_there,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.servers import growing_file, newest_server, skip_for_want_of
from support.redis.topologies import HOST, Server, Topology, num_replicas, running, running_cluster, until
from support.redis.topologies import server as plain_server

pytestmark = pytest.mark.served

_SOURCE = Path(__file__).parent / "synced_files.c"


def built_watch(folder: Path) -> Path:
    """Compile the library to preload; skip the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        skip_for_want_of("cc", "no C compiler (cc) is on the PATH: what a server syncs can't be watched")
        raise AssertionError
    library = folder / "synced_files.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, _SOURCE], check=True, timeout=LIMIT_S)
    return library


class WatchedServer(Server):
    """A server whose process or machine can die; with the machine, its files end where they were last synced."""

    @classmethod
    def of(cls, binary: ServerBinary, library: Path, folder: Path, appendfsync: str) -> "WatchedServer":
        """Create it stopped."""
        # Paths in the record are without symbolic links.
        folder = folder.resolve()
        plain = plain_server(binary, folder, "--appendfsync", appendfsync)
        return cls(folder, ["env", f"LD_PRELOAD={library}", f"SYNCED_FILES={folder}", *plain.command], plain.port)

    @property
    def url(self) -> str:
        """Address for Broker.connect."""
        return f"redis://{HOST}:{self.port}/0"

    def start_and_wait(self) -> None:
        """Start it and wait until it has loaded its files."""
        self.start()
        until(self.answers, "the watched server", [self])

    # -- the disk

    def be_late(self) -> None:
        """From now on syncs return at once without syncing: as if the next sync were still to come."""
        (self.folder / "late").touch()

    def get_stuck(self) -> None:
        """From now on syncs block."""
        (self.folder / "stuck").touch()

    def recover(self) -> None:
        """From now on syncs work."""
        for word in ("late", "stuck"):
            (self.folder / word).unlink(missing_ok=True)

    def met(self, word: str) -> int:
        """Return the number of syncs in a state of the disk so far: "sync", "late" or "stuck"."""
        return sum(kind == word for kind, _, _ in self._record())

    def synced(self) -> dict[Path, int]:
        """Return the size at its last sync of each file that was ever synced."""
        sizes: dict[Path, int] = {}
        for kind, first, second in self._record():
            if kind == "sync":
                sizes[Path(second)] = int(first)
            elif kind == "rename" and Path(first) in sizes:
                sizes[Path(second)] = sizes.pop(Path(first))
        return sizes

    def num_written(self) -> int:
        """Return the size of the growing append-only file in bytes."""
        return growing_file(self.folder).stat().st_size

    def num_synced(self) -> int:
        """Return how many of those bytes were synced."""
        return self.synced().get(growing_file(self.folder), 0)

    def has_written(self) -> bool:
        """Return whether all acknowledged writes are in the file, synced or not."""
        info = self._persistence()
        return not int(info["aof_buffer_length"]) and not int(info["aof_pending_bio_fsync"])

    # -- deaths

    def lose_process(self) -> None:
        """Kill the process; all that it has written is there at the next start."""
        self.kill()
        self.recover()
        self.start_and_wait()

    def lose_machine(self) -> None:
        """Kill the machine: the files end where they were last synced; one that never was is empty."""
        self.kill()
        self.recover()
        sizes = self.synced()
        for path in (*self.folder.glob("appendonly.aof*"), *self.folder.glob("appendonlydir/*")):
            with path.open("rb+") as file:
                file.truncate(min(path.stat().st_size, sizes.get(path, 0)))
        self.start_and_wait()

    def _record(self) -> list[tuple[str, str, str]]:
        try:
            lines = (self.folder / "synced").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(kind, first, second) for kind, first, second in (line.split("\t") for line in lines)]

    def _persistence(self) -> dict[str, str]:
        answer = self.ask("INFO", "persistence")
        assert isinstance(answer, dict)
        return {str(name): str(value) for name, value in answer.items()}


def is_watched(binary: ServerBinary, library: Path, folder: Path) -> bool:
    """Return whether its syncs are recorded: a statically linked binary does not call the library's."""
    one = WatchedServer.of(binary, library, folder, "always")
    try:
        one.start_and_wait()
        one.ask("SET", "key", "value")
        return growing_file(one.folder) in one.synced()
    finally:
        one.kill()


# -- the rows of the table


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
        pytest.param(ROWS[setting], age, id=f"{setting}-{age}", marks=[] if age == "newest" else [pytest.mark.slow])
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


# -- `wait_fsync` with `wait_replicas`: a server and its replica are asked in an order in which both can answer.


BOTH = dataclasses.replace(CALM, wait_fsync=True, wait_replicas=1)
SHIPPED_MS = StreamsSettings().wait_timeout_ms


@pytest.fixture(params=["always", pytest.param("everysec", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Topology]]:
    """A master and a replica, both with append-only files, by their appendfsync."""
    binary = newest_server()
    if binary.version < (7, 2):
        skip_for_want_of("redis7", "WAITAOF is from 7.2 on")
    options = "--appendfsync", request.param, "--repl-diskless-sync-delay", "0"
    master = plain_server(binary, tmp_path / "master", *options)
    replica = plain_server(binary, tmp_path / "replica", *options, "--replicaof", f"127.0.0.1 {master.port}")
    with running(Topology(f"redis://127.0.0.1:{master.port}/0", [master, replica])) as topology:
        for each in topology.servers:
            each.start()
        until(lambda: master.answers() and num_replicas(master) == 1, "the replica to follow", topology.servers)
        yield request.param, topology


async def test_what_is_healthy_is_accepted_in_time(pair: tuple[str, Topology]) -> None:
    """With `always` also within less than the second in which a replica reports by itself.

    By its own reports it would be in time once, and late for the next one, which is waited for from then on.
    """
    appendfsync, topology = pair
    limit_ms, count = (700, 3) if appendfsync == "always" else (SHIPPED_MS, 2)
    async with await Broker.connect(topology.url, dataclasses.replace(BOTH, wait_timeout_ms=limit_ms)) as broker:
        await broker.publish_model(card(), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            in_a_row, tries = 0, 0
            while in_a_row < count:
                tries += 1
                assert tries < 30
                try:
                    await gateway.accept(spec())
                except Unavailable:  # a machine that is late
                    in_a_row = 0
                else:
                    in_a_row += 1
            if appendfsync == "always":
                [claim] = await engine.claim()
                await engine.generate(claim, 1, finish=True)
                assert numbers(await read_all(gateway, claim.request_id)) == [100]


# -- On a cluster an idempotency key has a node of its own, and is waited for there as its request's record is.


WAITING = dataclasses.replace(CALM, wait_replicas=1, wait_timeout_ms=1500)


@pytest.fixture
def topology(seven: ServerBinary, tmp_path: Path) -> Iterator[Topology]:
    """Two masters, each with a replica."""
    with running_cluster(tmp_path, seven, masters=2) as topology:
        yield topology


def nodes_of(topology: Topology, key: str) -> list[Server]:
    """Return a key's master and its replicas."""
    by_port = {each.port: each for each in topology.servers}
    slots: Any = topology.masters()[0].ask("CLUSTER", "SLOTS")
    for first, last, *nodes in slots:
        if first <= key_slot(key.encode()) <= last:
            return [by_port[node[1]] for node in nodes]
    raise AssertionError(key)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_key_without_a_replica_accepts_nothing(topology: Topology) -> None:
    async with await Broker.connect(topology.url, WAITING) as broker:
        await broker.publish_model(card(), partitions=1)
        keyspace = broker.connection.keyspace
        home = nodes_of(topology, (await broker.directory.locate(spec().request_id)).prefix)[0]
        keys = map(str, range(99))
        elsewhere = next(key for key in keys if nodes_of(topology, keyspace.idempotency(TENANT, key))[0] is not home)
        async with GatewaySession(broker) as gateway:
            assert await gateway.accept_once(spec(key=elsewhere), body_digest="d")
            name = keyspace.idempotency(TENANT, elsewhere)
            await eventually(lambda: len(nodes_of(topology, name)) == 2)  # the replicas become known one by one
            master, replica = nodes_of(topology, name)
            replica.kill()
            await eventually(lambda: num_replicas(master) == 0)
            assert await gateway.accept(spec()), "records are on the other node"
            other = next(key for key in keys if nodes_of(topology, keyspace.idempotency(TENANT, key))[0] is master)
            with pytest.raises(Unavailable, match="1 replicas"):
                await gateway.accept_once(spec(key=other), body_digest="d")
