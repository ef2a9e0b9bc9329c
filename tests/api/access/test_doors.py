"""What answers without a key where keys are asked for: probes and documents, which tell nothing of tenants."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from pagestream_gateway import Settings, running_gateway
from support.clients.gateway_clients import bearer, gateway_settings, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

TENANTS = ("acme-research", "bluebird-bank")
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
WITHOUT_A_KEY = {"/healthz", "/health", "/ping", "/version", "/load", "/readyz", "/metrics"}
"""Of the operations that the document has."""
PAGES = ("/", "/docs", "/docs/docs.js", "/openapi.json", "/page/app.js")
NAMING = ("tenant=", "model", "pagestream_gateway_tokens", "target_info", "queue", "redis")
"""Parts of metrics that tell who calls, what for, how much, or where."""


@pytest.fixture(scope="module")
def settings(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder: Path = tmp_path_factory.mktemp("keys")
    base = gateway_settings(redis_url, keys=write_keys(folder / "keys", {"ka": TENANTS[0], "kb": TENANTS[1]}))
    administrators = write_keys(folder / "administrators", {"root": "olga"})
    return replace(base, gateway=replace(base.gateway, admin_keys=administrators, metrics_port=0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(shared_engine: SyntheticEngine, settings: Settings) -> AsyncIterator[tuple[str, str]]:
    """Addresses of the HTTP port and of the metrics port, after a request of each tenant."""
    del shared_engine
    async with running_gateway(settings) as running:
        url, metrics_url = (f"http://127.0.0.1:{port}" for port in (running.http, running.metrics))
        async with httpx.AsyncClient(base_url=url) as client:
            for key in ("ka", "kb"):
                assert (await client.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200

            async def are_counted() -> bool:
                text = (await client.get("/metrics", headers=bearer("root"))).text
                return all(f'pagestream_tenant_requests_total{{tenant="{each}"}} 1.0' in text for each in TENANTS)

            await eventually(are_counted)
        yield url, metrics_url


@pytest.mark.parametrize("key", [None, "ka", "kb", "unknown"])
async def test_metrics_of_the_port_for_callers_tell_nothing_of_tenants(ports: tuple[str, str], key: str | None) -> None:
    async with httpx.AsyncClient(base_url=ports[0], headers={} if key is None else bearer(key)) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert "metrics port" in answer.text
    assert [line for line in answer.text.splitlines() if not line.startswith("#")] == ["pagestream_streams_open 0.0"]


async def test_administrators_and_the_metrics_port_have_all(ports: tuple[str, str]) -> None:
    for url, headers in ((ports[0], bearer("root")), (ports[1], {})):
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            text = (await client.get("/metrics")).text
            assert all(part in text for part in (*TENANTS, *NAMING))


async def test_a_web_page_does_not_reach_the_metrics_port_by_another_name(ports: tuple[str, str]) -> None:
    """It asks for no key, also where the others do."""
    async with httpx.AsyncClient(base_url=ports[1]) as client:
        assert (await client.get("/metrics", headers={"Host": "rebound.example"})).status_code == 403
        assert (await client.get("/metrics", headers={"Host": "localhost:9400"})).status_code == 200


async def test_the_metrics_port_has_an_address_of_its_own(engine: SyntheticEngine, settings: Settings) -> None:
    del engine
    listen = replace(settings.gateway, metrics_host="127.0.0.3")
    async with running_gateway(replace(settings, gateway=listen)) as running, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.3:{running.metrics}/healthz")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{running.metrics}/healthz")


async def test_every_other_operation_asks_for_a_key(ports: tuple[str, str]) -> None:
    async with httpx.AsyncClient(base_url=ports[0]) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert set(paths) >= WITHOUT_A_KEY
        for path, operations in paths.items():
            for method in operations:
                url = path.replace("{", "").replace("}", "")
                body = BODY if method in ("post", "put", "patch") else None
                answer = await client.request(method, url, json=body)
                assert (answer.status_code == 401) == (path not in WITHOUT_A_KEY), (method, path, answer.text)
                assert not any(tenant in answer.text for tenant in TENANTS), path
        for path in (*PAGES, "/page/state", "/debug/profile", "/admin", "/metrics/", "//metrics", "/v1/../metrics"):
            answer = await client.get(path)
            assert not any(part in answer.text for part in (*TENANTS, "pagestream_tenant")), path
            assert path in PAGES or answer.status_code in (200, 401, 404), path
