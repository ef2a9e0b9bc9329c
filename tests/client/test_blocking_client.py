"""The blocking client against real gateways: the same as the asyncio one, from threads."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from pagestream_client import Client, FinishReason, Generation, InvalidRequest, RequestNotFound, StreamClosed
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(work)


async def test_a_stream_has_every_token_once(blocking: Client) -> None:
    def work() -> None:
        chunks = list(blocking.generate(MODEL, "hello", max_tokens=12, seed=0))
        assert "".join(chunk.text for chunk in chunks) == "abcdefghijkl"
        assert chunks[-1].usage is not None
        again = blocking.resume(chunks[0].request_id, chunks[0].next_index, chunks[0].digest).collect()
        assert chunks[0].text + again.text == "abcdefghijkl"

    await in_thread(work)


async def test_calls_that_are_no_streams(blocking: Client) -> None:
    def work() -> None:
        assert [model.name for model in blocking.list_models()] == [MODEL]
        answer = blocking.generate(MODEL, "hello", max_tokens=2).collect()
        assert blocking.get_request(answer.request_id).finish_reason is FinishReason.LENGTH
        assert blocking.cancel(answer.request_id) is FinishReason.LENGTH
        with pytest.raises(RequestNotFound):
            blocking.get_request("nonsense")
        with pytest.raises(InvalidRequest):
            blocking.generate(MODEL, "hello", top_p=2.0).collect()

    await in_thread(work)


async def test_a_deadline(blocking: Client, engine: SyntheticEngine) -> None:
    engine.hold_at = 3
    answer = await in_thread(blocking.generate(MODEL, "hello", max_tokens=6, seed=0, deadline_s=3.0).collect)
    assert (answer.text, answer.choices[0].finish_reason) == ("abc", FinishReason.DEADLINE)


async def test_many_threads_share_a_client(blocking: Client) -> None:
    def ask(number: int) -> Callable[[], Generation]:
        return blocking.generate(MODEL, f"prompt {number}", max_tokens=8, seed=number).collect

    answers = await asyncio.gather(*(in_thread(ask(number)) for number in range(16)))
    for number, answer in enumerate(answers):
        assert answer.text == "".join(chr(ord("a") + (number + place) % 26) for place in range(8))


async def test_a_cut_connection_is_not_seen(engine: SyntheticEngine, gateway: Address, other_gateway: Address) -> None:
    engine.hold_at = 3
    async with Proxy(gateway.grpc_port) as first, Proxy(other_gateway.grpc_port) as second:
        with_both = await in_thread(lambda: Client([first.target, second.target]))
        texts: list[str] = []
        loop = asyncio.get_running_loop()
        cut = threading.Event()

        def break_the_one_in_use() -> None:
            for network in (first, second):
                if network.num_connections:
                    network.reset()
            engine.go_on()
            cut.set()

        def work() -> None:
            with with_both as client:
                for chunk in client.generate(MODEL, "hello", max_tokens=12, seed=0):
                    texts.append(chunk.text)
                    if chunk.next_index == 3:
                        loop.call_soon_threadsafe(break_the_one_in_use)
                        assert cut.wait(LIMIT_S)

        await in_thread(work)
        assert "".join(texts) == "abcdefghijkl"
        assert (first.num_connections, second.num_connections) == (1, 1)


async def test_any_thread_may_close_a_stream(blocking: Client, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    stream = blocking.generate(MODEL, "hello", max_tokens=6, seed=0)
    await in_thread(stream.accepted)
    reading = asyncio.create_task(in_thread(stream.collect))
    await in_thread(stream.close)
    assert (await reading).usage is None


async def test_closing_the_client_ends_its_streams_and_threads(gateway: Address, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    client = Client(gateway.target)
    stream = client.generate(MODEL, "hello", max_tokens=6, seed=0)
    await in_thread(stream.accepted)
    reading = asyncio.create_task(in_thread(stream.collect))
    await in_thread(client.close)
    with pytest.raises(StreamClosed):
        await reading

    def is_quiet() -> bool:
        return not [thread for thread in threading.enumerate() if "channel" in thread.name.lower()]

    async with asyncio.timeout(LIMIT_S):
        while not is_quiet():  # noqa: ASYNC110  threads end without an event
            await asyncio.sleep(0.02)
    with pytest.raises(StreamClosed):
        client.list_models()


async def test_a_loop_that_is_left_ends_its_call(engine: SyntheticEngine, redis_url: str) -> None:
    engine.hold_at = 2

    def leave(client: Client) -> str:
        for chunk in client.generate(MODEL, "hello", max_tokens=6, seed=0):
            if chunk.next_index == 2:
                break
        return chunk.request_id

    async with running_address(gateway_settings(redis_url, grace_s=0.2)) as address:
        client = Client(address.target)
        try:
            request_id = await in_thread(lambda: leave(client))

            async def has_ended() -> bool:
                return (await in_thread(lambda: client.get_request(request_id))).finish_reason is not None

            await eventually(has_ended)
            ended = await in_thread(lambda: client.resume(request_id).collect())
            assert (ended.text, ended.choices[0].finish_reason) == ("ab", FinishReason.CANCELLED)
        finally:
            await in_thread(client.close)
