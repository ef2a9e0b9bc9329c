"""What operators ask of engines that change their models, by HTTP and by the command line: it stands in the roster."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio
from pagestream_cli.__main__ import main
from pagestream_streams import Broker
from pagestream_streams.admin import EngineRow, Verb
from support.clients.gateway_clients import gateway_settings, running_address
from support.protocol.token_streams import home_of

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

MODELS = ("a", "b")


@pytest_asyncio.fixture(loop_scope="module")
async def broker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url) as broker:
        # Nothing renews the row, however slow the machine is.
        monkeypatch.setattr(home_of(broker.engine_models), "_ROW_MS", 600_000)
        row = EngineRow(MODELS, serving="a", since_ms=1, failed={"b": "it is cut off"})
        await broker.engine_models.renew("one", row)
        yield broker


async def asked(broker: Broker) -> dict[str, Verb]:
    """Return what is asked for, and forget it."""
    orders = (await broker.engine_models.read()).orders
    for name, order in orders.items():
        await broker.engine_models.forget_order(name, order)
    return {name: order.verb for name, order in orders.items()}


async def test_calls_exist_by_a_setting_and_ask_engines(broker: Broker, redis_url: str) -> None:
    settings = gateway_settings(redis_url)
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:
        assert (await client.post("/v1/models/load", json={"model": "b"})).status_code in {404, 405}
        refused = await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        assert "it is cut off" in refused.json()["error"]["message"]
    settings = replace(settings, gateway=replace(settings.gateway, allow_model_changes=True))
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:
        for path, body, orders in (
            ("/v1/models/load", {"model": "b"}, {"b": Verb.LOAD}),
            ("/v1/models/unload", {"model": "a"}, {"a": Verb.UNLOAD}),
            ("/sleep?level=2", None, {"a": Verb.UNLOAD}),
            ("/sleep", None, {"a": Verb.SLEEP}),
            ("/wake_up?model=a", None, {"a": Verb.LOAD}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert await asked(broker) == orders
        for path in ("/sleep?level=3", "/sleep?model=c"):
            assert (await client.post(path)).status_code == 400
        unknown = await client.post("/v1/models/load", json={"model": "c"})
        assert "one of a, b is expected" in unknown.json()["error"]["message"]
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        await broker.engine_models.renew("one", EngineRow(MODELS, last="a", keeps="a"))
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        await client.post("/wake_up")
        assert await asked(broker) == {"a": Verb.LOAD}
        await client.post("/sleep?level=2")
        assert await asked(broker) == {"a": Verb.UNLOAD}, "the weights that it keeps are freed, too"


async def test_adapters_names_are_text(broker: Broker, redis_url: str) -> None:
    settings = gateway_settings(redis_url)
    settings = replace(settings, gateway=replace(settings.gateway, allow_runtime_lora=True))
    half = "\ud800"
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:
        for path, body, field in (
            ("/v1/unload_lora_adapter", {"lora_name": half}, "lora_name"),
            (
                "/v1/load_lora_adapter",
                {"lora_name": "a", "lora_path": "/a", "base_model_name": half},
                "base_model_name",
            ),
        ):
            headers = {"Content-Type": "application/json"}
            answer = await client.post(path, content=json.dumps(body), headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_the_command_asks_engines(broker: Broker, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def models(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["models", *arguments, "--redis", redis_url])

    for verb, order in (("load", Verb.LOAD), ("unload", Verb.UNLOAD)):
        assert await models(verb, "a") == 0
        assert await asked(broker) == {"a": order}
    for level, order in (("1", Verb.SLEEP), ("2", Verb.UNLOAD)):
        assert await models("sleep", "--level", level) == 0
        assert await asked(broker) == {"a": order}
    assert await models("wake", "b") == 0
    assert await asked(broker) == {"b": Verb.LOAD}
    assert await models("wake") == 0
    assert await asked(broker) == {}, "no engine sleeps"
    assert await models("load", "c") != 0
    assert await models("list") == 0
    await broker.engine_models.renew("one", EngineRow(MODELS, last="a", keeps="a"))
    assert await models("list") == 0
    assert await models("sleep") == 0
    assert await asked(broker) == {}, "it sleeps"
    assert await models("sleep", "--level", "2") == 0
    assert await asked(broker) == {"a": Verb.UNLOAD}
    assert await models("wake") == 0
    assert await asked(broker) == {"a": Verb.LOAD}
    shown = capsys.readouterr()
    assert "listed are: a, b" in shown.err
    assert "engine one serves a, of a, b; b can't be loaded: it is cut off" in shown.out
    assert "engine one sleeps with the weights of a, of a, b" in shown.out
