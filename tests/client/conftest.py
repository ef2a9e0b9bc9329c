"""Two gateways and an engine for each file of tests, and clients of the first gateway."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from pagestream_client import AsyncClient, Client
from support.clients.gateway_clients import Address
from support.clients.gateway_fixtures import (
    another,
    card,
    engine,
    gateway,
    other_gateway,
    redis_url,
    settings,
    shared_engine,
    shared_gateway,
)

__all__ = [
    "another",
    "card",
    "engine",
    "gateway",
    "other_gateway",
    "redis_url",
    "settings",
    "shared_engine",
    "shared_gateway",
]


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Address) -> AsyncIterator[AsyncClient]:
    """A client of the first gateway, which must leave nothing behind."""
    before = asyncio.all_tasks()
    async with AsyncClient(gateway.target) as made:
        yield made
    left = asyncio.all_tasks() - before
    names = [str(task.get_coro()) for task in left if "pagestream_client" in str(task.get_coro())]
    assert not names


@pytest_asyncio.fixture(loop_scope="module")
async def blocking(gateway: Address) -> AsyncIterator[Client]:
    """A blocking client of the first gateway. Tests call it in a thread: the gateway runs in their event loop."""
    made = Client(gateway.target)
    yield made
    await asyncio.to_thread(made.close)
