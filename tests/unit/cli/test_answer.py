"""Answers that survive their connections, against a real server that breaks them."""

import pytest
from pagestream_cli.client import Delta, Endpoint, Reconnection, stream_answer
from pagestream_cli.client.answer import cancel
from pagestream_cli.client.models import choose_model, list_models
from pagestream_cli.client.show import show_answer
from pagestream_cli.errors import RequestRejectedError, ServerNotFoundError, StreamLostError, UsageError
from pagestream_cli.ports import free_port
from support.clients.scripted_gateway import REQUEST_ID, ScriptedGateway

QUICK = Reconnection(limit_s=30.0, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
IMPATIENT = Reconnection(limit_s=0.2, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
BODY = {"model": "demo", "prompt": "Tell"}


async def answer(gateway: ScriptedGateway, policy: Reconnection = QUICK, path: str = "/v1/completions") -> list[Delta]:
    return [delta async for delta in stream_answer(Endpoint((gateway.url,)), path, BODY, policy)]


async def test_an_undisturbed_answer() -> None:
    async with ScriptedGateway() as gateway:
        deltas = await answer(gateway)
    assert [delta.text for delta in deltas] == ["Once", " upon", " a", " time", "", ""]
    assert deltas[-2].finish_reason == "stop"
    assert deltas[-1].usage == {"prompt_tokens": 3, "completion_tokens": 4}
    assert {delta.request_id for delta in deltas} == {REQUEST_ID}
    (call,) = gateway.calls
    assert call.body == {**BODY, "stream": True}
    assert call.headers["idempotency-key"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("breaks", [[0], [1], [5], [6], [0, 0, 0], [2, 0, 1, 1], [1] * 6])
async def test_every_token_comes_once_whatever_breaks(path: str, breaks: list[int | float | str]) -> None:
    async with ScriptedGateway(breaks=list(breaks)) as gateway:
        deltas = await answer(gateway, path=path)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
    assert len(deltas) == 6
    first, *later = gateway.calls
    assert (first.method, first.path) == ("POST", path)
    assert {(call.method, call.path) for call in later} == {("GET", f"/v1/requests/{REQUEST_ID}/events")}


async def test_a_resume_names_the_last_event_that_was_seen() -> None:
    async with ScriptedGateway(breaks=[2]) as gateway:
        await answer(gateway)
    assert gateway.calls[1].headers["last-event-id"] == f"{REQUEST_ID}/2/d2"


@pytest.mark.parametrize("code", ["unavailable", "gateway_stopping"])
async def test_an_error_that_says_later_is_waited_out(code: str) -> None:
    async with ScriptedGateway(breaks=[2, code]) as gateway:
        deltas = await answer(gateway)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
    assert len(gateway.calls) == 3


async def test_waiting_in_a_queue_through_gateways_that_end_is_no_loss() -> None:
    policy = Reconnection(limit_s=0.4, healthy_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, 0.8, 0.8]) as gateway:
        deltas = await answer(gateway, policy)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
    assert len(gateway.calls) == 4


async def test_comments_of_connections_that_end_at_once_are_no_progress() -> None:
    policy = Reconnection(limit_s=0.4, healthy_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
    async with ScriptedGateway(breaks=[1, *[0.05] * 100]) as gateway:
        with pytest.raises(StreamLostError):
            await answer(gateway, policy)


async def test_an_error_that_says_no_ends_the_answer() -> None:
    async with ScriptedGateway(breaks=["engine_error"]) as gateway:
        with pytest.raises(RequestRejectedError, match="engine_error: later"):
            await answer(gateway)
    assert len(gateway.calls) == 1


async def test_a_refusal_for_now_is_tried_again_with_the_same_key() -> None:
    async with ScriptedGateway(refusals=[(503, "Redis is away"), (429, "full")]) as gateway:
        deltas = await answer(gateway)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
    assert len({call.headers["idempotency-key"] for call in gateway.calls}) == 1
    assert len(gateway.calls) == 3


async def test_a_refusal_for_good_is_told() -> None:
    async with ScriptedGateway(refusals=[(400, "temperature: must not be negative")]) as gateway:
        with pytest.raises(RequestRejectedError, match="400: temperature: must not be negative") as caught:
            await answer(gateway)
    assert caught.value.status == 400


async def test_another_gateway_goes_on_where_one_died() -> None:
    async with ScriptedGateway(breaks=[2]) as dying, ScriptedGateway() as living:
        stream = stream_answer(Endpoint((dying.url, living.url)), "/v1/completions", BODY, QUICK)
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
    assert len(dying.calls) == len(living.calls) == 1


async def test_a_server_that_stays_away_is_given_up() -> None:
    async with ScriptedGateway(breaks=[2] + [0] * 1000) as gateway:
        with pytest.raises(StreamLostError, match="did not answer for") as caught:
            await answer(gateway, IMPATIENT)
    assert REQUEST_ID in caught.value.hint


async def test_a_server_that_never_was_there_is_not_waited_for_long() -> None:
    endpoint = Endpoint((f"http://127.0.0.1:{free_port()}",))
    with pytest.raises(StreamLostError, match="did not answer") as caught:
        [delta async for delta in stream_answer(endpoint, "/v1/completions", BODY, QUICK)]
    assert caught.value.hint == "does a server run there?"


async def test_the_key_is_sent() -> None:
    async with ScriptedGateway() as gateway:
        endpoint = Endpoint((gateway.url,), "secret")
        [delta async for delta in stream_answer(endpoint, "/v1/completions", BODY, QUICK)]
    assert gateway.calls[0].headers["authorization"] == "Bearer secret"


async def test_an_answer_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedGateway(breaks=[3]) as gateway:
        text = await show_answer(Endpoint((gateway.url,)), "/v1/chat/completions", BODY)
    assert text == "Once upon a time"
    assert capsys.readouterr().out == "Once upon a time\n"


async def test_cancelling_tells_the_server_and_bears_its_absence() -> None:
    async with ScriptedGateway() as gateway:
        await cancel(Endpoint((gateway.url,)), REQUEST_ID)
    await cancel(Endpoint((gateway.url,)), REQUEST_ID)
    assert [(call.method, call.path) for call in gateway.calls] == [("DELETE", f"/v1/requests/{REQUEST_ID}")]


async def test_the_only_model_needs_no_name() -> None:
    async with ScriptedGateway() as gateway:
        endpoint = Endpoint((f"http://127.0.0.1:{free_port()}", gateway.url))
        assert await list_models(endpoint) == {"demo": 128}
        assert await choose_model(endpoint, None) == "demo"
        assert await choose_model(endpoint, "other") == "other"


async def test_among_several_models_one_has_to_be_named() -> None:
    async with ScriptedGateway(models=["b", "a"]) as gateway:
        with pytest.raises(UsageError, match="2 models: a, b"):
            await choose_model(Endpoint((gateway.url,)), None)


async def test_no_server_is_told_with_what_to_do() -> None:
    with pytest.raises(ServerNotFoundError, match="no server answers") as caught:
        await list_models(Endpoint((f"http://127.0.0.1:{free_port()}",)))
    assert "pagestream serve" in caught.value.hint
