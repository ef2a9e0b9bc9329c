"""Which names of the server a request may carry, and which web pages may call the API."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pagestream.v1.inference_pb2 import ListModelsRequest
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_gateway import Settings, running_gateway
from support.clients.gateway_clients import Address, bearer, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]
FOREIGN = [
    "example.com",
    "example.com:8000",
    "localhost.example.com",
    "127.0.0.1.example.com:80",
    "192.168.0.7",
    "0.0.0.0:8000",
    "[::2]:80",
    "localhost:x",
    "localhost:1:2",
    "",
]
OWN = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:3", "127.0.0.1", "127.9.9.9:1", "[::1]", "[::1]:8000"]


async def test_without_keys_only_names_of_this_machine_are_served(http: httpx.AsyncClient) -> None:
    """A web page that lets its own name resolve to this machine gets nothing."""
    for host in (*FOREIGN, *OWN):
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            answer = await http.get(path, headers={"Host": host})
            assert answer.status_code == (403 if host in FOREIGN else 200), (host, path)
    for host in FOREIGN:
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers={"Host": host})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (403, "host_not_allowed", "Host")
        assert "PAGESTREAM_GATEWAY__ALLOWED_HOSTS" in error["message"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"allowed_hosts": "a.example, b.example"}, 200),
        ({"allowed_hosts": "*"}, 200),
        ({"allowed_hosts": "a.example"}, 403),
        ({"host": "0.0.0.0"}, 200),  # noqa: S104 -- what pods bind
        ({"host": "127.0.0.2"}, 403),
    ],
)
async def test_other_names_are_served_where_they_are_expected(
    settings: Settings, engine: SyntheticEngine, another: Another, change: dict[str, str], status: int
) -> None:
    listen = replace(settings.gateway, **change)
    url = "127.0.0.2" if listen.host == "127.0.0.2" else "127.0.0.1"
    async with another(replace(settings, gateway=listen)) as address, httpx.AsyncClient() as client:
        answer = await client.get(f"http://{url}:{address.http_port}/v1/models", headers={"Host": "B.example:80"})
        assert answer.status_code == status


async def test_a_key_is_enough(settings: Settings, engine: SyntheticEngine, another: Another, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"k": "a"})
    async with another(replace(settings, gateway=replace(settings.gateway, api_keys=keys))) as address:
        async with httpx.AsyncClient(base_url=address.url, headers={"Host": "example.com"}) as client:
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=bearer("k"))).status_code == 200


async def test_the_metrics_port_is_no_way_around_and_grpc_is_as_it_was(
    settings: Settings, engine: SyntheticEngine
) -> None:
    """A web page can't speak gRPC."""
    async with (
        running_gateway(replace(settings, gateway=replace(settings.gateway, metrics_port=0))) as ports,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.metrics}") as client,
        grpc.aio.insecure_channel(
            f"127.0.0.1:{ports.grpc}", options=[("grpc.default_authority", "example.com")]
        ) as channel,
    ):
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics", headers={"Host": "example.com"})).status_code == 403
        assert (await InferenceStub(channel).ListModels(ListModelsRequest())).models


COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


async def test_pages_of_this_machine_may_call_by_default(http: httpx.AsyncClient) -> None:
    for origin, is_allowed in (
        ("http://localhost:3000", True),
        ("http://127.0.0.1:5173", True),
        ("https://[::1]", True),
        ("https://localhost.example.com", False),
        ("http://localhost:3000.example.com", False),
        ("https://example.com", False),
        ("null", False),
    ):
        preflight = await http.options("/v1/completions", headers={"Origin": origin, **PREFLIGHT})
        assert (preflight.headers.get("Access-Control-Allow-Origin") == origin) == is_allowed
        answer = await http.post("/v1/completions", json=COMPLETION, headers={"Origin": origin})
        assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == is_allowed
        if is_allowed:
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_other_servers_names_of_probes(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        answer = await http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}
    async with http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True, "max_tokens": 3}) as response:
        response.raise_for_status()
        assert (await http.get("/load")).json()["server_load"] in (0, 1)
