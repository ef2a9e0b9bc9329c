"""Two gateways over a real Redis, with an engine whose answers are made up, and clients of both."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from pagestream_client import AsyncClient, Client
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import SyntheticEngine, running_engine


@pytest.fixture
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    """An engine that runs."""
    async with running_engine(redis_url) as running:
        yield running


@pytest.fixture
async def gateway(engine: SyntheticEngine, redis_url: str) -> AsyncIterator[Address]:
    """A gateway that runs."""
    async with running_address(gateway_settings(redis_url)) as address:
        yield address


@pytest.fixture
async def other_gateway(engine: SyntheticEngine, redis_url: str) -> AsyncIterator[Address]:
    """A second gateway on the same Redis."""
    async with running_address(gateway_settings(redis_url)) as address:
        yield address


@pytest.fixture
async def client(gateway: Address) -> AsyncIterator[AsyncClient]:
    """A client of the first gateway, which must leave nothing behind."""
    before = asyncio.all_tasks()
    async with AsyncClient(gateway.target) as made:
        yield made
    left = asyncio.all_tasks() - before
    names = [str(task.get_coro()) for task in left if "pagestream_client" in str(task.get_coro())]
    assert not names


@pytest.fixture
async def blocking(gateway: Address) -> AsyncIterator[Client]:
    """A blocking client of the first gateway. Tests call it in a thread: the gateway runs in their event loop."""
    made = Client(gateway.target)
    yield made
    await asyncio.to_thread(made.close)
