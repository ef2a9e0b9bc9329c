"""The page at `/`: whole, from this server alone; switched off by a setting."""

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import httpx
import pytest
from pagestream_gateway import Settings
from support.clients.gateway_clients import Address

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]


async def test_the_page_has_all_its_parts_and_names_no_other_server(http: httpx.AsyncClient) -> None:
    seen, left = set(), {"/"}
    while left:
        path = left.pop()
        answer = await http.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?://(?!127\.0\.0\.1)", answer.text), path
        seen.add(path)
        found = set(re.findall(r'(?:href|src)="(/page/[^"]+)"', answer.text))
        found |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)}
        left |= found - seen
    assert len(seen) == 12


async def test_the_api_s_page_has_all_its_parts_and_names_no_other_server(http: httpx.AsyncClient) -> None:
    """Swagger UI itself names the standards that it reads; the policy keeps it from asking for anything elsewhere."""
    page = await http.get("/docs")
    parts = re.findall(r'(?:href|src)="(docs/[^"]+)"', page.text)
    assert len(parts) == 4
    for path in ("docs", *parts):
        answer = await http.get(f"/{path}")
        plain = await http.get(f"/{path}", headers={"Accept-Encoding": "identity"})
        assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip"), path
        assert "content-encoding" not in plain.headers
        assert answer.content == plain.content
        policy = answer.headers["content-security-policy"]
        assert {"default-src 'none'", "connect-src 'self'", "script-src 'self'"} <= set(policy.split("; "))
        if "swagger-ui" not in path:
            assert not re.search(r"https?://", answer.text), path


async def test_the_api_s_page_with_a_slash_is_the_one_without(http: httpx.AsyncClient) -> None:
    """Its links are relative, so that a proxy may put it below a path."""
    answer = await http.get("/docs/?a=b", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/docs")


async def test_the_page_can_be_switched_off(settings: Settings, another: Another) -> None:
    off = replace(settings, gateway=replace(settings.gateway, page=False))
    async with another(off) as address, httpx.AsyncClient(base_url=address.url) as client:
        assert {(await client.get(path)).status_code for path in ("/", "/page/app.js", "/page/state")} == {404}
        assert (await client.get("/healthz")).status_code == 200
