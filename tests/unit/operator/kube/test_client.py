import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected, SettingsError
from pagestream_operator.kube.client import KubeClient, failure_of
from pagestream_operator.kube.kinds import DEFINITION, DEPLOYMENT, POD
from support.kubernetes.api import write_kubeconfig

Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "", Gone),
        (409, "", Conflict),
        (408, "", ApiUnavailable),
        (429, "", ApiUnavailable),
        (500, "", ApiUnavailable),
        (503, "", ApiUnavailable),
        (504, "", ApiUnavailable),
        (401, "", ApiUnavailable),
        (400, "", Rejected),
        (403, "", Rejected),
        (422, "", Rejected),
        (500, "failed to create typed patch object (x): duplicate entries", Rejected),
    ],
)
def test_what_to_do_is_in_the_error(status: int, message: str, kind: type[ApiFailure]) -> None:
    failure = failure_of("get X", status, message)
    assert type(failure) is kind
    assert failure.status == status
    assert str(status) in str(failure)


@pytest.mark.parametrize(("given", "seconds"), [("7", 7.0), ("soon", None), (None, None)])
def test_a_busy_server_says_how_long(given: str | None, seconds: float | None) -> None:
    assert failure_of("get X", 429, "", given).retry_after_s == seconds


def test_paths_of_kinds() -> None:
    assert POD.path("ns") == "/api/v1/namespaces/ns/pods"
    assert DEPLOYMENT.path(None) == "/apis/apps/v1/deployments"
    assert DEPLOYMENT.path("ns", "demo", "scale") == "/apis/apps/v1/namespaces/ns/deployments/demo/scale"
    assert DEFINITION.path(None, "x") == "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/x"


def test_no_access_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    with pytest.raises(SettingsError, match="set KUBECONFIG, or run in a pod"):
        KubeClient(1.0)


@asynccontextmanager
async def serving(handler: Handler, kubeconfig: Path) -> AsyncIterator[str]:
    """A server that answers everything by one function; the kubeconfig names it, with the token `first`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    write_kubeconfig(kubeconfig, server, token="first")
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return tmp_path / "kubeconfig"


async def test_a_token_that_was_renewed_is_read_again(kubeconfig: Path) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        if request.headers["Authorization"] != "Bearer second":
            return web.json_response({"message": "no"}, status=401)
        return web.json_response({"kind": "Pod"})

    async with serving(answer, kubeconfig) as server, KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="get Pod ns/a: 401 no"):
            await client.get(POD, "ns", "a")
        assert seen == ["Bearer first"]
        write_kubeconfig(kubeconfig, server, token="second")
        assert await client.get(POD, "ns", "a") == {"kind": "Pod"}
        assert seen == ["Bearer first", "Bearer first", "Bearer second"]
        assert client.calls == {("get", 401): 1, ("get", 200): 1}


async def test_all_calls_that_met_an_old_token_are_made_again(kubeconfig: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] == "Bearer first":
            await asyncio.sleep(0.05)  # all of them have asked by now
            write_kubeconfig(kubeconfig, server, token="second")
            return web.json_response({"message": "no"}, status=401)
        return web.json_response({"kind": "Pod"})

    async with serving(answer, kubeconfig) as server, KubeClient(5.0) as client:
        found = await asyncio.gather(*(client.get(POD, "ns", name) for name in "abcd"))
    assert found == [{"kind": "Pod"}] * 4


async def test_a_redirect_is_not_followed(kubeconfig: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        with pytest.raises(Rejected, match="302"):
            await client.get(POD, "ns", "a")


async def test_a_list_is_read_page_by_page(kubeconfig: Path) -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        first: dict[str, Any] = {"items": [{"n": 1}], "metadata": {"continue": "more"}}
        return web.json_response({"items": [{"n": 2}]} if "continue" in request.query else first)

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        assert await client.list(POD, None, "a=b,c") == [{"n": 1}, {"n": 2}]
    assert asked == [
        {"limit": "500", "labelSelector": "a=b,c"},
        {"limit": "500", "labelSelector": "a=b,c", "continue": "more"},
    ]


async def test_answers_that_are_no_objects_and_no_answers_are_outages(kubeconfig: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="JSONDecodeError"):
            await client.get(POD, "ns", "a")
    async with KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="get Pod ns/a: ClientConnectorError"):
            await client.get(POD, "ns", "a")
        assert client.calls == {("get", 0): 1}


async def test_a_call_has_a_limit(kubeconfig: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(answer, kubeconfig), KubeClient(0.1) as client:
        with pytest.raises(ApiUnavailable, match="Timeout"):
            await client.get(POD, "ns", "a")
