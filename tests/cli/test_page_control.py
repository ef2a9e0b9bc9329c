"""The calls by which the page kills processes: who may make them, and what they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from pagestream_cli import ProcessRecord, ServeRecord
from pagestream_cli.page import Control
from starlette.testclient import TestClient
from support.processes.waiting import LIMIT_S

ORIGIN = "http://127.0.0.1:8000"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def control(victim: subprocess.Popen[bytes]) -> Control:
    processes = (ProcessRecord("serve", 1), ProcessRecord("engine-0", victim.pid), ProcessRecord("engine-1", None))
    gateway = ProcessRecord("gateway-0", None, {"http": 8000})
    return Control(lambda: ServeRecord("demo", "redis://", "127.0.0.1", (*processes, gateway), 0.0), "redis://none")


@pytest.fixture
def client(control: Control) -> TestClient:
    return TestClient(control.application([ORIGIN]), base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_a_page_may_call_by_whichever_name_it_was_opened(client: TestClient, name: str) -> None:
    for port, allowed in ((8000, f"http://{name}:8000"), (8001, None)):
        answer = client.post("/session", json={}, headers={"Origin": f"http://{name}:{port}"})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_a_page_calls_gateways_on_ipv6_by_a_name_that_its_policy_allows() -> None:
    gateway = ProcessRecord("gateway-0", None, {"http": 8000})
    control = Control(lambda: ServeRecord("demo", "redis://", "::1", (gateway,), 0.0), "redis://none")
    client = TestClient(control.application(["http://[::1]:8000"]), base_url="http://127.0.0.1")
    headers = session(client, control.token)
    assert client.get("/processes", headers=headers).json()["gateways"] == ["http://localhost:8000"]


def session(client: TestClient, token: str) -> dict[str, str]:
    answer = client.post("/session", json={"token": token})
    assert answer.status_code == 200
    return {"Authorization": f"Bearer {answer.json()['session']}"}


def test_a_token_is_good_once(client: TestClient, control: Control) -> None:
    token = control.token
    headers = session(client, token)
    assert control.token == ""
    assert client.post("/session", json={"token": token}).status_code == 401
    assert client.get("/processes", headers=headers).json() == {
        "gateways": [ORIGIN],
        "model": "demo",
        "processes": [
            {"name": name, "pid": pid, "restarts": 0}
            for name, pid in (("engine-0", control._record().processes[1].pid), ("engine-1", None), ("gateway-0", None))
        ],
    }


@pytest.mark.parametrize("body", [{"token": "x"}, {"token": 1}, {}, [], "x", {"token": "x" * 20_000}])
def test_a_wrong_token_spends_it(client: TestClient, control: Control, body: object) -> None:
    token = control.token
    assert client.post("/session", json=body).status_code == 401
    assert client.post("/session", json={"token": token}).status_code == 401


@pytest.mark.parametrize(("method", "path"), [("GET", "/processes"), ("POST", "/kill"), ("POST", "/owners")])
def test_each_call_needs_the_session(client: TestClient, control: Control, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {control.token}"}):
        assert client.request(method, path, headers=headers, json={}).status_code == 401


def test_a_kill_names_a_process_of_this_serve(
    client: TestClient, control: Control, victim: subprocess.Popen[bytes]
) -> None:
    headers = session(client, control.token)
    for part in ("serve", "engine-1", "engine-9", None, 7):
        assert client.post("/kill", headers=headers, json={"part": part}).status_code == 404
    assert victim.poll() is None
    assert client.post("/kill", headers=headers, json={"part": "engine-0"}).json() == {"pid": victim.pid}
    assert victim.wait(LIMIT_S) == -9


def test_other_hosts_and_pages_are_kept_out(client: TestClient) -> None:
    assert client.get("/processes", headers={"Host": "evil.example"}).status_code == 400
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    known = client.options("/kill", headers={**asked, "Origin": ORIGIN})
    other = client.options("/kill", headers={**asked, "Origin": "http://evil.example"})
    assert known.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in other.headers


def test_too_many_ids_are_refused(client: TestClient, control: Control) -> None:
    headers = session(client, control.token)
    for ids in (["x"] * 65, "x", [1], None):
        assert client.post("/owners", headers=headers, json={"ids": ids}).status_code == 400
