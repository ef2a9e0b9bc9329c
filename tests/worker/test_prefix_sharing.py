"""What one tenant has sent shows in no other tenant's answer: through a gateway with keys and a real engine."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_streams import Broker
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.arithmetic_worker import MODEL, SlowRunner, running_worker
from support.processes.waiting import LIMIT_S, until

pytestmark = pytest.mark.served

BLOCK = 16
PROMPT = [*range(1, 2 * BLOCK + 2)]
COMPUTED, CACHED = 0, 2 * BLOCK


class Tenants:
    """Clients of one gateway, each with a key of its own."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def post(self, tenant: str, **fields: Any) -> httpx.Response:
        """Ask for tokens after the prompt."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
        headers = {"Authorization": f"Bearer key-{tenant}"}
        return await self._client.post("/v1/completions", json=body, headers=headers)

    async def cached(self, tenant: str, **fields: Any) -> int:
        """Return how many tokens of the prompt an answer says were cached."""
        answer = await self.post(tenant, **fields)
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


@asynccontextmanager
async def tenants(redis_url: str, folder: Path, **cache: Any) -> AsyncIterator[Tenants]:
    """Run a gateway with keys of the tenants a, b and c."""
    keys = folder / "keys"
    keys.write_text("\n".join(f"{hashlib.sha256(f'key-{name}'.encode()).hexdigest()} -> {name}" for name in "abc"))
    settings = gateway_settings(redis_url, keys=keys)
    async with (
        running_address(replace(settings, cache=replace(settings.cache, **cache))) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        yield Tenants(client)


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, [COMPUTED, CACHED, COMPUTED, COMPUTED]),
        ({"prefix_groups": {"a": 1, "b": 1}}, [COMPUTED, CACHED, CACHED, COMPUTED]),
        ({"prefix_groups": {"a": 1, "b": 2}}, [COMPUTED, CACHED, COMPUTED, COMPUTED]),
        ({"prefix_sharing": "all"}, [COMPUTED, CACHED, CACHED, CACHED]),
    ],
    ids=["tenant", "group", "groups", "all"],
)
async def test_prefixes_are_shared_as_set(
    redis_url: str, tmp_path: Path, cache: dict[str, Any], expected: list[int]
) -> None:
    async with (
        await Broker.connect(redis_url) as broker,
        running_worker(broker, tmp_path),
        tenants(redis_url, tmp_path, **cache) as clients,
    ):
        assert [await clients.cached(name) for name in "aabc"] == expected
        assert [await clients.cached("a", cache_salt=salt) for salt in ("x", "x", "y")] == [COMPUTED, CACHED, COMPUTED]
        shares = await clients.cached("b", cache_salt="x")
        assert shares == expected[2]
        for wrong in ("", 5, "s" * 1000):
            assert (await clients.post("a", cache_salt=wrong)).json()["error"]["param"] == "cache_salt"


async def test_a_request_that_another_engine_goes_on_with_keeps_its_salt(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, AsyncExitStack() as stack:
        async with running_worker(broker, tmp_path, SlowRunner) as first:
            clients = await stack.enter_async_context(tenants(redis_url, tmp_path))
            answer = asyncio.create_task(clients.post("a", max_tokens=400))
            await until(lambda: answer.done() or first.worker.load()["running"] == 1, "the claim")
            await first.end()
        assert not answer.done()
        async with running_worker(broker, tmp_path):
            assert (await answer).status_code == 200
            assert [await clients.cached(name) for name in "ba"] == [COMPUTED, CACHED]
