"""What only a cluster has: partitions on different masters, and slots that move from one to the other."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_DEADLINE, FINISH_REASON_STOP, REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import (
    Broker,
    Claim,
    GatewaySession,
    StreamsSettings,
    Unavailable,
    scripts,
)
from pagestream_streams.connection import Call, ClusterTopology
from pagestream_streams.protocol import Partition
from pagestream_streams.scripts import Script
from redis.crc import key_slot
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    MODEL,
    STILL,
    TENANT,
    Worker,
    append_of,
    card,
    ending,
    eventually,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import HOST, Server, Topology, fresh

pytestmark = pytest.mark.served


async def patiently_accept(gateway: GatewaySession, partition: int) -> str:
    """Repeat the call under the same id, as a client does after UNAVAILABLE."""
    request = spec(partition=partition)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await gateway.accept(request)
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                return request.request_id


async def test_partitions_lie_on_different_masters_and_all_work(cluster: Topology) -> None:
    async with await Broker.connect(fresh(cluster), CALM) as broker:
        await broker.publish_model(card(MODEL), partitions=8)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            ids = [await patiently_accept(gateway, partition) for partition in range(8)]
            reading = [asyncio.create_task(read_all(gateway, request_id)) for request_id in ids]
            for claim in await engine.claim(8):
                await engine.generate(claim, 3, finish=True)
            for log in await asyncio.gather(*reading):
                assert numbers(log) == [100, 101, 102]
        assert sum(int(str(each.ask("DBSIZE"))) > 0 for each in cluster.masters()) >= 2


# -- Move a slot of a real cluster between masters, step by step, as redis-cli --cluster reshard does.


MIGRATE_LIMIT_MS = 5000


@dataclass
class SlotMove:
    """One slot and its source and target."""

    topology: Topology
    slot: int
    source: Server
    target: Server

    @classmethod
    def of(cls, topology: Topology, where: Partition) -> "SlotMove":
        """Plan a move from the master that has a partition to another one."""
        slot = key_slot(where.prefix.encode())
        masters = topology.masters()
        source = next(each for each in masters if slot in slots_of(each))
        return cls(topology, slot, source, next(each for each in masters if each is not source))

    def begin(self) -> None:
        """Begin: from now on the source redirects with ASK for keys that it doesn't have."""
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", identity(self.source))
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", identity(self.target))

    def move_some(self, count: int) -> int:
        """Move up to `count` keys; return how many."""
        keys = self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, count)
        if not isinstance(keys, list) or not keys:
            return 0
        self.source.ask("MIGRATE", HOST, self.target.port, "", 0, MIGRATE_LIMIT_MS, "KEYS", *keys)
        return len(keys)

    def end(self) -> None:
        """End the move: from now on the source redirects with MOVED."""
        for each in (self.target, self.source, *self.topology.masters()):
            each.ask("CLUSTER", "SETSLOT", self.slot, "NODE", identity(self.target))

    def call_off(self) -> None:
        """Cancel the move; the source keeps the slot."""
        for each in (self.source, self.target):
            each.ask("CLUSTER", "SETSLOT", self.slot, "STABLE")

    def all_at_once(self) -> None:
        """Move the slot with all keys."""
        self.begin()
        while self.move_some(100):
            pass
        self.end()


def identity(each: Server) -> str:
    """Return a node's id."""
    answer = each.ask("CLUSTER", "MYID")
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def slots_of(master: Server) -> set[int]:
    """Return the slots that a master serves by its own table."""
    answer = master.ask("CLUSTER", "NODES")
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    [own] = [line.split() for line in text.splitlines() if "myself" in line]
    found: set[int] = set()
    for part in own[8:]:
        if not part.startswith("["):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def without_owner(topology: Topology, where: Partition) -> Iterator[int]:
    """Leave a partition's slot without an owner inside the block: CLUSTERDOWN."""
    slot = key_slot(where.prefix.encode())
    masters = topology.masters()
    owner = next(each for each in masters if slot in slots_of(each))
    for each in masters:
        each.ask("CLUSTER", "DELSLOTS", slot)
    try:
        yield slot
    finally:
        owner.ask("CLUSTER", "ADDSLOTS", slot)


# -- Slots that move between masters while requests run: MOVED, ASK, TRYAGAIN, CLUSTERDOWN are waits and nothing worse.


HERE = Partition(MODEL, 0)
WAITING = dataclasses.replace(CALM, wait_replicas=1, wait_timeout_ms=5000)
PARTITIONS = 6
COUNT = 60
LAST = 20


@pytest.fixture
def topology(cluster: Topology) -> Topology:
    """The session's cluster: slots lie elsewhere afterwards, and none is half moved or without an owner."""
    return cluster


@pytest.fixture
async def broker(topology: Topology) -> AsyncIterator[Broker]:
    async with await Broker.connect(fresh(topology), CALM) as broker:
        await broker.publish_model(card(MODEL), partitions=PARTITIONS)
        yield broker


async def generate_stubbornly(engine: Worker, claim: Claim, disturbed: asyncio.Event) -> None:
    """Tokens one by one, the last ones after the disturbance; an append without an answer is repeated, from where the
    log says, as an engine does.
    """
    entries = tokens(range(100, 100 + COUNT))
    entries += ending(entries[-1].digest, count=COUNT)
    index = 0
    while index < len(entries):
        if index == COUNT - LAST:
            await disturbed.wait()
        try:
            [outcome] = await engine.session.append([append_of(claim, index, entries[index : index + 1])])
        except Unavailable:
            await asyncio.sleep(0.02)
            continue
        assert not outcome.lost, outcome
        index = outcome.next_index
        await asyncio.sleep(0.01)


async def move_slowly(topology: Topology, where: Partition) -> int:
    """Key by key, with time for others between; returns how many moved."""
    move = SlotMove.of(topology, where)
    await asyncio.to_thread(move.begin)
    moved = 0
    while some := await asyncio.to_thread(move.move_some, 1):
        moved += some
        await asyncio.sleep(0.01)
    await asyncio.to_thread(move.end)
    return moved


async def stream_through(
    topology: Topology, settings: StreamsSettings, disturb: Callable[[Broker, GatewaySession, Worker], Awaitable[None]]
) -> None:
    """Requests in every partition run while something is done to the cluster: every token once and in order, no
    claim taken from a living engine, no error but waits.
    """
    async with await Broker.connect(fresh(topology), settings) as broker:
        await broker.publish_model(card(MODEL), partitions=PARTITIONS)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            requests = [spec(partition=number) for number in range(PARTITIONS)]
            for request in requests:
                await gateway.accept(request)
            claims = await engine.claim(len(requests))
            disturbed = asyncio.Event()
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as running:
                logs = [running.create_task(read_all(gateway, each.request_id, limit_s=LIMIT_S)) for each in requests]
                for claim in claims:
                    running.create_task(generate_stubbornly(engine, claim, disturbed))
                await disturb(broker, gateway, engine)
                disturbed.set()
            for log in logs:
                assert numbers(log.result()) == list(range(100, 100 + COUNT))
                assert log.result()[-1].end.reason == FINISH_REASON_STOP
            # Not `engine.lost`: an end whose reply is lost (no replica in time) counts there until it is sent again.
            views = [await broker.view(each.request_id, TENANT) for each in requests]
            assert [view.attempts for view in views] == [1] * PARTITIONS


async def test_connections_that_are_closed_under_their_commands(topology: Topology, broker: Broker) -> None:
    """redis-py does that whenever it looks for slots anew: a lost connection like any other."""
    link = broker.connection.topology
    assert isinstance(link, ClusterTopology)
    ended = asyncio.Event()

    async def ask() -> int:
        answers = 0
        while not ended.is_set():
            calls = [
                Call(scripts.VIEW, Partition(MODEL, number).prefix, ("any", TENANT)) for number in range(PARTITIONS)
            ]
            for attempt in (broker.connection.run_many(calls), broker.connection.execute("TIME")):
                with suppress(Unavailable):
                    answers += bool(await attempt)
        return answers

    async with asyncio.TaskGroup() as running:
        asking = [running.create_task(ask()) for _ in range(8)]
        for _ in range(30):
            await link.cluster.aclose()
            await asyncio.sleep(0.005)
        ended.set()
    assert sum(task.result() for task in asking) > 0


async def test_a_closed_cluster_has_no_connection(topology: Topology) -> None:
    """Though redis-py counted it as closed already when the slots were read again."""
    broker = await Broker.connect(fresh(topology), CALM)
    link = broker.connection.topology
    assert isinstance(link, ClusterTopology)
    await link.cluster.aclose()
    await link.cluster.nodes_manager.initialize()
    nodes = [*link.cluster.nodes_manager.startup_nodes.values(), *link.cluster.get_nodes()]
    assert any(socket.is_connected for node in nodes for socket in node._connections)
    await broker.close()
    assert not any(socket.is_connected for node in nodes for socket in node._connections)


async def test_a_node_that_has_left_keeps_no_connection(broker: Broker) -> None:
    """It leaves while a command is on its way to it: neither redis-py nor `close` knows it any more."""
    link = broker.connection.topology
    assert isinstance(link, ClusterTopology)
    node = link.cluster.get_primaries()[0]
    asking = asyncio.create_task(link._batch(node, [("PING",)]))
    await asyncio.sleep(0)
    del link.cluster.nodes_manager.nodes_cache[node.name]
    assert await asking == [True]
    assert node._connections
    assert not node._connections[0].is_connected


@pytest.mark.parametrize(
    "settings",
    [pytest.param(CALM, id="unwaited", marks=pytest.mark.slow), pytest.param(WAITING, id="a replica waited for")],
)
async def test_streams_go_on_while_their_slots_move(topology: Topology, settings: StreamsSettings) -> None:
    """Keys go one by one: whatever master has which key of a partition, and a second time on the way back."""

    async def move_two(*_: object) -> None:
        for number in (0, 1, 0):
            assert await move_slowly(topology, Partition(MODEL, number)) > 3

    await stream_through(topology, settings, move_two)


async def test_streams_go_on_when_a_slot_has_had_no_owner(topology: Topology) -> None:
    """CLUSTERDOWN for longer than a lease, and the other partitions don't notice."""

    async def take_away(broker: Broker, gateway: GatewaySession, engine: Worker) -> None:
        timers = engine.session.lease, engine.session.sweeper, gateway.heartbeat, gateway.sweeper
        for timer in timers:
            await timer.stop()
        # As if it had had none for longer than a lease, and than a hole in the sweeps.
        execute = broker.connection.execute
        await execute("HINCRBY", f"{HERE.prefix}meta", "swept", -2 * CALM.sweep_gap_ms)
        await execute("ZADD", f"{HERE.prefix}leases", "XX", 1, engine.session.engine_id)
        with without_owner(topology, HERE):
            for timer in timers:
                timer.start()
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await broker.connection.run(scripts.VIEW, HERE.prefix, "any", TENANT)

    await stream_through(topology, CALM, take_away)


async def test_the_other_partitions_do_not_notice(topology: Topology) -> None:
    """While one has no owner: requests of the others are accepted, claimed, ended by time, and go on elsewhere."""
    async with await Broker.connect(fresh(topology), CALM) as broker:
        await broker.publish_model(card(MODEL), partitions=PARTITIONS)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            held = spec()
            await gateway.accept(held)
            [claim] = await engine.claim()
            with without_owner(topology, HERE):
                late = spec(partition=2, deadline_ms=300)
                await gateway.accept(late)
                assert (await read_all(gateway, late.request_id))[-1].end.reason == FINISH_REASON_DEADLINE
                new = spec(partition=1)
                await gateway.accept(new)
                other = await patiently_claim(engine)
                assert other.request_id == new.request_id
                leases = f"{Partition(MODEL, 1).prefix}leases"
                before = await broker.connection.execute("ZSCORE", leases, engine.session.engine_id)

                async def is_renewed() -> bool:
                    now = await broker.connection.execute("ZSCORE", leases, engine.session.engine_id)
                    return float(now) > float(before)

                await eventually(is_renewed)
                await engine.generate(other, 3, finish=True)
                assert numbers(await read_all(gateway, new.request_id)) == [100, 101, 102]
            at_once = asyncio.Event()
            at_once.set()
            await generate_stubbornly(engine, claim, at_once)
            assert numbers(await read_all(gateway, held.request_id)) == list(range(100, 100 + COUNT))
            assert engine.lost == []


async def test_moved(topology: Topology, broker: Broker) -> None:
    """The slot is elsewhere by the next command."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        SlotMove.of(topology, HERE).all_at_once()
        [claim] = await engine.claim()
        SlotMove.of(topology, HERE).all_at_once()
        await engine.generate(claim, 3)
        SlotMove.of(topology, HERE).all_at_once()
        await engine.generate(dataclasses.replace(claim, next_index=3, digest=tokens(range(100, 103))[-1].digest), 5)
        assert (await broker.view(request.request_id, TENANT)).next_index == 5


async def test_moved_to_who_waits_for_a_replica(topology: Topology) -> None:
    async with await Broker.connect(fresh(topology), WAITING) as careful:
        await careful.publish_model(card(MODEL), partitions=PARTITIONS)
        async with GatewaySession(careful) as gateway:
            for _ in range(3):
                SlotMove.of(topology, HERE).all_at_once()
                await patiently_accept_slots(gateway, spec())


async def patiently_accept_slots(gateway: GatewaySession, request: RequestSpec) -> None:
    """Repeat the call under the same id, as a client does after UNAVAILABLE."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await gateway.accept(request)
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def patiently_claim(engine: Worker) -> Claim:
    """As an engine does: again after a pause."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(Unavailable):
                [claim] = await engine.claim()
                return claim
            await asyncio.sleep(0.05)


async def half_moved(topology: Topology, gateway: GatewaySession) -> tuple[SlotMove, RequestSpec]:
    """A request's keys, some on the one node and some on the other."""
    request = spec()
    await gateway.accept(request)
    move = SlotMove.of(topology, HERE)
    move.begin()
    assert move.move_some(2) == 2
    assert move.source.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot) != 0
    return move, request


async def test_ask_and_tryagain(topology: Topology, broker: Broker) -> None:
    """While keys lie on two nodes no script runs on either; a single key is found where it is (ASK)."""
    async with await Broker.connect(topology.url, STILL) as still, GatewaySession(still) as gateway:
        move, request = await half_moved(topology, gateway)
        before = move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot)
        second = spec()
        for attempt in (gateway.accept(second), still.view(request.request_id, TENANT)):
            with pytest.raises(Unavailable, match="the cluster is changing"):
                await attempt
        assert await still.connection.execute("EXISTS", HERE.request(request.request_id)) == 1
        assert move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot) == before
        while move.move_some(1):
            pass
        move.end()
        await gateway.accept(second)
        assert (await still.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED
        assert await still.connection.execute("XLEN", f"{HERE.prefix}queue:0") == 2


async def test_a_script_that_named_one_key_would_find_nothing(topology: Topology, broker: Broker) -> None:
    """Why each script names two: with one, ASK sends it to the node that has not got the request yet, and what it
    writes there is in the keys' way (BUSYKEY).
    """
    async with await Broker.connect(topology.url, STILL) as still, GatewaySession(still) as gateway:
        request = spec()
        await gateway.accept(request)
        looks = Script("looks", "return redis.call('EXISTS', KEYS[1] .. 'req:' .. ARGV[1])")
        assert await still.connection.run(looks, HERE.prefix, request.request_id) == 1
        move = SlotMove.of(topology, HERE)
        move.begin()
        assert await still.connection.execute("EVAL", looks.text, 1, HERE.prefix, request.request_id) == 0
        with pytest.raises(Unavailable):
            await still.connection.run(looks, HERE.prefix, request.request_id)
        move.call_off()
        assert (await still.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED
