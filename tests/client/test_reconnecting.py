"""Connections that die, gateways that end, Redis that forgets: the reader sees one stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from pagestream_client import (
    AsyncClient,
    Chunk,
    Reconnection,
    RequestNotFound,
    Transport,
    Unauthenticated,
    Unavailable,
)
from support.clients.gateway_clients import Address, gateway_settings, lose, running_address, serving, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

ALPHABET = "abcdefghijklmnopqrst"
QUICK = Reconnection(limit_s=LIMIT_S)


@asynccontextmanager
async def flaky(*addresses: Address) -> AsyncIterator[list[Proxy]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Proxy(address.grpc_port)) for address in addresses]


def targets(networks: list[Proxy]) -> list[str]:
    return [network.target for network in networks]


def in_use(networks: list[Proxy], client: AsyncClient) -> Proxy:
    return next(network for network in networks if network.num_connections)


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("place", [0, 1, 20, 21])
async def test_a_connection_that_is_cut_at_any_place(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, place: int
) -> None:
    engine.hold_at = place
    async with flaky(gateway, other_gateway) as networks:
        async with asyncio.timeout(LIMIT_S), AsyncClient(targets(networks), reconnection=QUICK) as client:
            stream = client.generate(MODEL, "hello", max_tokens=20, seed=0)
            await stream.accepted()
            chunks: list[Chunk] = []
            if place == 0:
                in_use(networks, client).reset()
                engine.go_on()
            async for chunk in stream:
                chunks.append(chunk)
                if place and chunk.next_index == place:
                    in_use(networks, client).reset()
                    engine.go_on()
    assert text_of(chunks) == ALPHABET
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(10, 30))
    assert chunks[-1].next_index == 22
    assert all(network.num_connections == 1 for network in networks)
    assert len(engine.claimed) == 1


async def test_a_lost_reply_of_generate_joins_the_request_that_was_made(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address
) -> None:
    async with flaky(gateway, other_gateway) as networks:
        async with asyncio.timeout(LIMIT_S), AsyncClient(targets(networks), reconnection=QUICK) as client:
            await client.list_models()  # the connection stands
            network = in_use(networks, client)
            network.lose_answers()
            reading = asyncio.create_task(client.generate(MODEL, "hello", max_tokens=20, seed=0).collect())
            while not engine.claimed:  # noqa: ASYNC110  the engine rings no event
                await asyncio.sleep(0.01)
            network.reset()
            answer = await reading
    assert answer.text == ALPHABET
    assert [spec.request_id for spec in engine.claimed] == [answer.request_id]


async def test_a_silent_network_is_noticed(engine: SyntheticEngine, gateway: Address, other_gateway: Address) -> None:
    engine.hold_at = 5
    transport = Transport(keepalive_s=1.0, keepalive_timeout_s=2.0, connect_timeout_s=2.0)
    async with flaky(gateway, other_gateway) as networks:
        async with asyncio.timeout(LIMIT_S), AsyncClient(targets(networks), transport=transport) as client:
            chunks = []
            async for chunk in client.generate(MODEL, "hello", max_tokens=20, seed=0):
                chunks.append(chunk)
                if chunk.next_index == 5:
                    in_use(networks, client).silence()
                    engine.go_on()
    assert text_of(chunks) == ALPHABET


async def test_a_single_gateway_that_comes_back_is_found(engine: SyntheticEngine, gateway: Address) -> None:
    engine.hold_at = 5
    async with flaky(gateway) as [network]:
        async with asyncio.timeout(LIMIT_S), AsyncClient(network.target, reconnection=QUICK) as client:
            chunks = []
            async for chunk in client.generate(MODEL, "hello", max_tokens=20, seed=0):
                chunks.append(chunk)
                if chunk.next_index == 5:
                    network.reset()
                    asyncio.get_running_loop().call_later(1.5, network.repair)
                    engine.go_on()
    assert text_of(chunks) == ALPHABET


async def test_a_gateway_that_stops_hands_its_streams_to_the_other(engine: SyntheticEngine, redis_url: str) -> None:
    engine.hold_at = 5
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(AsyncExitStack()) for _ in range(2)]
        addresses = [await each.enter_async_context(running_address(gateway_settings(redis_url))) for each in gateways]
        targets = [address.target for address in addresses]
        async with asyncio.timeout(LIMIT_S), AsyncClient(targets, reconnection=QUICK) as client:
            chunks = []
            async for chunk in client.generate(MODEL, "hello", max_tokens=20, seed=0):
                chunks.append(chunk)
                if chunk.next_index == 5:
                    await gateways[await serving(addresses)].aclose()
                    engine.go_on()
    assert text_of(chunks) == ALPHABET


async def test_what_redis_lost_is_accepted_again_and_goes_on(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, redis_url: str
) -> None:
    engine.hold_at = 5
    async with flaky(gateway, other_gateway) as networks:
        async with asyncio.timeout(LIMIT_S), AsyncClient(targets(networks), reconnection=QUICK) as client:
            chunks = []
            async for chunk in client.generate(MODEL, "hello", max_tokens=20):
                chunks.append(chunk)
                if chunk.next_index == 5:
                    in_use(networks, client).reset()
                    await lose(redis_url, chunk.request_id)
                    engine.go_on()
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(10, 30))
    assert len({chunk.request_id for chunk in chunks}) == 1
    first, again = engine.claimed
    assert again.sampling.seed == first.sampling.seed


async def test_where_no_gateway_answers_the_limit_holds() -> None:
    policy = Reconnection(limit_s=1.0)
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], reconnection=policy) as client:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2 for 1 s"):
                await client.list_models()
            with pytest.raises(Unavailable):
                await client.generate(MODEL, "hello").accepted()


async def test_keys_are_shown_on_every_call(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"key-a": "a", "key-b": "b"})
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        async with AsyncClient(address.target) as anonymous:
            with pytest.raises(Unauthenticated):
                await anonymous.generate(MODEL, "hello").collect()
        async with AsyncClient(address.target, api_key="key-a") as owner:
            answer = await owner.generate(MODEL, "hello", max_tokens=4, seed=0).collect()
            assert (await owner.resume(answer.request_id).collect()).text == answer.text == "abcd"
        async with AsyncClient(address.target, api_key="key-b") as stranger:
            with pytest.raises(RequestNotFound):
                await stranger.resume(answer.request_id).collect()


@pytest.mark.slow
async def test_gateways_permit_the_probes_of_an_idle_stream(engine: SyntheticEngine, gateway: Address) -> None:
    """One that gets more of them than it allows ends the connection."""
    engine.hold_at = 2
    async with flaky(gateway) as [network], AsyncClient(network.target) as client:
        stream = client.generate(MODEL, "hello", max_tokens=4, seed=0)
        await stream.accepted()
        await asyncio.sleep(4 * Transport().keepalive_s)  # the idle time itself
        assert network.num_connections == 1
        engine.go_on()
        assert (await stream.collect()).text == "abcd"
        assert network.num_connections == 1
