"""The clients over HTTP against real gateways."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import pytest
import pytest_asyncio
from pagestream_client import (
    DataLoss,
    FinishReason,
    GenerationFailed,
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    OffsetOutOfRange,
    Reconnection,
    RequestNotFound,
    RequestState,
)
from pagestream_client.http import AsyncHttpClient, HttpClient
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.network.proxy import Proxy
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

ALPHABET = "abcdefghijklmnopqrst"
CHAT = [{"role": "user", "content": "hello"}]
LIMIT_S = 60.0
QUICK = Reconnection(limit_s=10.0)
T = TypeVar("T")


@asynccontextmanager
async def flaky(*addresses: Address) -> AsyncIterator[list[Proxy]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Proxy(address.http_port)) for address in addresses]


def urls(networks: list[Proxy]) -> list[str]:
    return [f"http://{network.target}" for network in networks]


def in_use(networks: list[Proxy], client: AsyncHttpClient) -> Proxy:
    return next(each for each in networks if each.num_connections)


async def in_thread(work: Callable[[], T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(work)


@pytest_asyncio.fixture(loop_scope="module")
async def http(gateway: Address) -> AsyncIterator[AsyncHttpClient]:
    """A client of the first gateway, which must leave no task behind."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(LIMIT_S), AsyncHttpClient(gateway.url, reconnection=QUICK) as made:
        yield made
    names = [str(task.get_coro()) for task in asyncio.all_tasks() - before]
    assert not [name for name in names if "pagestream_client" in name]


@pytest.mark.parametrize(("place", "is_chat"), [(0, True), (1, False), (20, True), (21, False)])
async def test_a_connection_that_is_cut_at_any_place(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address, place: int, is_chat: bool
) -> None:
    engine.hold_at = place
    async with flaky(gateway, other_gateway) as networks:
        async with asyncio.timeout(LIMIT_S), AsyncHttpClient(urls(networks), reconnection=QUICK) as client:
            options = {"max_tokens": 20, "seed": 0}
            stream = (
                client.generate(MODEL, messages=CHAT, **options)  # type: ignore[arg-type]
                if is_chat
                else client.generate(MODEL, "hello", **options)  # type: ignore[arg-type]
            )
            await stream.accepted()
            chunks = []
            if place == 0:
                in_use(networks, client).reset()
                engine.go_on()
            async for chunk in stream:
                chunks.append(chunk)
                if place and chunk.next_index == place:
                    in_use(networks, client).reset()
                    engine.go_on()
    assert "".join(chunk.text for chunk in chunks) == ALPHABET
    assert (chunks[-1].next_index, chunks[-2].finish_reason) == (22, FinishReason.LENGTH)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len(engine.claimed) == 1


async def test_a_stream_is_resumed_by_either_client_at_another_gateway(
    engine: SyntheticEngine, gateway: Address, other_gateway: Address
) -> None:
    async with asyncio.timeout(LIMIT_S), AsyncHttpClient(gateway.url) as client:
        stream = client.generate(MODEL, "hello", max_tokens=20, seed=0)
        first = await anext(stream)
        await stream.aclose()
    async with asyncio.timeout(LIMIT_S), AsyncHttpClient(other_gateway.url) as other:
        rest = await other.resume(*_place(first.position)).collect()
    with HttpClient(other_gateway.url) as blocking:
        assert await in_thread(blocking.resume(*_place(first.position)).collect) == rest
    assert first.text + rest.text == ALPHABET


def _place(position: object) -> tuple[str, int, str]:
    return (position.request_id, position.next_index, position.digest)  # type: ignore[attr-defined]


async def test_calls_that_are_no_streams(http: AsyncHttpClient, gateway: Address) -> None:
    async def engines_are_counted() -> bool:
        [model] = await http.list_models()
        assert (model.name, model.max_model_len) == (MODEL, 128)
        return model.engines == 1

    await eventually(engines_are_counted)
    answer = await http.generate(MODEL, "hello", max_tokens=2).collect()
    info = await http.get_request(answer.request_id)
    assert (info.state, info.finish_reason, info.next_index) == (RequestState.FINISHED, FinishReason.LENGTH, 4)
    assert await http.cancel(answer.request_id) is FinishReason.LENGTH
    with HttpClient(gateway.url) as blocking:
        assert await in_thread(lambda: blocking.get_request(answer.request_id)) == info
        assert await in_thread(lambda: blocking.cancel(answer.request_id)) is FinishReason.LENGTH


async def test_a_tenant_lists_its_requests(http: AsyncHttpClient, gateway: Address, engine: SyntheticEngine) -> None:
    with HttpClient(gateway.url) as blocking:
        assert await http.list_requests() == await in_thread(blocking.list_requests)
        ids = [(await http.generate(MODEL, "hello", max_tokens=2).collect()).request_id for _ in range(2)]
        engine.hold_at = 1
        stream = http.generate(MODEL, "hello", max_tokens=6)
        await anext(stream)
        page = await http.list_requests(limit=2)
        assert [(each.request_id, each.state, each.finish_reason) for each in page.requests] == [
            (stream.request_id, RequestState.RUNNING, None),
            (ids[1], RequestState.FINISHED, FinishReason.LENGTH),
        ]
        finished = page.requests[1]
        assert (finished.model, finished.next_index, finished.attempts, page.has_more) == (MODEL, 4, 1, True)
        assert (finished.usage.completion_tokens, finished.created > 0) == (2, True)
        last = await in_thread(lambda: blocking.list_requests(after=page.requests[-1].request_id))
        assert last.requests[0].request_id == ids[0]
        for client_call in (
            lambda: http.list_requests(limit=101),
            lambda: in_thread(lambda: blocking.list_requests(after="nonsense & more")),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client_call()
            assert caught.value.field in ("limit", "after")
        engine.go_on()
        await stream.aclose()


async def test_errors_have_the_types_that_they_have_over_grpc(http: AsyncHttpClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await http.generate(MODEL, "hello", top_p=2.0).collect()
    assert (caught.value.field, caught.value.http_status) == ("top_p", 400)
    with pytest.raises(ModelNotFound):
        await http.generate("nonsense", "hello").collect()
    with pytest.raises(RequestNotFound):
        await http.get_request("nonsense")
    answer = await http.generate(MODEL, "hello", max_tokens=2, idempotency_key="mine").collect()
    with pytest.raises(IdempotencyConflict):
        await http.generate(MODEL, "other words", max_tokens=2, idempotency_key="mine").collect()
    with pytest.raises(OffsetOutOfRange):
        await http.resume(answer.request_id, 99).collect()
    with pytest.raises(DataLoss):
        await http.resume(answer.request_id, 1, "0" * 16).collect()


async def test_a_failed_generation_raises_after_its_chunks(http: AsyncHttpClient) -> None:
    stream = http.generate(MODEL, prompt_token_ids=[FAILING_TOKEN], max_tokens=2)
    with pytest.raises(GenerationFailed, match="told to fail") as caught:
        await stream.collect()
    assert caught.value.code == "engine_error"
    assert caught.value.position is not None


async def test_a_deadline_ends_the_request(http: AsyncHttpClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 3
    answer = await http.generate(MODEL, "hello", max_tokens=6, seed=0, deadline_s=1.0).collect()
    assert (answer.text, answer.choices[0].finish_reason) == ("abc", FinishReason.DEADLINE)


async def _leave_by_break(client: AsyncHttpClient) -> str:
    async for chunk in client.generate(MODEL, "hello", max_tokens=6, seed=0):
        return chunk.request_id
    raise AssertionError("the stream had no chunk")


async def _leave_by_closing(client: AsyncHttpClient) -> str:
    async with client.generate(MODEL, "hello", max_tokens=6, seed=0) as stream:
        return (await anext(stream)).request_id


@pytest.mark.parametrize("leave", [_leave_by_break, _leave_by_closing])
async def test_a_reader_that_leaves_is_noticed_by_the_gateway(
    engine: SyntheticEngine, redis_url: str, leave: Callable[[AsyncHttpClient], Awaitable[str]]
) -> None:
    engine.hold_at = 2
    async with (
        asyncio.timeout(LIMIT_S),
        running_address(gateway_settings(redis_url, grace_s=0.2)) as address,
        AsyncHttpClient(address.url) as client,
    ):
        request_id = await leave(client)

        async def is_cancelled() -> bool:
            return (await client.get_request(request_id)).finish_reason is FinishReason.CANCELLED

        await eventually(is_cancelled)
