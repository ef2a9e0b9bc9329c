"""Real answers compared with /openapi.json: their statuses, media types, members and headers."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream_gateway import ConnectionSettings, LimitSettings, Settings
from pagestream_streams import StreamsSettings
from support.clients.gateway_clients import Address, gateway_settings, sse_events
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 0}
LINES = {"Accept": "application/x-ndjson"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUEST = "/v1/requests/{request_id}"
PROBES = ("/healthz", "/health", "/ping", "/version", "/load", "/readyz", "/metrics")
OTHER_SERVERS = ("content-", "date", "connection", "transfer-encoding", "cache-control", "x-accel-", "vary", "allow")


class Document:
    """What /openapi.json declares."""

    def __init__(self, text: str) -> None:
        self.all: dict[str, Any] = json.loads(text)
        self._components = self.all["components"]

    async def check(self, answer: httpx.Response, path: str = "") -> None:
        """Compare an answer with what is declared for its operation; `path` has the path's parameters in braces."""
        method = answer.request.method.lower()
        declared = self.all["paths"][path or answer.request.url.path][method]["responses"][str(answer.status_code)]
        names = {name.lower() for name in answer.headers if not name.lower().startswith(OTHER_SERVERS)}
        assert names <= {name.lower() for name in declared.get("headers", ())}
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if not kind:
            assert ("content" in declared, await answer.aread()) == (False, b"")
            return
        schema = declared["content"][kind]["schema"]
        if kind == "text/event-stream":
            data = schema["properties"]["data"]
            *_, declared_end = data.get("anyOf", [{}])
            for event in [each async for each in sse_events(answer)]:
                if event.data != declared_end.get("const"):
                    self._compare(event.body, data.get("anyOf", [data])[0]["contentSchema"])
        elif kind == "application/x-ndjson":
            for line in (await answer.aread()).splitlines():
                self._compare(json.loads(line), schema)
        elif kind == "application/json":
            self._compare(json.loads(await answer.aread()), schema)
        else:
            assert schema == {"type": "string"}

    def _compare(self, body: dict[str, Any], schema: dict[str, Any]) -> None:
        """Types are as declared, and no member is undeclared, in one of the schemas."""
        assert any(self._is_one(body, each) for each in schema.get("anyOf", [schema])), body

    def _is_one(self, body: dict[str, Any], reference: dict[str, str]) -> bool:
        named = self._components["schemas"][reference["$ref"].rpartition("/")[2]]
        valid = jsonschema.Draft202012Validator({**reference, "components": self._components}).is_valid(body)
        return valid and set(body) <= set(named["properties"])


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    """Return settings with which every operation is there but administrators' ones."""
    base = gateway_settings(redis_url)
    return replace(base, gateway=replace(base.gateway, allow_runtime_lora=True, allow_model_changes=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(shared_http: httpx.AsyncClient) -> Document:
    return Document((await shared_http.get("/openapi.json")).text)


async def test_generations(http: httpx.AsyncClient, document: Document) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", {**CHAT, "logprobs": True})):
        answer = await http.post(path, json=body, headers={"X-Request-Id": "mine"})
        await document.check(answer)
        assert {"x-request-id", "x-request-seed", "x-client-request-id"} <= set(answer.headers)
        async with http.stream("POST", path, json={**body, **USAGE}) as stream:
            await document.check(stream)
        await document.check(await http.post(path, json={**body, **USAGE}, headers=LINES))
        for wrong in ({**body, "n": 0}, {**body, "model": "none"}, body | {"logit_bias": {str(FAILING_TOKEN): 100}}):
            await document.check(await http.post(path, json=wrong))
        await document.check(await http.post(path, content=b"", headers={"Content-Type": "text/plain"}))


async def test_responses(http: httpx.AsyncClient, document: Document) -> None:
    path, own = "/v1/responses", "/v1/responses/{response_id}"
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 3, "seed": 0}
    made = await http.post(path, json=body)
    of_made = f"{path}/{made.json()['id']}"
    await document.check(made)
    async with http.stream("POST", path, json={**body, "stream": True}) as stream:
        await document.check(stream)
    for wrong in ({**body, "input": []}, {**body, "model": "none"}, {**body, "background": True}):
        await document.check(await http.post(path, json=wrong))
    async with http.stream("GET", f"{of_made}?stream=true&starting_after=3") as stream:
        await document.check(stream, own)
    for of in (of_made, f"{path}/none", f"{of_made}?starting_after=3"):
        await document.check(await http.get(of), own)
    await document.check(await http.post(f"{of_made}/cancel"), f"{own}/cancel")
    for of in (f"{of_made}/input_items", f"{of_made}/input_items?limit=0"):
        await document.check(await http.get(of), f"{own}/input_items")


async def test_messages(http: httpx.AsyncClient, document: Document) -> None:
    path, body = "/v1/messages", CHAT
    made = await http.post(path, json=body)
    await document.check(made)
    for headers in ({}, LINES):
        async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as stream:
            await document.check(stream)
    own = f"{REQUEST}/events"
    async with http.stream("GET", f"/v1/requests/{made.json()['id']}/events") as stream:
        await document.check(stream, own)
    failing = {**body, "logit_bias": {str(FAILING_TOKEN): 100}}
    for wrong in ({**body, "max_tokens": 0}, {**body, "model": "none"}, {"messages": []}, failing):
        await document.check(await http.post(path, json=wrong))
    counted = {"model": MODEL, "messages": CHAT["messages"]}
    for given in (counted, {**counted, "model": "none"}, {**counted, "max_tokens": 1}):
        await document.check(await http.post(f"{path}/count_tokens", json=given))


async def test_files(http: httpx.AsyncClient, document: Document) -> None:
    path, own = "/v1/files", "/v1/files/{file_id}"
    made = await http.post(path, files={"file": b"x"}, data={"purpose": "batch"})
    of_made = f"{path}/{made.json()['id']}"
    for answer in (made, await http.get(path), await http.post(path, json={}), await http.get(f"{path}?limit=0")):
        await document.check(answer, path)
    for answer in (await http.get(of_made), await http.delete(of_made), await http.get(of_made)):
        await document.check(answer, own)
    await document.check(await http.get(f"{of_made}/content"), f"{own}/content")


async def test_batches(http: httpx.AsyncClient, document: Document) -> None:
    path, own = "/v1/batches", "/v1/batches/{batch_id}"
    made = await http.post(path, json={"endpoint": "/v1/completions", "requests": [{"custom_id": "a", "body": {}}]})
    of_made = f"{path}/{made.json()['id']}"
    for answer in (made, await http.post(path, json={}), await http.get(path), await http.get(f"{path}?limit=0")):
        await document.check(answer, path)

    async def has_failed() -> bool:
        return bool((await http.get(of_made)).json()["status"] == "failed")

    await eventually(has_failed)
    for of in (of_made, f"{path}/none"):
        await document.check(await http.get(of), own)
        await document.check(await http.post(f"{of}/cancel"), f"{own}/cancel")


async def test_the_events_of_a_request_are_those_of_its_kind(http: httpx.AsyncClient, document: Document) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        await check_events(http, document, path, body)


async def check_events(http: httpx.AsyncClient, document: Document, path: str, body: dict[str, Any]) -> None:
    request_id = (await http.post(path, json=body)).headers["X-Request-Id"]
    events, own = f"/v1/requests/{request_id}/events", f"{REQUEST}/events"
    async with http.stream("GET", events) as stream:
        await document.check(stream, own)
        assert "x-stream-verified" in stream.headers
    answer = await http.get(f"/v1/requests/{request_id}/answer")
    await document.check(answer, f"{REQUEST}/answer")
    refused = [await http.get(events, headers={"Last-Event-ID": f"{request_id}/{place}"}) for place in ("99/", "2/0")]
    refused.append(await http.get("/v1/requests/none/events"))
    for answer in refused:
        await document.check(answer, own)
    assert {answer.status_code for answer in refused} >= {404, 416}


async def test_models_requests_and_probes(http: httpx.AsyncClient, document: Document) -> None:
    name = (await http.post("/v1/completions", json=COMPLETION)).headers["X-Request-Id"]
    for path in ("/v1/models", "/v1/requests", "/v1/requests?limit=0", *PROBES):
        await document.check(await http.get(path))
    await document.check(await http.get(f"/v1/models/{MODEL}"), "/v1/models/{name}")
    for answer in (
        await http.get(f"/v1/requests/{name}"),
        await http.put(f"/v1/requests/{name}", json=COMPLETION),
        await http.delete(f"/v1/requests/{name}"),
        await http.delete("/v1/requests/none"),
    ):
        await document.check(answer, REQUEST)


async def test_refusals_of_the_protocol(
    engine: SyntheticEngine, settings: Settings, another: Another, document: Document
) -> None:
    limits = ConnectionSettings(max_header_bytes=4096, body_timeout_s=0.5, max_connections=1)
    async with another(replace(settings, connections=limits, limits=LimitSettings(max_body_bytes=1000))) as address:

        async def ask(method: str, path: str, **options: Any) -> int:
            async with httpx.AsyncClient(base_url=address.url) as client:
                answer = await client.request(method, path, **options)
                await document.check(answer)
                assert ("retry-after" in answer.headers) == (answer.status_code == 503)
                return answer.status_code

        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/version")):
            assert await ask(method, path, headers={"X-A": "a" * 8192}) == 431
            assert await ask(method, path, headers={"Host": "example.com"}) == 403
            reader, writer = await asyncio.open_connection("127.0.0.1", address.http_port)
            assert await ask(method, path) == 503
            writer.close()
            await writer.wait_closed()
            assert await reader.read() == b""
        assert await ask("POST", "/v1/completions", json={"prompt": "a" * 2000}) == 413
        answer = await stalled(address)
        assert answer.status_code == 408
        await document.check(answer)


async def stalled(address: Address) -> httpx.Response:
    """Send a part of a body; return the answer, which comes before the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", address.http_port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 9\r\n\r\n{")
    async with asyncio.timeout(LIMIT_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *fields = head.decode().split("\r\n")
    headers = [tuple(field.split(": ", 1)) for field in fields]
    request = httpx.Request("POST", f"{address.url}/v1/completions")
    return httpx.Response(int(status.split()[1]), headers=headers, content=body, request=request)


async def test_a_full_quota(engine: SyntheticEngine, settings: Settings, another: Another, document: Document) -> None:
    narrow = replace(settings, broker=StreamsSettings(tenant_log_bytes=20_000))
    async with another(narrow) as address, httpx.AsyncClient(base_url=address.url) as client:
        for _ in range(50):
            answer = await client.post("/v1/completions", json=COMPLETION)
            await document.check(answer)
            if answer.status_code == 429:
                break
        assert (answer.status_code, "retry-after" in answer.headers) == (429, True)


async def test_every_operation_declares_its_answers(document: Document) -> None:
    def responses() -> Iterator[tuple[str, set[str]]]:
        for path, operations in document.all["paths"].items():
            for operation in operations.values():
                yield path, set(operation["responses"])

    for path, statuses in responses():
        assert {"200", "400", "408", "431", "500", "503"} <= statuses, path
        assert "422" not in statuses, path


async def test_every_json_body_has_examples_that_are_accepted(http: httpx.AsyncClient, document: Document) -> None:
    """They tell no model's name, and are what a reader of /docs sends first: with one that is served in its place."""
    chat = document.all["paths"][REQUEST]["put"]["requestBody"]["content"]["application/json"]["examples"]
    [known] = [each["value"] for each in chat.values()]
    request_id = (await http.post("/v1/chat/completions", json=known)).headers["X-Request-Id"]

    calls = []
    for path, operations in document.all["paths"].items():
        for method, operation in operations.items():
            json_body = operation.get("requestBody", {}).get("content", {}).get("application/json", {"examples": {}})
            for example in json_body["examples"].values():
                body = example["value"]
                if path == "/v1/responses":
                    assert body["model"] == "my-model"
                    body = {**body, "model": MODEL}
                calls.append(http.request(method, path.format(request_id=request_id), json=body))
    found = await asyncio.gather(*calls)
    # What isn't there in every deployment: a file, an adapter, a second model, a model for vectors or with tools.
    missing = re.compile("file-0123|my-adapter|my-model|gives no vectors|has no labels|chat template takes no tools")
    refused = [answer for answer in found if answer.status_code != 200]
    assert not [(answer.url, answer.text) for answer in refused if not missing.search(answer.text)]
    assert len(found) - len(refused) >= 15


async def test_a_405_names_all_methods_of_its_path(http: httpx.AsyncClient) -> None:
    async def allowed(path: str) -> list[str]:
        answer = await http.request("PATCH", path)
        assert answer.status_code == 405
        return sorted(answer.headers["Allow"].split(", "))

    assert await allowed("/v1/requests/none") == ["DELETE", "GET", "PUT"]
    assert await allowed("/v1/messages") == ["POST"]
    assert await allowed("/healthz") == ["GET"]


async def test_every_sampling_parameter_is_a_field_of_both_bodies(document: Document) -> None:
    """Of the wire contract's; the message has one form of an output, for which bodies have several names."""
    for name in ("CompletionBody", "ChatBody"):
        fields = set(document.all["components"]["schemas"][name]["properties"])
        assert set(SamplingParams.DESCRIPTOR.fields_by_name) <= fields
