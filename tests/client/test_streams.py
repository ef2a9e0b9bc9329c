"""The asyncio client against real gateways: what it asks, what it hears, and how it leaves."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio
from pagestream_client import (
    AsyncClient,
    AsyncStream,
    Chunk,
    DataLoss,
    FinishReason,
    GenerationFailed,
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    OffsetOutOfRange,
    Position,
    RequestNotFound,
    RequestState,
    StreamClosed,
    Usage,
)
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def silent_target() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110  what is waited for is in Redis, which rings no event here
            await asyncio.sleep(0.02)


async def keep(stream: AsyncStream, chunks: list[Chunk]) -> None:
    async for chunk in stream:
        chunks.append(chunk)


async def test_a_stream_has_every_token_once_and_ends_with_the_usage(client: AsyncClient) -> None:
    chunks = [chunk async for chunk in client.generate(MODEL, "hello", max_tokens=12, seed=0)]
    assert "".join(chunk.text for chunk in chunks) == "abcdefghijkl"
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(10, 22))
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
    assert [chunk.next_index for chunk in chunks] == sorted({chunk.next_index for chunk in chunks})
    assert chunks[-1].usage == Usage(prompt_tokens=6, completion_tokens=12, cached_tokens=0)
    assert chunks[-1].next_index == 14


async def test_choices_prompts_and_conversations(client: AsyncClient) -> None:
    two = await client.generate(MODEL, "hello", n=2, max_tokens=3, seed=0).collect()
    assert [choice.text for choice in two.choices] == ["abc", "hij"]
    ids = await client.generate(MODEL, prompt_token_ids=[11, 12], max_tokens=3, seed=1).collect()
    assert (ids.text, ids.usage) == ("bcd", Usage(2, 3, 0))
    messages = [{"role": "user", "content": "hi"}]
    chat = await client.generate("", messages=messages, max_tokens=3, seed=2, stop="never").collect()
    assert (chat.text, chat.choices[0].stop_reason) == ("cde", "never")


async def test_the_id_is_known_before_any_token(client: AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 0
    async with client.generate(MODEL, "hello", max_tokens=4, seed=0) as stream:
        assert stream.request_id == ""
        request_id = await stream.accepted()
        assert stream.position == Position(request_id)
        info = await client.get_request(request_id)
        assert (info.model, info.next_index, info.finish_reason) == (MODEL, 0, None)
        assert info.state in (RequestState.QUEUED, RequestState.RUNNING)
        engine.go_on()
        assert (await stream.collect()).text == "abcd"
    assert (await client.get_request(request_id)).state is RequestState.FINISHED


async def test_resuming_from_every_place_gives_the_rest(client: AsyncClient, other_gateway: Address) -> None:
    chunks = [chunk async for chunk in client.generate(MODEL, "hello", max_tokens=6, seed=0)]
    async with AsyncClient(other_gateway.target) as other:
        for number, seen in enumerate(chunks):
            rest = [chunk async for chunk in other.resume(seen.request_id, seen.next_index, seen.digest)]
            text = "".join(chunk.text for chunk in [*chunks[: number + 1], *rest])
            assert text == "abcdef"
            assert [chunk.next_index for chunk in rest][-1:] == [8] * bool(rest)
        assert (await other.resume(chunks[0].request_id).collect()).text == "abcdef"


async def test_a_log_that_differs_is_refused(client: AsyncClient) -> None:
    answer = await client.generate(MODEL, "hello", max_tokens=6, seed=0).collect()
    with pytest.raises(DataLoss):
        await client.resume(answer.request_id, 3, "0" * 16).collect()
    with pytest.raises(OffsetOutOfRange):
        await client.resume(answer.request_id, 9).collect()
    with pytest.raises(RequestNotFound):
        await client.resume(f"{answer.request_id[:-4]}0000").collect()


async def test_refusals_have_types_and_name_the_field(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(MODEL, "hello", temperature=-1).collect()
    assert caught.value.field == "sampling.temperature"
    with pytest.raises(ModelNotFound, match="nobody"):
        await client.generate("nobody", "hello").collect()
    with pytest.raises(RequestNotFound):
        await client.get_request("nonsense")


async def test_a_failed_generation_raises_after_its_last_chunk(client: AsyncClient) -> None:
    chunks: list[Chunk] = []
    with pytest.raises(GenerationFailed, match="told to fail") as caught:
        await keep(client.generate(MODEL, prompt_token_ids=[FAILING_TOKEN], max_tokens=4), chunks)
    assert caught.value.code == "engine_error"
    assert caught.value.position == chunks[-1].position
    assert chunks[-1].finish_reason is FinishReason.ERROR


async def test_cancelling_ends_the_stream(client: AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    stream = client.generate(MODEL, "hello", max_tokens=6, seed=0)
    text, reasons = "", []
    async for chunk in stream:
        text += chunk.text
        reasons.append(chunk.finish_reason)
        if chunk.next_index == 2:
            assert await client.cancel(stream.request_id) is FinishReason.CANCELLED
    assert (text, reasons[-2:-1]) == ("ab", [FinishReason.CANCELLED])
    assert await client.cancel(stream.request_id) is FinishReason.CANCELLED


async def test_a_deadline_ends_the_request_and_what_there_was_is_kept(
    client: AsyncClient, engine: SyntheticEngine
) -> None:
    engine.hold_at = 3
    answer = await client.generate(MODEL, "hello", max_tokens=6, seed=0, deadline_s=3.0).collect()
    assert (answer.text, answer.choices[0].finish_reason) == ("abc", FinishReason.DEADLINE)
    assert (await client.get_request(answer.request_id)).finish_reason is FinishReason.DEADLINE


async def test_the_same_key_joins_the_same_request(client: AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 1
    first = client.generate(MODEL, "hello", max_tokens=6, seed=0, idempotency_key="mine")
    second = client.generate(MODEL, "hello", max_tokens=6, seed=0, idempotency_key="mine")
    assert await first.accepted() == await second.accepted()
    with pytest.raises(IdempotencyConflict):
        await client.generate(MODEL, "other words", max_tokens=6, idempotency_key="mine").accepted()
    engine.go_on()
    assert await first.collect() == await second.collect()
    assert len(engine.claimed) == 1


async def test_models(client: AsyncClient) -> None:
    [model] = await client.list_models()
    assert (model.name, model.max_model_len, model.engines) == (MODEL, 128, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(shared_engine: SyntheticEngine, redis_url: str) -> AsyncIterator[Address]:
    """A gateway that waits 0.2 s for readers to come back."""
    async with running_address(gateway_settings(redis_url, grace_s=0.2)) as address:
        yield address


@pytest.mark.parametrize("how", ["break", "aclose", "cancel the task"])
async def test_a_reader_that_leaves_early_leaves_nothing_running(
    engine: SyntheticEngine, impatient: Address, how: str
) -> None:
    """The gateway loses its reader at once, and its grace ends the request."""
    engine.hold_at = 2
    async with AsyncClient(impatient.target) as client:
        request_id = ""

        async def read() -> None:
            nonlocal request_id
            stream = client.generate(MODEL, "hello", max_tokens=6, seed=0)
            async for chunk in stream:
                request_id = chunk.request_id
                if chunk.next_index < 2 or how == "cancel the task":
                    continue
                if how == "aclose":
                    await stream.aclose()
                else:
                    break

        reading = asyncio.create_task(read())
        if how == "cancel the task":

            async def has_begun() -> bool:
                return bool(request_id)

            await until(has_begun)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await reading

        async def was_cancelled() -> bool:
            return (await client.get_request(request_id)).finish_reason is FinishReason.CANCELLED

        await until(was_cancelled)
        names = [str(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [name for name in names if "pagestream_client" in name]


async def test_closing_the_stream_from_another_task_ends_the_iteration(
    client: AsyncClient, engine: SyntheticEngine
) -> None:
    engine.hold_at = 2
    stream = client.generate(MODEL, "hello", max_tokens=6, seed=0, on_disconnect="continue")
    await stream.accepted()
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    await stream.aclose()
    async with asyncio.timeout(LIMIT_S):
        assert (await reading).usage is None
    engine.go_on()
    assert (await client.resume(stream.request_id).collect()).text == "abcdef"


async def test_closing_the_client_raises_in_its_readers(gateway: Address, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    client = AsyncClient(gateway.target)
    stream = client.generate(MODEL, "hello", max_tokens=6, seed=0)
    await stream.accepted()
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    await client.close()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(StreamClosed):
            await reading
    with pytest.raises(StreamClosed):
        await client.list_models()


@pytest.mark.parametrize("method", ["cancel", "get_request", "list_models"])
async def test_closing_the_client_raises_in_its_waiting_calls(silent_target: str, method: str) -> None:
    client = AsyncClient(silent_target)
    ask = getattr(client, method)
    asking = asyncio.create_task(ask() if method == "list_models" else ask("any"))
    await asyncio.sleep(0.1)
    await client.close()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(StreamClosed):
            await asking


async def test_cancelling_a_task_that_waits_for_an_answer_cancels_its_call(silent_target: str) -> None:
    client = AsyncClient(silent_target)
    asking = asyncio.create_task(client.list_models())
    await asyncio.sleep(0.1)
    asking.cancel()
    await client.close()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await asking
