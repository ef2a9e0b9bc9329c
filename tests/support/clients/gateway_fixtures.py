"""Gateways over a real Redis, with a synthetic engine: started once for each file.

Tests run in their file's event loop, where the gateways and the engine run, too. A file that needs another model
overrides `card`, one with other settings `settings`. A test that reconfigures or stops a gateway starts its own with
`another`, over the same Redis.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ModelCard
from pagestream_gateway import Settings
from pagestream_streams import EmbeddedRedis
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import SyntheticEngine, running_engine, synthetic_card
from support.processes.waiting import LIMIT_S
from support.redis.servers import emptied


@pytest.fixture(scope="module")
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of the file's Redis, without any keys at first."""
    return emptied(redis_server)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    """Return the card of the engine's model."""
    return synthetic_card()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(redis_url: str, card: ModelCard) -> AsyncIterator[SyntheticEngine]:
    """Run an engine."""
    async with running_engine(redis_url, card) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: SyntheticEngine) -> AsyncIterator[SyntheticEngine]:
    """The engine as if it had just started; what it holds at the end of a test, it ends."""
    shared_engine.forget()
    yield shared_engine
    await shared_engine.finish()


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    """Return a gateway's settings, on free ports."""
    return gateway_settings(redis_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(shared_engine: SyntheticEngine, settings: Settings) -> AsyncIterator[Address]:
    """Run a gateway."""
    async with running_address(settings) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other_gateway(shared_engine: SyntheticEngine, settings: Settings) -> AsyncIterator[Address]:
    """Run a second gateway on the same Redis."""
    async with running_address(settings) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_http(shared_gateway: Address) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client of the gateway."""
    async with httpx.AsyncClient(base_url=shared_gateway.url, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def gateway(shared_gateway: Address, engine: SyntheticEngine) -> Address:
    """Return where the gateway is."""
    return shared_gateway


@pytest.fixture
def http(shared_http: httpx.AsyncClient, engine: SyntheticEngine) -> httpx.AsyncClient:
    """Return the HTTP client of the gateway."""
    return shared_http


@pytest.fixture(scope="session")
def another() -> Callable[[Settings], AbstractAsyncContextManager[Address]]:
    """Return what runs further gateways with settings of their own."""
    return running_address
