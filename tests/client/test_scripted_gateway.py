"""Streams over HTTP that survive their connections, against a real server that breaks them; both forms of the
transport."""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

import httpx2
import pytest
from pagestream_client import PagestreamError, Position, Reconnection, Unavailable
from pagestream_client.openai import transport
from pagestream_client.sse import SseDecoder
from support.clients.scripted_gateway import REQUEST_ID, ScriptedGateway
from support.processes.waiting import LIMIT_S, until

pytestmark = pytest.mark.served
QUICK = Reconnection(limit_s=LIMIT_S, first_contact_s=LIMIT_S, first_delay_s=0.01, max_delay_s=0.02)
IMPATIENT = Reconnection(limit_s=0.2, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
TEXT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell"}]


class Answer(NamedTuple):
    """The status of an answer and its bytes."""

    status: int
    content: bytes

    @property
    def events(self) -> list[Any]:
        """Its events, the last one as text."""
        return [
            each.data if each.data == "[DONE]" else json.loads(each.data) for each in SseDecoder().feed(self.content)
        ]

    @property
    def text(self) -> str:
        """The text of its events."""
        choices = [choice for event in self.events[:-1] for choice in event.get("choices", ())]
        return "".join(each.get("text") or (each.get("delta") or {}).get("content") or "" for each in choices)


Ask = Callable[..., Coroutine[Any, Any, Answer]]


def asked(request: dict[str, Any]) -> dict[str, Any]:
    given = request or {"prompt": "Tell"}
    path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
    return {"url": f"http://any{path}", "json": {"model": "demo", **given, "stream": True}}


async def ask_async(*urls: str, policy: Reconnection = QUICK, **request: Any) -> Answer:
    async with httpx2.AsyncClient(transport=transport(urls, reconnection=policy)) as client:
        response = await client.post(**asked(request))
        return Answer(response.status_code, response.content)


async def ask_blocking(*urls: str, policy: Reconnection = QUICK, **request: Any) -> Answer:
    def work() -> Answer:
        with httpx2.Client(transport=transport(urls, reconnection=policy)) as client:
            response = client.post(**asked(request))
            return Answer(response.status_code, response.content)

    return await asyncio.to_thread(work)


async def failure_of(answering: Coroutine[Any, Any, Answer]) -> PagestreamError:
    """Return the reason why a stream was given up."""
    with pytest.raises(httpx2.TransportError) as caught:
        await answering
    cause = caught.value.__cause__
    assert isinstance(cause, PagestreamError)
    return cause


@pytest.fixture
def unused_url() -> str:
    """The URL of a port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=[ask_async, ask_blocking], ids=["async", "blocking"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """One of the two forms."""
    chosen: Ask = request.param
    return chosen


async def test_an_undisturbed_answer(ask: Ask) -> None:
    async with ScriptedGateway() as gateway:
        answer = await ask(gateway.url, prompt="Tell", max_tokens=4)
    assert answer.text == TEXT
    *_, usage, done = answer.events
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 4)
    assert done == "[DONE]"
    (call,) = gateway.calls
    assert call.path == "/v1/completions"
    assert call.body == {"model": "demo", "prompt": "Tell", "max_tokens": 4, "stream": True}
    assert call.headers["idempotency-key"]


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
        answer = await ask(gateway.url, **request)
    assert answer.text == TEXT
    assert len([each for each in answer.events if each == "[DONE]" or each.get("choices") or each.get("usage")]) >= 6
    first, *later = gateway.calls
    assert (first.method, first.path) == ("POST", path)
    assert {(call.method, call.path) for call in later} <= {("GET", f"/v1/requests/{REQUEST_ID}/events")}
    assert bool(later) == (breaks != [6]), "after the usage nothing is left to read"


async def test_a_resume_names_the_last_event_that_was_read(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2]) as gateway:
        await ask(gateway.url)
    assert gateway.calls[1].headers["last-event-id"] == f"{REQUEST_ID}/2/d2"


@pytest.mark.parametrize("code", ["unavailable", "gateway_stopping", "internal_error"])
async def test_an_error_that_says_later_is_waited_out(ask: Ask, code: str) -> None:
    async with ScriptedGateway(breaks=[2, code]) as gateway:
        answer = await ask(gateway.url)
    assert answer.text == TEXT
    assert len(gateway.calls) == 3


@pytest.fixture
def _sooner_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = {"": 0.5, "GATEWAY_STOPPING": 0.5, "UNAVAILABLE": 0.5}
    monkeypatch.setattr("pagestream_client.retry._HEALTHY_S", healthy)


@pytest.mark.usefixtures("_sooner_healthy")
async def test_waiting_in_a_queue_through_gateways_that_end_is_no_loss(ask: Ask) -> None:
    policy = Reconnection(limit_s=1.5, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, 1.6, 1.6]) as gateway:
        answer = await ask(gateway.url, policy=policy)
    assert answer.text == TEXT
    assert len(gateway.calls) == 4


@pytest.mark.usefixtures("_sooner_healthy")
async def test_signs_of_life_of_connections_that_end_at_once_are_no_progress(ask: Ask) -> None:
    policy = Reconnection(limit_s=1.5, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, *[0.05] * 100]) as gateway:
        assert isinstance(await failure_of(ask(gateway.url, policy=policy)), Unavailable)


async def test_a_lost_request_is_accepted_again_with_its_seed_and_read_on(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2], is_lost=True) as gateway:
        answer = await ask(gateway.url)
    assert answer.text == TEXT
    first, lost, again, rest = gateway.calls
    assert (again.method, again.path, again.body) == ("PUT", f"/v1/requests/{REQUEST_ID}", first.body)
    assert (again.headers["x-request-seed"], again.headers["idempotency-key"]) == (
        "7",
        first.headers["idempotency-key"],
    )
    assert lost.headers["last-event-id"] == rest.headers["last-event-id"] == f"{REQUEST_ID}/2/d2"


async def test_an_error_that_says_no_ends_the_answer(ask: Ask) -> None:
    async with ScriptedGateway(breaks=["engine_error"]) as gateway:
        answer = await ask(gateway.url)
    assert [each["error"]["code"] for each in answer.events if each != "[DONE]" and "error" in each] == ["engine_error"]
    assert len(gateway.calls) == 1


async def test_a_refusal_for_now_is_retried_with_the_same_key(ask: Ask) -> None:
    async with ScriptedGateway(refusals=[(503, "Redis is away"), (502, "gone")]) as gateway:
        answer = await ask(gateway.url)
    assert answer.text == TEXT
    assert len({call.headers["idempotency-key"] for call in gateway.calls}) == 1
    assert len(gateway.calls) == 3


@pytest.mark.parametrize(("status", "message"), [(400, "temperature: must not be negative"), (429, "full")])
async def test_a_refusal_for_good_or_of_a_full_queue_is_the_answer(ask: Ask, status: int, message: str) -> None:
    async with ScriptedGateway(refusals=[(status, message)]) as gateway:
        answer = await ask(gateway.url)
    assert answer.status == status
    assert json.loads(answer.content)["error"]["message"] == message
    assert len(gateway.calls) == 1


async def test_another_gateway_goes_on_where_one_died(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2]) as one, ScriptedGateway(breaks=[2]) as other:
        answer = await ask(one.url, other.url)
    assert answer.text == TEXT
    assert sorted((len(one.calls), len(other.calls))) == [1, 2]


async def test_a_server_that_stays_away_is_given_up(ask: Ask) -> None:
    async with ScriptedGateway(breaks=[2] + [0] * 1000) as gateway:
        failure = await failure_of(ask(gateway.url, policy=IMPATIENT))
    assert f"no answer from {gateway.url} for 0.2 s" in str(failure)
    assert failure.position == Position(REQUEST_ID, 2, "d2")


async def test_a_server_that_never_was_there_is_not_waited_for_long(ask: Ask, unused_url: str) -> None:
    failure = await failure_of(ask(unused_url, policy=replace(QUICK, first_contact_s=0.2)))
    assert "no answer" in str(failure)
    assert failure.position is None


async def test_an_address_is_taken_in_any_usual_form() -> None:
    async with ScriptedGateway() as gateway:
        for end in ("", "/", "/v1", "/v1/"):
            assert (await ask_async(f"{gateway.url}{end}")).text == TEXT
    assert {call.path for call in gateway.calls} == {"/v1/completions"}


def test_another_address_is_refused() -> None:
    with pytest.raises(ValueError, match="'localhost:8000'"):
        transport("localhost:8000")


async def test_a_reader_that_is_cancelled_ends_its_call() -> None:
    """While a gateway sends two tokens, and then empty lines for a minute."""
    async with ScriptedGateway(breaks=[2, 60.0]) as gateway:
        reading = asyncio.create_task(ask_async(gateway.url))
        await until(lambda: len(gateway.calls) == 2, "the second call")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
