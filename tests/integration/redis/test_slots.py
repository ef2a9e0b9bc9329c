"""Slots that move between masters while requests run: MOVED, ASK, TRYAGAIN, CLUSTERDOWN are waits and nothing worse."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_DEADLINE, FINISH_REASON_STOP, REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, Claim, GatewaySession, RequestNotFound, StreamsSettings, Unavailable
from pagestream_streams.connection import connection
from pagestream_streams.connection.cluster import ClusterTopology
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.embedded import ServerBinary
from pagestream_streams.connection.scripts import VIEW
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import (
    FAST,
    MODEL,
    STILL,
    TENANT,
    Worker,
    append_of,
    card,
    ending,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.slot_moves import SlotMove, without_owner
from support.redis.topologies import Topology, fresh, running_cluster

HERE = Partition(MODEL, 0)
WAITING = dataclasses.replace(FAST, wait_replicas=1, wait_timeout_ms=2000, lease_ms=6000)
# A lease that no busy machine lets lapse.
PATIENT = dataclasses.replace(FAST, lease_ms=2000)
PARTITIONS = 6
COUNT = 150
LAST = 20
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def topology(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """A cluster of its own: slots lie elsewhere afterwards."""
    with running_cluster(tmp_path_factory.mktemp("slots"), seven) as running:
        yield running


@pytest.fixture
async def broker(topology: Topology) -> AsyncIterator[Broker]:
    async with await Broker.connect(fresh(topology), FAST) as broker:
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
    topology: Topology, settings: StreamsSettings, disturb: Callable[[Broker], Awaitable[None]]
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
                await disturb(broker)
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
            calls = [Call(VIEW, Partition(MODEL, number).prefix, ("any", TENANT)) for number in range(PARTITIONS)]
            for attempt in (broker.connection.run_many(calls), broker.connection.execute("TIME")):
                with suppress(Unavailable):
                    answers += bool(await attempt)
        return answers

    async with asyncio.TaskGroup() as running:
        asking = [running.create_task(ask()) for _ in range(20)]
        for _ in range(100):
            await link.cluster.aclose()
            await asyncio.sleep(0.005)
        ended.set()
    assert sum(task.result() for task in asking) > 0


async def test_a_closed_cluster_has_no_connection(topology: Topology) -> None:
    """Though redis-py counted it as closed already when the slots were read again."""
    broker = await Broker.connect(fresh(topology), FAST)
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


@pytest.mark.parametrize("settings", [FAST, WAITING], ids=["unwaited", "a replica waited for"])
async def test_streams_go_on_while_their_slots_move(topology: Topology, settings: StreamsSettings) -> None:
    """Keys go one by one: whatever master has which key of a partition, and a second time on the way back."""

    async def move_two(_: Broker) -> None:
        for number in (0, 1, 0):
            assert await move_slowly(topology, Partition(MODEL, number)) > 3

    await stream_through(topology, settings, move_two)


async def test_streams_go_on_when_a_slot_has_had_no_owner(topology: Topology) -> None:
    """CLUSTERDOWN for longer than a lease, and the other partitions don't notice."""

    async def take_away(broker: Broker) -> None:
        with without_owner(topology, HERE):
            end = asyncio.get_running_loop().time() + 1.2 * PATIENT.lease_ms / 1000
            refused = 0
            while asyncio.get_running_loop().time() < end:
                with pytest.raises(Unavailable):
                    await broker.connection.run(VIEW, HERE.prefix, "any", TENANT)
                refused += 1
            assert refused > 1

    await stream_through(topology, PATIENT, take_away)


async def test_the_other_partitions_do_not_notice(topology: Topology) -> None:
    """While one has no owner: requests of the others are accepted, claimed, ended by time, and go on elsewhere."""
    async with await Broker.connect(fresh(topology), PATIENT) as broker:
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
                await asyncio.sleep(1.2 * PATIENT.lease_ms / 1000)
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
                await patiently_accept(gateway, spec())


async def patiently_accept(gateway: GatewaySession, request: RequestSpec) -> None:
    """Repeat the call under the same id, as a client does after UNAVAILABLE."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await gateway.accept(request)
            except Unavailable:
                await asyncio.sleep(0.05)


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


async def test_a_script_that_named_one_key_would_find_nothing(
    topology: Topology, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why each script names two: with one, ASK sends it to the node that has not got the request yet, and what it
    writes there is in the keys' way (BUSYKEY).
    """
    async with await Broker.connect(topology.url, STILL) as still, GatewaySession(still) as gateway:
        request = spec()
        await gateway.accept(request)
        move = SlotMove.of(topology, HERE)
        move.begin()
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_keys", lambda key: (1, key))
            with pytest.raises(RequestNotFound):
                await still.view(request.request_id, TENANT)
        with pytest.raises(Unavailable):
            await still.view(request.request_id, TENANT)
        move.call_off()
        assert (await still.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED
