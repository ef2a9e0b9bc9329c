"""What a real server answers when it can't serve, and what becomes of a request when an answer gets lost: each of them
is Unavailable and nothing worse, and trying again is harmless.
"""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import AppendKind, Broker, EmbeddedRedis, GatewaySession, ServerBinary, Unavailable, scripts
from pagestream_streams.protocol import Partition
from pagestream_streams.scripts import Script
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from support.network.proxy import Proxy
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
    home_of,
    numbers,
    once_there,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.servers import wait_written
from support.redis.topologies import Topology, running, running_tls_server, server, until

pytestmark = pytest.mark.served

T = TypeVar("T")

QUICK = dataclasses.replace(CALM, command_timeout_s=1.0)
# Says nothing by itself: a test knows whose command it was that the network heard.
QUIET = dataclasses.replace(STILL, command_timeout_s=5.0)
BUSY_LOOP = "while true do end"


@pytest.fixture
async def network(redis_server: EmbeddedRedis, broker: Broker) -> AsyncIterator[Proxy]:
    """Stands between a broker of its own and the server."""
    async with Proxy(redis_server.port) as flaky:
        yield flaky


@pytest.fixture
async def cut(network: Proxy) -> AsyncIterator[Broker]:
    """A broker behind the network."""
    async with await Broker.connect(f"redis://{network.target}/0", QUICK) as behind:
        yield behind


async def test_a_busy_script_is_an_outage_that_ends(broker: Broker, redis_server: EmbeddedRedis) -> None:
    """BUSY: another client's script holds the server; ours are refused until it is killed."""
    async with await Broker.connect(redis_server.url, QUICK) as hurried:
        await hold_up(hurried, redis_server)


async def hold_up(broker: Broker, redis_server: EmbeddedRedis) -> None:
    async with Redis(port=redis_server.port) as other:
        await other.execute_command("CONFIG", "SET", "lua-time-limit", 20)
        looping = asyncio.create_task(other.execute_command("EVAL", BUSY_LOOP, 0))
        async with GatewaySession(broker) as gateway:
            request = spec()
            async with Redis(port=redis_server.port) as third:

                async def is_busy() -> bool:
                    try:
                        await third.execute_command("PING")
                    except ResponseError as error:
                        return str(error).startswith("BUSY")
                    return False

                await eventually(is_busy)
                with pytest.raises(Unavailable):
                    await gateway.accept(request)
                await third.execute_command("SCRIPT", "KILL")
            await asyncio.gather(looping, return_exceptions=True)
            await other.execute_command("CONFIG", "SET", "lua-time-limit", 5000)
            await gateway.accept(request)
            assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED


async def test_a_server_that_loads_its_files_is_an_outage_that_ends(tmp_path: Path, seven: ServerBinary) -> None:
    """LOADING: a server that was started again answers before it has read its file, once every 1024 keys."""
    one = server(seven, tmp_path / "data", "--key-load-delay", "200")
    with running(Topology(f"redis://127.0.0.1:{one.port}/0", [one])) as topology:
        one.start()
        until(one.answers, "the server")
        async with await Broker.connect(topology.url, CALM) as broker:
            await broker.publish_model(card(), partitions=2)
            await broker.connection.pipeline([("SET", f"ballast:{number}", "x") for number in range(6_000)])
            async with GatewaySession(broker) as gateway:
                request = spec()
                await gateway.accept(request)
                wait_written(topology.url)
                one.kill()
                one.start()
                refusals = 0
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        try:
                            await gateway.accept(request)
                        except Unavailable as error:
                            refusals += "LOADING" in str(error) or "loading" in str(error)
                            await asyncio.sleep(0.02)
                        else:
                            break
                assert refusals > 0
                assert (await broker.view(request.request_id, TENANT)).attempts == 0


async def test_a_server_that_loads_its_files_is_waited_for_at_the_start(tmp_path: Path, seven: ServerBinary) -> None:
    """LOADING, for longer than a server that is not there would be waited for."""
    one = server(seven, tmp_path / "data", "--key-load-delay", "200")
    patience = dataclasses.replace(CALM, connect_timeout_s=0.5)
    with running(Topology(f"redis://127.0.0.1:{one.port}/0", [one])) as topology:
        one.start()
        until(one.answers, "the server")
        async with await Broker.connect(topology.url, CALM) as broker:
            await broker.connection.pipeline([("SET", f"ballast:{number}", "x") for number in range(6_000)])
        wait_written(topology.url)
        one.kill()
        one.start()
        began = time.monotonic()
        async with asyncio.timeout(LIMIT_S):
            async with await Broker.connect(topology.url, patience) as broker:
                assert await broker.connection.execute("DBSIZE") >= 6_000
        assert time.monotonic() - began > patience.connect_timeout_s


async def test_a_read_only_replica_is_an_outage(broker: Broker) -> None:
    """READONLY: what was a master is a replica after a failover, and a connection to it has stayed open."""
    async with GatewaySession(broker) as gateway:
        request = spec()
        await broker.connection.execute("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(Unavailable):
                await gateway.accept(request)
        finally:
            await broker.connection.execute("REPLICAOF", "NO", "ONE")
        await gateway.accept(request)


async def test_an_accept_whose_reply_is_lost_is_completed_by_its_retry(
    broker: Broker, network: Proxy, cut: Broker
) -> None:
    """The script ran, and its caller never heard: the same id is queued once."""
    async with GatewaySession(cut) as gateway:
        request = spec()
        network.lose_answers()
        with pytest.raises(Unavailable):
            await gateway.accept(request)
        network.repair()
        await gateway.accept(request)
        assert await broker.connection.execute("XLEN", "ps:{test/model/0}:queue:0") == 1


async def test_an_append_whose_reply_is_lost_is_repeated_without_harm(
    broker: Broker, network: Proxy, cut: Broker
) -> None:
    async with GatewaySession(broker) as gateway, worker(cut) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        entries = tokens([100, 101])
        entries += ending(entries[-1].digest, count=2)
        append = append_of(claim, 0, entries)
        network.lose_answers()
        with pytest.raises(Unavailable):
            await engine.session.append([append])
        network.repair()
        [outcome] = await engine.session.append([append])
        assert outcome.kind is AppendKind.OK
        assert numbers(await read_all(gateway, request.request_id)) == [100, 101]


async def test_a_connection_that_is_reset_before_a_script(broker: Broker, network: Proxy, cut: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(cut) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        [entry] = tokens([100])
        append = append_of(claim, 0, [entry])
        network.reset()
        with pytest.raises(Unavailable):
            await engine.session.append([append])
        network.repair()
        [outcome] = await engine.session.append([append])
        assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 1)


@pytest.fixture
async def quiet(network: Proxy) -> AsyncIterator[Broker]:
    """A broker behind the network that speaks only when it is asked to."""
    async with await Broker.connect(f"redis://{network.target}/0", QUIET) as behind:
        yield behind


@contextmanager
def inside_a_call(server: EmbeddedRedis) -> Iterator[None]:
    """Stop the server: its sockets take commands, which it runs at the end of the block."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def num_heard(network: Proxy, script: Script) -> int:
    return sum(script.sha.encode() in said for said in network.client_chunks)


async def has_heard(network: Proxy, script: Script) -> None:
    await eventually(lambda: num_heard(network, script) > 0)


async def num_calls(broker: Broker, command: str) -> int:
    """How often the server has run it, for scripts as well."""
    statistics = await broker.connection.execute("INFO", "commandstats")
    return int(statistics.get(f"cmdstat_{command}", {}).get("calls", 0))


async def test_an_append_whose_connection_is_reset_in_the_middle_of_the_script_is_repeated_without_harm(
    broker: Broker, redis_server: EmbeddedRedis, network: Proxy, quiet: Broker
) -> None:
    """The script runs once with its caller gone; the same append once more finds its entries there."""
    async with GatewaySession(broker) as gateway, worker(quiet) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        entries = tokens([100, 101, 102])
        await engine.append(claim, 0, entries[:1])  # the server has the script
        before = await num_calls(broker, "xadd")
        network.client_chunks.clear()
        with inside_a_call(redis_server):
            appending = asyncio.create_task(engine.append(claim, 1, entries[1:]))
            await has_heard(network, scripts.APPEND)
            assert not appending.done()
            network.reset_clients()
            with pytest.raises(Unavailable, match="reset by peer"):
                await appending
        log = Partition(MODEL, 0).log(request.request_id)

        async def is_there() -> bool:
            return int(await broker.connection.execute("XLEN", log)) == 3

        await eventually(is_there)
        outcome = await once_there(lambda: engine.append(claim, 1, entries[1:]))
        assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 3)
        assert await num_calls(broker, "xadd") - before == 2
        outcome = await once_there(lambda: engine.append(claim, 3, ending(entries[-1].digest, count=3)))
        assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 5)
        read = await read_all(gateway, request.request_id)
        assert [entry.digest for entry in read[:3]] == [entry.digest for entry in entries]
        assert numbers(read) == [100, 101, 102]


async def test_an_accept_whose_connection_is_reset_in_the_middle_of_the_script_is_queued_once(
    broker: Broker, redis_server: EmbeddedRedis, network: Proxy, quiet: Broker
) -> None:
    """The session says it again by itself, on another connection: the id that the first one queued is known."""
    async with GatewaySession(quiet) as gateway, worker(broker) as engine:
        await gateway.accept(spec(partition=1))  # the server has the script
        request = spec()
        network.client_chunks.clear()
        with inside_a_call(redis_server):
            accepting = asyncio.create_task(gateway.accept(request))
            await has_heard(network, scripts.ACCEPT)
            assert not accepting.done()
            network.reset_clients()
        await accepting
        assert num_heard(network, scripts.ACCEPT) == 2
        await once_there(lambda: gateway.accept(request))
        assert await broker.connection.execute("XLEN", f"{Partition(MODEL, 0).prefix}queue:0") == 1
        claims = {claim.request_id: claim for claim in await engine.claim(2)}
        assert claims[request.request_id].attempts == 1
        await engine.generate(claims[request.request_id], 2, finish=True)
        assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []
        async with GatewaySession(broker) as other:
            assert numbers(await read_all(other, request.request_id)) == [100, 101]


async def claim_one_before(
    monkeypatch: pytest.MonkeyPatch, gateway: GatewaySession, engine: Worker, requests: list[RequestSpec]
) -> None:
    """Accept the requests behind another one that is claimed. The engine knows then what is first in each partition,
    and asks nothing more: its next call is one that claims.
    """
    monkeypatch.setattr(home_of(engine.session.claim_order), "LOOK_PAUSE_S", 0.0)
    first = spec(partition=0)
    for request in (first, *requests):
        await gateway.accept(request)
    await engine.session.wait_for_work(5.0)
    [claim] = await engine.claim()
    assert claim.request_id == first.request_id
    await engine.generate(claim, 2, finish=True)
    assert await engine.session.claim(max_requests=0, max_prompt_tokens=100) == []
    for pause in ("LOOK_PAUSE_S", "REFRESH_S"):
        monkeypatch.setattr(home_of(engine.session.claim_order), pause, 60.0)


async def test_a_claim_whose_connection_is_reset_in_the_middle_of_the_script_leaves_nothing_that_nobody_serves(
    broker: Broker,
    redis_server: EmbeddedRedis,
    network: Proxy,
    quiet: Broker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis shows a request as its engine's that never heard of it: it is handed back, and counts as tried once."""
    places = [Partition(MODEL, number) for number in range(2)]
    async with GatewaySession(broker) as gateway, worker(quiet) as engine:
        assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []  # the server has the script
        requests = [spec(partition=where.number) for where in places]
        await claim_one_before(monkeypatch, gateway, engine, requests)
        network.client_chunks.clear()
        with inside_a_call(redis_server):
            claiming = asyncio.create_task(engine.session.claim(max_requests=1, max_prompt_tokens=100))
            await has_heard(network, scripts.CLAIM)
            assert not claiming.done()
            network.reset_clients()
            with pytest.raises(Unavailable, match="reset by peer"):
                await claiming

        async def num_attempts() -> int:
            records = [where.request(request.request_id) for where, request in zip(places, requests, strict=True)]
            return sum(
                int(each) for each in await broker.connection.pipeline([("HGET", key, "attempts") for key in records])
            )

        async def has_run() -> bool:
            return await num_attempts() == 1

        await eventually(has_run)
        assert len(engine.session.held) == 0
        for _ in range(3):
            await once_there(engine.session.lease.beat)
        claims = await once_there(lambda: engine.claim(2))
        assert sorted(claim.attempts for claim in claims) == [1, 2]
        assert await num_attempts() == 3
        for claim in claims:
            await engine.generate(claim, 2, finish=True)
        for request in requests:
            assert numbers(await read_all(gateway, request.request_id)) == [100, 101]
        owned = [("SCARD", f"{where.prefix}owned:{engine.session.engine_id}") for where in places]
        assert await broker.connection.pipeline(owned) == [0, 0]


async def test_a_claim_whose_reply_is_lost_is_handed_back_by_itself(
    broker: Broker, network: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else uses the connections, so that the claim's own answer is what gets lost.
    still = dataclasses.replace(STILL, command_timeout_s=1.0)
    async with await Broker.connect(f"redis://{network.target}/0", still) as cut:
        async with GatewaySession(broker) as gateway, worker(cut) as engine:
            assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []  # the server has the script
            requests = [spec(partition=number) for number in range(2)]
            await claim_one_before(monkeypatch, gateway, engine, requests)
            network.lose_answers()
            with pytest.raises(Unavailable):
                await engine.session.claim(max_requests=1, max_prompt_tokens=100)
            network.repair()
            for _ in range(3):
                with suppress(Unavailable):  # a connection that the mending has reset
                    await engine.session.lease.beat()
            claims = await engine.claim(2)
            assert sorted(claim.attempts for claim in claims) == [1, 2]
            for claim in claims:
                await engine.generate(claim, 2, finish=True)
            for request in requests:
                assert numbers(await read_all(gateway, request.request_id)) == [100, 101]


async def test_a_server_that_was_started_again_has_forgotten_the_scripts(broker: Broker) -> None:
    """NOSCRIPT."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        await broker.connection.execute("SCRIPT", "FLUSH")
        await engine.generate(claim, 2, finish=True)
        await broker.connection.execute("SCRIPT", "FLUSH")
        assert numbers(await read_all(gateway, request.request_id)) == [100, 101]


async def test_waiting_for_the_disk(redis_server: EmbeddedRedis, broker: Broker, redis_url: str) -> None:
    """WAITAOF where the server has it; elsewhere the setting is refused with what to do."""
    settings = dataclasses.replace(CALM, wait_fsync=True, wait_timeout_ms=3000)
    async with await Broker.connect(redis_url, settings) as careful, GatewaySession(careful) as gateway:
        request = spec()
        if redis_server.binary.version < (7, 2):
            with pytest.raises(Unavailable, match=r"7\.2"):
                await gateway.accept(request)
            return
        await gateway.accept(request)
        async with worker(careful) as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
        assert numbers(await read_all(gateway, request.request_id)) == [100, 101, 102]


async def test_tls_and_a_user_of_its_own(tmp_path: Path, seven: ServerBinary) -> None:
    with running_tls_server(tmp_path, seven) as (topology, _):
        async with await Broker.connect(topology.url, CALM) as broker:
            await broker.publish_model(card(), partitions=2)
            async with GatewaySession(broker) as gateway, worker(broker) as engine:
                requests = [spec(partition=number % 2) for number in range(4)]
                for request in requests:
                    await gateway.accept(request)
                reading = [asyncio.create_task(read_all(gateway, request.request_id)) for request in requests]
                for claim in await engine.claim(4):
                    await engine.generate(claim, 3, finish=True)
                for log in await asyncio.gather(*reading):
                    assert numbers(log) == [100, 101, 102]
        untrusting = topology.url.partition("?")[0]
        with pytest.raises(Unavailable):
            await Broker.connect(untrusting, dataclasses.replace(CALM, connect_timeout_s=0.5))
