"""Gateways over a real Redis, with a synthetic engine."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import httpx
import openai
import pytest
from pagestream_gateway import Settings
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import SyntheticEngine, running_engine
from support.processes.stack import DEMO_MODEL, Stack


@pytest.fixture
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    """Run an engine."""
    async with running_engine(redis_url) as running:
        yield running


@pytest.fixture
def settings(redis_url: str) -> Settings:
    """Return a gateway's settings, on free ports."""
    return gateway_settings(redis_url)


@pytest.fixture
async def gateway(engine: SyntheticEngine, settings: Settings) -> AsyncIterator[Address]:
    """Run a gateway."""
    async with running_address(settings) as address:
        yield address


@pytest.fixture
async def other_gateway(engine: SyntheticEngine, settings: Settings) -> AsyncIterator[Address]:
    """Run a second gateway on the same Redis."""
    async with running_address(settings) as address:
        yield address


@pytest.fixture
async def http(gateway: Address) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client of the gateway."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        yield client


@pytest.fixture(scope="module")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run Redis, a gateway, and an engine with the demo model in float32, as processes."""
    running = Stack(
        tmp_path_factory.mktemp("demo"),
        model=DEMO_MODEL,
        engine_options=("--dtype", "float32", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
        is_forked=True,
    )
    try:
        running.redis.start()
        running.add_engine()
        running.add_gateway()
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture
def demo_client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    """Open the official client on that gateway."""
    url = f"{demo_stack.gateways[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90.0) as client:
        yield client


@pytest.fixture
def another() -> Callable[[Settings], AbstractAsyncContextManager[Address]]:
    """Return what runs further gateways with settings of their own."""
    return running_address
