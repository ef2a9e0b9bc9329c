"""Which web pages may call the API, and what probes of other servers' names get."""

from typing import Any

import httpx
import pytest
from support.engines.synthetic_engine import MODEL

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:5173", True),
        ("https://[::1]", True),
        ("https://localhost.example.com", False),
        ("http://localhost:3000.example.com", False),
        ("https://example.com", False),
        ("null", False),
    ],
)
async def test_pages_of_this_machine_may_call_by_default(
    http: httpx.AsyncClient, origin: str, is_allowed: bool
) -> None:
    headers = {"Origin": origin, **PREFLIGHT}
    preflight = await http.options("/v1/completions", headers=headers)
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
