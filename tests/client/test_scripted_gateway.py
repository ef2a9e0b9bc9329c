"""Streams over HTTP that survive their connections, against a real server that breaks them; both clients."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from pagestream_client import (
    Chunk,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    PagestreamError,
    Position,
    QueueFull,
    Reconnection,
    RequestNotFound,
    StreamClosed,
    Unavailable,
)
from pagestream_client.http import AsyncHttpClient, HttpClient
from support.clients.scripted_gateway import REQUEST_ID, ScriptedGateway
from support.processes.waiting import until

pytestmark = pytest.mark.served
QUICK = Reconnection(limit_s=30.0, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
IMPATIENT = Reconnection(limit_s=0.2, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
TEXT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell"}]
Ask = Callable[..., Coroutine[Any, Any, list[Chunk]]]


async def ask_async(
    *urls: str, policy: Reconnection = QUICK, api_key: str | None = None, **request: Any
) -> list[Chunk]:
    request = request or {"prompt": "Tell"}
    async with AsyncHttpClient(urls, reconnection=policy, api_key=api_key) as client:
        return [chunk async for chunk in client.generate("demo", **request)]


async def ask_blocking(
    *urls: str, policy: Reconnection = QUICK, api_key: str | None = None, **request: Any
) -> list[Chunk]:
    request = request or {"prompt": "Tell"}

    def work() -> list[Chunk]:
        with HttpClient(urls, reconnection=policy, api_key=api_key) as client:
            return list(client.generate("demo", **request))

    return await asyncio.to_thread(work)


@pytest.fixture
def unused_url() -> str:
    """The URL of a port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=[ask_async, ask_blocking], ids=["async", "blocking"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """One of the two clients."""
    chosen: Ask = request.param
    return chosen


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_an_undisturbed_answer(ask: Ask) -> None:
    async with ScriptedGateway() as gateway:
        chunks = await ask(gateway.url, prompt="Tell", max_tokens=4, stop=["x"], logit_bias={3: 1.0})
    assert [chunk.text for chunk in chunks] == ["Once", " upon", " a", " time", "", ""]
    assert chunks[-2].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 4)
    assert chunks[3].position == Position(REQUEST_ID, 4, "d4")
    (call,) = gateway.calls
    assert call.path == "/v1/completions"
    assert call.body == {
        "model": "demo",
        "prompt": "Tell",
        "max_tokens": 4,
        "stop": ["x"],
        "logit_bias": {"3": 1.0},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert call.headers["idempotency-key"]
    assert "authorization" not in call.headers


async def test_a_conversation_goes_to_its_own_route(ask: Ask) -> None:
    async with ScriptedGateway() as gateway:
        chunks = await ask(gateway.url, messages=CHAT, logprobs=2, on_disconnect="continue", deadline_s=9.0)
    assert text_of(chunks) == TEXT
    (call,) = gateway.calls
    assert call.path == "/v1/chat/completions"
    assert (call.body["messages"], call.body["on_disconnect"]) == (CHAT, "continue")
    assert (call.body["logprobs"], call.body["top_logprobs"]) == (True, 2)
    assert 8.0 < float(call.headers["x-request-timeout"]) <= 9.0


@pytest.mark.parametrize(
    ("path", "breaks"),
    [
        ("/v1/completions", [0]),
        ("/v1/chat/completions", [1]),
        ("/v1/completions", [5]),
        ("/v1/chat/completions", [6]),
        ("/v1/chat/completions", [0, 0, 0]),
        ("/v1/completions", [2, 0, 1, 1]),
        ("/v1/chat/completions", [1] * 6),
    ],
)
async def test_every_token_comes_once_whatever_breaks(ask: Ask, path: str, breaks: list[int | float | str]) -> None:
    request: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": "Tell"}
    async with ScriptedGateway(breaks=list(breaks)) as gateway:
        chunks = await ask(gateway.url, **request)
    assert text_of(chunks) == TEXT
    assert len(chunks) == 6
    first, *later = gateway.calls
    assert (first.method, first.path) == ("POST", path)
    assert {(call.method, call.path) for call in later} <= {("GET", f"/v1/requests/{REQUEST_ID}/events")}
    assert bool(later) == (breaks != [6]), "after the usage nothing is left to read"


async def test_a_resume_names_the_last_event_that_was_read(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2]) as gateway:
        await ask(gateway.url)
    assert gateway.calls[1].headers["last-event-id"] == f"{REQUEST_ID}/2/d2"


async def test_a_stream_can_be_resumed_by_another_client() -> None:
    async with ScriptedGateway() as gateway:
        async with AsyncHttpClient(gateway.url) as client:
            rest = await client.resume(REQUEST_ID, 2, "d2").collect()
        again = await asyncio.to_thread(lambda: HttpClient(gateway.url).resume(REQUEST_ID, 2, "d2").collect())
    assert rest == again
    assert rest.text == " a time"
    assert {call.headers["last-event-id"] for call in gateway.calls} == {f"{REQUEST_ID}/2/d2"}


@pytest.mark.parametrize("code", ["unavailable", "gateway_stopping", "internal_error"])
async def test_an_error_that_says_later_is_waited_out(ask: Ask, code: str) -> None:
    async with ScriptedGateway(breaks=[2, code]) as gateway:
        chunks = await ask(gateway.url)
    assert text_of(chunks) == TEXT
    assert len(gateway.calls) == 3


@pytest.fixture
def _sooner_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = {"": 0.5, "GATEWAY_STOPPING": 0.5, "UNAVAILABLE": 0.5}
    monkeypatch.setattr("pagestream_client.retry._HEALTHY_S", healthy)


@pytest.mark.usefixtures("_sooner_healthy")
async def test_waiting_in_a_queue_through_gateways_that_end_is_no_loss(ask: Ask) -> None:
    policy = Reconnection(limit_s=1.5, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, 1.6, 1.6]) as gateway:
        chunks = await ask(gateway.url, policy=policy)
    assert text_of(chunks) == TEXT
    assert len(gateway.calls) == 4


@pytest.mark.usefixtures("_sooner_healthy")
async def test_signs_of_life_of_connections_that_end_at_once_are_no_progress(ask: Ask) -> None:
    policy = Reconnection(limit_s=1.5, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, *[0.05] * 100]) as gateway:
        with pytest.raises(Unavailable):
            await ask(gateway.url, policy=policy)


async def test_a_lost_request_is_accepted_again_with_its_seed_and_read_on(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2], is_lost=True) as gateway:
        chunks = await ask(gateway.url)
    assert text_of(chunks) == TEXT
    first, lost, again, rest = gateway.calls
    assert (again.method, again.path, again.body) == ("PUT", f"/v1/requests/{REQUEST_ID}", first.body)
    assert (again.headers["x-request-seed"], again.headers["idempotency-key"]) == (
        "7",
        first.headers["idempotency-key"],
    )
    assert lost.headers["last-event-id"] == rest.headers["last-event-id"] == f"{REQUEST_ID}/2/d2"


async def test_a_request_that_was_only_resumed_here_is_not_accepted_again() -> None:
    async with ScriptedGateway(is_lost=True) as gateway, AsyncHttpClient(gateway.url, reconnection=QUICK) as client:
        with pytest.raises(RequestNotFound):
            await client.resume(REQUEST_ID, 2, "d2").collect()
    assert [call.method for call in gateway.calls] == ["GET"]


async def test_an_error_that_says_no_ends_the_answer(ask: Ask) -> None:
    async with ScriptedGateway(breaks=["engine_error"]) as gateway:
        with pytest.raises(GenerationFailed, match="later") as caught:
            await ask(gateway.url)
    assert caught.value.code == "engine_error"
    assert len(gateway.calls) == 1


async def test_a_refusal_for_now_is_retried_with_the_same_key(ask: Ask) -> None:
    async with ScriptedGateway(refusals=[(503, "Redis is away"), (429, "full")]) as gateway:
        chunks = await ask(gateway.url)
    assert text_of(chunks) == TEXT
    assert len({call.headers["idempotency-key"] for call in gateway.calls}) == 1
    assert len(gateway.calls) == 3


async def test_a_refusal_for_good_is_raised(ask: Ask) -> None:
    async with ScriptedGateway(refusals=[(400, "temperature: must not be negative")]) as gateway:
        with pytest.raises(InvalidRequest, match="temperature: must not be negative") as caught:
            await ask(gateway.url)
    assert caught.value.http_status == 400


async def test_a_full_queue_beyond_the_limit_is_raised_at_once(ask: Ask) -> None:
    async with ScriptedGateway(refusals=[(429, "full")]) as gateway:
        with pytest.raises(QueueFull, match="full") as caught:
            await ask(gateway.url, policy=IMPATIENT)
    assert (caught.value.retry_after_s, caught.value.http_status) == (1.0, 429)


async def test_another_gateway_goes_on_where_one_died(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2]) as one, ScriptedGateway(breaks=[2]) as other:
        chunks = await ask(one.url, other.url)
    assert text_of(chunks) == TEXT
    assert sorted((len(one.calls), len(other.calls))) == [1, 2]


async def test_a_server_that_stays_away_is_given_up(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2] + [0] * 1000) as gateway:
        with pytest.raises(Unavailable, match=f"no answer from {gateway.url} for 0.2 s") as caught:
            await ask(gateway.url, policy=IMPATIENT)
    assert caught.value.position == Position(REQUEST_ID, 2, "d2")


async def test_a_server_that_never_was_there_is_not_waited_for_long(ask: Ask, unused_url: str) -> None:
    with pytest.raises(Unavailable, match="no answer") as caught:
        await ask(unused_url)
    assert caught.value.position is None


async def test_the_deadline_ends_the_tries(ask: Ask, unused_url: str) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(unused_url, policy=Reconnection(first_delay_s=0.01), prompt="Tell", deadline_s=0.2)


async def test_the_key_is_sent(ask: Ask) -> None:
    async with ScriptedGateway() as gateway:
        await ask(gateway.url, api_key="secret")
    assert gateway.calls[0].headers["authorization"] == "Bearer secret"


async def test_models_and_cancelling() -> None:
    async with ScriptedGateway() as gateway, AsyncHttpClient(gateway.url) as client:
        assert [(model.name, model.max_model_len) for model in await client.list_models()] == [("demo", 128)]
        assert await client.cancel(REQUEST_ID) == "cancelled"
        blocking = HttpClient(gateway.url)
        assert await asyncio.to_thread(blocking.list_models) == await client.list_models()
    assert ("DELETE", f"/v1/requests/{REQUEST_ID}") in [(call.method, call.path) for call in gateway.calls]


async def test_an_address_is_taken_in_any_usual_form() -> None:
    async with ScriptedGateway() as gateway:
        for end in ("", "/", "/v1", "/v1/"):
            assert text_of(await ask_async(f"{gateway.url}{end}")) == TEXT
    assert {call.path for call in gateway.calls} == {"/v1/completions"}


def test_another_address_is_refused() -> None:
    with pytest.raises(ValueError, match="'localhost:8000'"):
        HttpClient("localhost:8000")


@pytest.fixture
async def silent() -> AsyncIterator[ScriptedGateway]:
    """A gateway that sends two tokens, and then empty lines for a minute."""
    async with ScriptedGateway(breaks=[2, 60.0]) as gateway:
        yield gateway


async def test_closing_ends_a_read_of_another_task(silent: ScriptedGateway) -> None:
    async with AsyncHttpClient(silent.url, reconnection=QUICK) as client:
        stream = client.generate("demo", "Tell")
        reading = asyncio.create_task(stream.collect())
        await until(lambda: len(silent.calls) == 2, "the second call")
        await stream.aclose()
        assert (await reading).text == "Once upon"


async def test_a_stream_may_be_closed_again_while_it_closes(silent: ScriptedGateway) -> None:
    async with AsyncHttpClient(silent.url, reconnection=QUICK) as client:
        stream = client.generate("demo", "Tell")
        reading = asyncio.create_task(stream.collect())
        await until(lambda: len(silent.calls) == 2, "the second call")
        for _ in range(5):
            await stream.aclose()
            await asyncio.sleep(0)
        assert (await reading).text == "Once upon"


async def test_closing_ends_a_read_of_another_thread(silent: ScriptedGateway) -> None:
    client = HttpClient(silent.url, reconnection=QUICK)
    stream = client.generate("demo", "Tell")
    reading = asyncio.create_task(asyncio.to_thread(stream.collect))
    await until(lambda: len(silent.calls) == 2, "the second call")
    await asyncio.to_thread(stream.close)
    assert (await reading).text == "Once upon"
    await asyncio.to_thread(client.close)


async def test_a_client_that_closes_ends_its_streams(silent: ScriptedGateway) -> None:
    client = AsyncHttpClient(silent.url, reconnection=QUICK)
    reading = asyncio.create_task(client.generate("demo", "Tell").collect())
    await until(lambda: len(silent.calls) == 2, "the second call")
    await client.close()
    with pytest.raises(StreamClosed):
        await reading
    with pytest.raises(PagestreamError, match="the client is closed"):
        await client.list_models()
