"""/admin/v1: who may call it, what it shows, and what it changes."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import Settings, running_gateway
from pagestream_streams import Broker, GatewaySession
from support.clients.gateway_clients import (
    Address,
    Event,
    bearer,
    gateway_settings,
    grpc_stub,
    refusal,
    running_address,
    sse_events,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine, synthetic_card
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import FAST, eventually, spec, worker
from support.protocol.token_streams import MODEL as IDLE

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
NOBODYS = f"00000000-0000-{'0' * 32}"
ROUTES = [
    ("GET", "/admin/v1/engines"),
    ("GET", "/admin/v1/models"),
    ("GET", "/admin/v1/queues"),
    ("GET", "/admin/v1/usage"),
    ("GET", "/admin/v1/tenants/a/requests"),
    ("GET", f"/admin/v1/requests/{NOBODYS}"),
    ("DELETE", f"/admin/v1/requests/{NOBODYS}"),
    ("GET", "/admin/v1/quarantine"),
    ("POST", f"/admin/v1/quarantine/{NOBODYS}/release"),
    ("POST", "/admin/v1/keys/reload"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the files of keys are."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def settings(redis_url: str, folder: Path) -> Settings:
    base = gateway_settings(redis_url, keys=write_keys(folder / "keys", {"ka": "a", "kb": "b"}))
    administrators = write_keys(folder / "administrators", {"root": "olga"})
    return dataclasses.replace(base, gateway=dataclasses.replace(base.gateway, admin_keys=administrators))


async def shown(http: httpx.AsyncClient, path: str) -> Any:
    """Return an answer that has the members that are declared and no others."""
    answer = await http.get(f"/admin/v1/{path}", headers=bearer("root"))
    assert answer.status_code == 200, answer.text
    document = (await http.get("/openapi.json")).json()
    template = "requests/{request_id}" if path.startswith("requests/") else path.partition("?")[0]
    declared = document["paths"][f"/admin/v1/{template}"]["get"]["responses"]["200"]
    schema = declared["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
    named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert set(answer.json()) == set(named["properties"])
    return answer.json()


async def test_only_administrators_keys_open_it(http: httpx.AsyncClient) -> None:
    for method, path in ROUTES:
        for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer("ka"), 403)):
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == status, (method, path)
        assert (await http.request(method, path, headers=bearer("root"))).status_code in (200, 404)
    declared = (await http.get("/openapi.json")).json()["paths"]
    listed = {(method.upper(), path) for path in declared for method in declared[path] if path.startswith("/admin")}
    assert len(listed) == len(ROUTES)


async def test_administrators_keys_open_nothing_else(http: httpx.AsyncClient, gateway: Address) -> None:
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models")):
        answer = await http.request(method, path, headers=bearer("root"), json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_credential")
    async with grpc_stub(gateway, key="root") as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(api.ListModelsRequest(), timeout=LIMIT_S)
    assert refusal(caught.value).code == grpc.StatusCode.PERMISSION_DENIED


async def test_without_administrators_there_is_no_such_api(engine: SyntheticEngine, redis_url: str) -> None:
    async with running_address(gateway_settings(redis_url)) as address:
        async with httpx.AsyncClient(base_url=address.url) as http:
            for method, path in (*ROUTES, ("POST", "/v1/load_lora_adapter"), ("POST", "/sleep")):
                assert (await http.request(method, path, headers=bearer("root"))).status_code in (404, 405)


async def test_requests_of_any_tenant_are_seen_and_ended(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    engine.go_on(hold_at=2)
    body = {**BODY, "stream": True, "on_disconnect": "continue"}
    async with http.stream("POST", "/v1/completions", json=body, headers=bearer("ka")) as stream:
        request_id = stream.headers["X-Request-Id"]
        assert (await http.get(f"/v1/requests/{request_id}", headers=bearer("kb"))).status_code == 404
        found = await shown(http, f"requests/{request_id}")
        assert (found["tenant"], found["id"]) == ("a", request_id)
        page = (await http.get("/admin/v1/tenants/a/requests", headers=bearer("root"))).json()
        assert [each["id"] for each in page["data"]] == [request_id]
        ended = await http.delete(f"/admin/v1/requests/{request_id}", headers=bearer("root"))
        assert (ended.status_code, ended.json()["finish_reason"]) == (200, "cancelled")
        assert "cancelled" in await anext(each async for each in stream.aiter_text() if "cancelled" in each)
    for tenant in ("b", "A"):
        page = (await http.get(f"/admin/v1/tenants/{tenant}/requests", headers=bearer("root"))).json()
        assert page == {"object": "list", "data": [], "has_more": False}
    assert (await http.get("/admin/v1/tenants/a%0ab/requests", headers=bearer("root"))).status_code == 400


async def test_what_runs_and_what_waits_is_listed(http: httpx.AsyncClient, redis_url: str) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as session:
        await broker.publish_model(synthetic_card(IDLE))
        waiting_ids: list[str] = []
        for tenant, number in (("a", 2), ("b", 1)):
            for _ in range(number):
                waiting_ids.append((request := spec(tenant=tenant, prompt=range(5))).request_id)
                await session.accept(request)

        async def is_known() -> bool:
            models = await shown(http, "models")
            return IDLE in [each["name"] for each in models["data"]]

        await eventually(is_known)
        queues = await shown(http, "queues")
    waiting = [each for each in queues["tenants"] if each["model"] == IDLE]
    assert [(each["tenant"], each["requests"], each["tokens"]) for each in waiting] == [("a", 2, 10), ("b", 1, 5)]
    rows = [each for each in queues["data"] if each["model"] == IDLE]
    assert sum(each["requests"] for each in rows) == 3
    engines = await shown(http, "engines")
    assert [each["model"] for each in engines["data"]] == [MODEL]
    models = await shown(http, "models")
    assert {each["name"]: each["engines"] for each in models["data"]} == {
        MODEL: 1,
        IDLE: 0,
    }
    for request_id in waiting_ids:
        ended = await http.delete(f"/admin/v1/requests/{request_id}", headers=bearer("root"))
        assert ended.json()["finish_reason"] == "cancelled"


async def test_quarantined_requests_are_listed_and_released(http: httpx.AsyncClient, redis_url: str) -> None:
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(synthetic_card(IDLE), partitions=1)
        async with GatewaySession(broker) as session:
            request = spec(tenant="a")
            await session.accept(request)
            for name in "abcd":
                async with worker(broker, name) as victim:
                    [claim] = await victim.claim()
                    await victim.session.mark(running=[claim.request_id])
                    await victim.session.hand_back([claim.request_id], failed=True)

            async def is_dead() -> bool:
                return bool(await broker.quarantined(IDLE))

            async with worker(broker, "spare"):
                await eventually(is_dead)
        [row] = (await shown(http, "quarantine"))["data"]
        assert (row["id"], row["tenant"]) == (request.request_id, "a")
        assert row["engines"]
        path = f"/admin/v1/quarantine/{request.request_id}/release"
        released = (await http.post(path, headers=bearer("root"))).json()
        assert (await http.post(path, headers=bearer("root"))).json() == released
        found = await shown(http, f"requests/{released['id']}")
        assert (found["tenant"], found["state"]) == ("a", "queued")
        assert await shown(http, f"quarantine?model={IDLE}") != []


async def test_operators_calls_need_administrators_unless_settings_open_them(
    http: httpx.AsyncClient, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    for method, path in (("GET", "/is_sleeping"), ("POST", "/sleep"), ("POST", "/v1/unload_lora_adapter")):
        for headers, status in ((bearer("ka"), 403), ({}, 401)):
            assert (await http.request(method, path, headers=headers, json={})).status_code == status
    with caplog.at_level(logging.INFO, "pagestream.audit"):
        assert (await http.get("/is_sleeping", headers=bearer("root"))).status_code == 200
    records = [vars(each) for each in caplog.records if each.name == "pagestream.audit"]
    [noted] = [each for each in records if each["event"] == "admin"]
    assert (noted["administrator"], noted["path"]) == ("olga", "/is_sleeping")
    opened = dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, allow_model_changes=True))
    async with running_address(opened) as address, httpx.AsyncClient(base_url=address.url) as other:
        for key in ("ka", "root"):
            assert (await other.get("/is_sleeping", headers=bearer(key))).status_code == 200
        assert (await other.post("/v1/unload_lora_adapter", headers=bearer("ka"), json={})).status_code == 403


async def test_keys_are_read_again_at_once_and_wrong_ones_not_at_all(http: httpx.AsyncClient, folder: Path) -> None:
    keys, administrators = folder / "keys", folder / "administrators"

    async def reloaded() -> list[dict[str, object]]:
        answer = await http.post("/admin/v1/keys/reload", headers=bearer("root"))
        return list(answer.json()["data"])

    async def statuses(*given: str) -> list[int]:
        return [(await http.get("/v1/models", headers=bearer(key))).status_code for key in given]

    write_keys(keys, {"kc": "c"})
    write_keys(administrators, {"root": "olga", "boss": "otto"})
    assert await reloaded() == [{"name": name, "changed": True} for name in ("api_keys", "admin_keys")]
    assert await statuses("ka", "kc") == [401, 200]
    assert (await http.get("/admin/v1/queues", headers=bearer("boss"))).status_code == 200
    for wrong in ("no hash -> x\n", "{"):
        keys.write_text(wrong)
        assert (await reloaded())[0]["changed"] is False
        assert await statuses("kc") == [200]
    keys.unlink()
    assert (await reloaded())[0]["changed"] is False
    assert await statuses("kc") == [200]
    keys.write_text("# the last key was revoked\n")
    assert (await reloaded())[0]["changed"] is True
    assert await statuses("kc") == [401]
    write_keys(keys, {"ka": "a", "kb": "b"})
    assert (await reloaded())[0]["changed"] is True
    assert await statuses("ka") == [200]


def text_of(events: Sequence[Event]) -> str:
    """Return the text of a completion's events, the last of which is [DONE]."""
    return "".join(event.body["choices"][0]["text"] for event in events[:-1])


async def test_a_revoked_key_begins_nothing_and_what_it_began_goes_on(
    http: httpx.AsyncClient, gateway: Address, folder: Path, engine: SyntheticEngine
) -> None:
    """A request belongs to its tenant: its other keys read it, and an administrator ends it."""
    keys, engine.hold_at = write_keys(folder / "keys", {"ka": "a", "new": "a", "kb": "b"}), 3

    async def reload() -> None:
        assert (await http.post("/admin/v1/keys/reload", headers=bearer("root"))).status_code == 200

    await reload()
    asked = {**BODY, "stream": True}
    async with (
        http.stream("POST", "/v1/completions", json=asked, headers=bearer("ka")) as stream,
        http.stream("POST", "/v1/completions", json=asked, headers=bearer("ka")) as ended,
        grpc_stub(gateway, key="ka") as stub,
    ):
        sampling = api.SamplingParams(max_tokens=8)
        chunks = aiter(stub.Generate(api.GenerateRequest(model=MODEL, prompt="hello", sampling=sampling)))
        first = await anext(chunks)
        events, others = sse_events(stream), sse_events(ended)
        begun = [await anext(events), await anext(others)][0]
        write_keys(keys, {"new": "a", "kb": "b"})
        await reload()
        request_id = stream.headers["X-Request-Id"]
        place = {"Last-Event-ID": begun.position}
        refused = [
            await http.post("/v1/completions", json=BODY, headers=bearer("ka")),
            await http.get(f"/v1/requests/{request_id}/events", headers={**bearer("ka"), **place}),
            await http.delete(f"/v1/requests/{request_id}", headers=bearer("ka")),
        ]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
            (401, "invalid_api_key")
        }
        other_id = ended.headers["X-Request-Id"]
        assert (await http.delete(f"/admin/v1/requests/{other_id}", headers=bearer("root"))).status_code == 200
        assert [event.data async for event in others][-1] == "[DONE]"
        engine.go_on()
        rest = [event async for event in events]
        assert rest[-1].data == "[DONE]"
        assert [answer async for answer in chunks][-1].chunk.request_id == first.chunk.request_id
    again = await http.get(f"/v1/requests/{request_id}/events", headers={**bearer("new"), **place})
    read_again = [event async for event in sse_events(again)]
    assert text_of(read_again) == text_of(rest) != ""
    assert read_again[-2].position == rest[-2].position
    write_keys(keys, {"ka": "a", "kb": "b"})
    await reload()


async def test_it_may_have_a_port_of_its_own(settings: Settings, engine: SyntheticEngine) -> None:
    own = dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, admin_port=0))
    async with running_gateway(own) as ports, httpx.AsyncClient() as client:
        assert ports.admin is not None
        for port, status in ((ports.admin, 200), (ports.http, 404)):
            answer = await client.get(f"http://127.0.0.1:{port}/admin/v1/queues", headers=bearer("root"))
            assert answer.status_code == status
        assert (await client.get(f"http://127.0.0.1:{ports.admin}/v1/models", headers=bearer("ka"))).status_code == 404
