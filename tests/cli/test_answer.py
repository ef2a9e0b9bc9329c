"""Answers in the terminal, against a real server that breaks its connections."""

import asyncio
from typing import Any

import pytest
from pagestream_cli import RequestRejectedError, ServerNotFoundError, StreamLostError, UsageError
from pagestream_cli.client import Endpoint, choose_model, list_models, show_answer, stream_answer
from pagestream_client import Reconnection
from support.clients.scripted_gateway import REQUEST_ID, ScriptedGateway
from support.processes.stack import free_port
from support.processes.waiting import until

IMPATIENT = Reconnection(limit_s=0.2, first_contact_s=0.2, first_delay_s=0.01, max_delay_s=0.02)
REQUEST: dict[str, Any] = {"model": "demo", "prompt": "Tell"}


async def test_an_answer_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedGateway(breaks=[3]) as gateway:
        text = await show_answer(Endpoint((gateway.url,)), REQUEST)
    assert text == "Once upon a time"
    assert capsys.readouterr().out == "Once upon a time\n"


async def test_a_refusal_names_the_status_of_the_answer() -> None:
    async with ScriptedGateway(refusals=[(400, "temperature: must not be negative")]) as gateway:
        with pytest.raises(RequestRejectedError, match="answered 400: temperature: must not be negative") as caught:
            await show_answer(Endpoint((gateway.url,)), REQUEST)
    assert caught.value.status == 400


async def test_a_failed_generation_is_shown_with_its_code() -> None:
    async with ScriptedGateway(breaks=["engine_error"]) as gateway:
        with pytest.raises(RequestRejectedError, match="engine_error: later"):
            await show_answer(Endpoint((gateway.url,)), REQUEST)


async def test_a_lost_stream_says_where_its_answer_may_be() -> None:
    async with ScriptedGateway(breaks=[2] + [0] * 1000) as gateway:
        with pytest.raises(StreamLostError, match="no answer from") as caught:
            [chunk async for chunk in stream_answer(Endpoint((gateway.url,)), REQUEST, IMPATIENT)]
    assert REQUEST_ID in caught.value.hint


async def test_without_a_server_it_asks_whether_one_runs() -> None:
    endpoint = Endpoint((f"http://127.0.0.1:{free_port()}",))
    with pytest.raises(StreamLostError, match="no answer from") as caught:
        [chunk async for chunk in stream_answer(endpoint, REQUEST, IMPATIENT)]
    assert caught.value.hint == "does a server run there?"


async def test_an_interrupted_answer_is_cancelled_on_the_server() -> None:
    async with ScriptedGateway(breaks=[2, 60.0]) as gateway:
        showing = asyncio.create_task(show_answer(Endpoint((gateway.url,)), REQUEST))
        await until(lambda: len(gateway.calls) == 2, "the second call")
        showing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await showing
    assert (gateway.calls[-1].method, gateway.calls[-1].path) == ("DELETE", f"/v1/requests/{REQUEST_ID}")


async def test_the_key_is_sent() -> None:
    async with ScriptedGateway() as gateway:
        await show_answer(Endpoint((gateway.url,), "secret"), REQUEST)
    assert gateway.calls[0].headers["authorization"] == "Bearer secret"


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


async def test_the_one_with_engines_is_used_and_others_are_marked() -> None:
    async with ScriptedGateway(models=["b", "a", "c"], unserved=["b", "a"], adapters=["d"]) as gateway:
        endpoint = Endpoint((gateway.url,))
        assert await choose_model(endpoint, None) == "c"
        gateway.unserved.append("c")
        with pytest.raises(UsageError, match=r"4 models: a \(no engine\), b \(no engine\), c \(no engine\)"):
            await choose_model(endpoint, None)
        gateway.unserved.clear()
        with pytest.raises(UsageError, match="4 models: a, b, c, d"):
            await choose_model(endpoint, None)


async def test_what_serve_was_started_with_is_used_whatever_else_there_is() -> None:
    async with ScriptedGateway(models=["a", "b"], unserved=["b"], adapters=["d"]) as gateway:
        assert await choose_model(Endpoint((gateway.url,), model="b"), None) == "b"
        assert await choose_model(Endpoint((gateway.url,), model="d"), None) == "d"
        assert await choose_model(Endpoint((gateway.url,), model="gone"), None) == "a"


async def test_an_answer_that_waits_for_an_engine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedGateway(models=["demo", "other"], unserved=["demo"], breaks=[2.6]) as gateway:
        await show_answer(Endpoint((gateway.url,)), REQUEST)
        told = capsys.readouterr()
        assert told.out == "Once upon a time\n"
        assert "no engine runs 'demo' now: the request waits for one" in told.err
        assert "with engines: other" in told.err
        await show_answer(Endpoint((gateway.url,)), REQUEST)
        assert capsys.readouterr().err == ""


async def test_no_server_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ServerNotFoundError, match="no server answers") as caught:
        await list_models(Endpoint((f"http://127.0.0.1:{free_port()}",)))
    assert "pagestream serve" in caught.value.hint
