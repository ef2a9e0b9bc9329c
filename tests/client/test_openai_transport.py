"""The `openai` client over a transport that resumes its streams, while gateways die under it."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from pagestream_client import Reconnection
from pagestream_client.openai import HttpTransport, transport
from support.clients.gateway_clients import Address, gateway_settings, issue_certificate, lose, running_address, serving
from support.engines.synthetic_engine import MODEL, SyntheticEngine, answer_text
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

ALPHABET = "abcdefghijklmnopqrst"
QUICK = Reconnection(limit_s=LIMIT_S)


def async_client(urls: list[str]) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=transport(urls, reconnection=QUICK))
    return openai.AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="none", http_client=http)


def blocking_client(urls: list[str]) -> openai.OpenAI:
    http = httpx2.Client(transport=transport(urls, reconnection=QUICK))
    return openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="none", http_client=http)


@pytest.mark.parametrize("place", [1, 20])
async def test_a_gateway_is_killed_under_an_asynchronous_stream(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, place: int
) -> None:
    engine.hold_at = place
    async with Proxy(gateway.http_port) as one, Proxy(other_gateway.http_port) as other:
        async with asyncio.timeout(LIMIT_S), async_client([f"http://{each.target}" for each in (one, other)]) as client:
            text, num_kills = "", 0
            stream = await client.completions.create(
                model=MODEL, prompt="hello", max_tokens=20, seed=0, stream=True, stream_options={"include_usage": True}
            )
            usage = None
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                usage = chunk.usage or usage
                if len(text) == place and not num_kills:
                    num_kills += 1
                    next(each for each in (one, other) if each.num_connections).reset()
                    engine.go_on()
    assert text == ALPHABET
    assert usage is not None
    assert usage.completion_tokens == 20
    assert (one.num_connections, other.num_connections) == (1, 1)
    assert len(engine.claimed) == 1


async def test_a_gateway_is_killed_under_a_blocking_chat(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address
) -> None:
    engine.hold_at = 5
    loop = asyncio.get_running_loop()
    async with Proxy(gateway.http_port) as one, Proxy(other_gateway.http_port) as other:

        def kill() -> None:
            next(each for each in (one, other) if each.num_connections).reset()
            engine.go_on()

        def work() -> str:
            text = ""
            with blocking_client([f"http://{each.target}" for each in (one, other)]) as client:
                stream = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=20,
                    seed=0,
                    stream=True,
                )
                for chunk in stream:
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    if len(text) == 5:
                        loop.call_soon_threadsafe(kill)
            return text

        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.to_thread(work) == ALPHABET
    assert (one.num_connections, other.num_connections) == (1, 1)


async def test_gateways_that_stop_one_after_the_other(engine: SyntheticEngine, redis_url: str) -> None:
    engine.hold_at = 3
    async with AsyncExitStack() as rest, asyncio.timeout(LIMIT_S):
        gateways = [AsyncExitStack(), AsyncExitStack()]
        addresses = [await each.enter_async_context(running_address(gateway_settings(redis_url))) for each in gateways]
        for each in gateways:
            rest.push_async_exit(each)
        resuming = transport([each.url for each in addresses], reconnection=QUICK)
        client = openai.AsyncOpenAI(
            base_url=f"{addresses[0].url}/v1", api_key="none", http_client=httpx2.AsyncClient(transport=resuming)
        )
        text = ""
        async with client:
            stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=20, seed=0, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) == 3 and engine.hold_at == 3:
                    number = await serving(addresses)
                    stopping = asyncio.create_task(gateways[number].aclose())
                    engine.go_on()
        await stopping
    assert text == ALPHABET


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
async def test_a_gateway_is_killed_under_an_answer_that_is_not_streamed(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, is_async: bool
) -> None:
    engine.hold_at = 5
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 20}
    async with Proxy(gateway.http_port) as one, Proxy(other_gateway.http_port) as other:
        urls = [f"http://{each.target}" for each in (one, other)]

        def work() -> str:
            with blocking_client(urls) as client:
                return client.completions.create(**ask).choices[0].text

        async def work_async() -> str:
            async with async_client(urls) as client:
                return (await client.completions.create(**ask)).choices[0].text

        async with asyncio.timeout(LIMIT_S):
            asking = asyncio.create_task(work_async() if is_async else asyncio.to_thread(work))
            await eventually(lambda: bool(engine.claimed))
            next(each for each in (one, other) if each.num_connections).reset()
            await eventually(lambda: one.num_connections + other.num_connections == 2)
            engine.go_on()
            text = await asking
    [spec] = engine.claimed
    assert text == answer_text(spec, 0), "one request, whose seed a gateway chose"


async def test_a_request_that_redis_has_lost_meanwhile_is_accepted_again(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, redis_url: str
) -> None:
    engine.hold_at = 7
    async with Proxy(gateway.http_port) as one, Proxy(other_gateway.http_port) as other:
        async with asyncio.timeout(LIMIT_S), async_client([f"http://{each.target}" for each in (one, other)]) as client:
            text = ""
            stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=20, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) == 7 and engine.hold_at == 7:
                    broken = next(each for each in (one, other) if each.num_connections)
                    await lose(redis_url, engine.claimed[0].request_id)
                    broken.reset()
                    engine.go_on()
    first, second = engine.claimed
    assert text == answer_text(first, 0)
    assert (second.request_id, second.sampling.seed) == (first.request_id, first.sampling.seed)


async def test_errors_and_other_calls_are_the_gateways_own(gateway: Address) -> None:
    async with async_client([gateway.url]) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.completions.create(model=MODEL, prompt="hello", top_p=2.0, stream=True)
        whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=4, seed=0)
        assert whole.choices[0].text == "abcd"


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
async def test_the_callers_time_limit_bounds_an_answer_that_is_not_streamed(
    engine: SyntheticEngine, gateway: Address, is_async: bool
) -> None:
    engine.hold_at = 5
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "timeout": 0.3}
    async with Proxy(gateway.http_port) as network, asyncio.timeout(LIMIT_S):
        urls = [f"http://{network.target}"]

        def work() -> None:
            with blocking_client(urls).with_options(max_retries=0) as client:
                client.completions.create(**ask)

        async def work_async() -> None:
            async with async_client(urls).with_options(max_retries=0) as client:
                await client.completions.create(**ask)

        with pytest.raises(openai.APITimeoutError):
            await (work_async() if is_async else asyncio.to_thread(work))
        assert network.num_connections == 1, "no further try when the limit has passed"
    engine.go_on()


async def test_the_file_of_authorities_is_trusted(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    settings = gateway_settings(redis_url)
    tls = replace(settings.gateway, tls_certificate=certificate, tls_key=key)
    async with running_address(replace(settings, gateway=tls)) as gateway, asyncio.timeout(LIMIT_S):
        url = f"https://127.0.0.1:{gateway.http_port}"
        limits = HttpTransport(ca_file=str(certificate))
        http = httpx2.AsyncClient(transport=transport(url, limits=limits))
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
