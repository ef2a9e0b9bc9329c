"""The gateway as a process: its start, its exit statuses, its stop."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
from pagestream_client import AsyncClient
from pagestream_gateway import Settings, running_gateway
from pagestream_telemetry import loopback_host
from support.clients.gateway_clients import sse_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.fork_server import GATEWAYS, ForkedPart, run_forked, shared_server
from support.processes.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "my secret"}], "max_tokens": 6, "seed": 0}


@contextmanager
def process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pagestream_gateway", "--http-port", "0", "--grpc-port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def forked(log: Path, *flags: str) -> Iterator[ForkedPart]:
    """One that starts in no time, on free ports."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command = ["pagestream_gateway.__main__", *ports, *flags]
    running = ForkedPart("gateway", command, log, server=shared_server(*GATEWAYS))
    running.start()
    try:
        yield running
    finally:
        running.stop()


def serving(running: subprocess.Popen[str]) -> dict[str, object]:
    """Return the log record that holds the ports."""
    if running.stderr is None:
        raise AssertionError("stderr is a pipe")
    for line in running.stderr:
        record: dict[str, object] = json.loads(line)
        if record["message"] == "serving":
            return record
    raise AssertionError("the process ended")


@pytest.fixture
def failure(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return exit status and output of a process that can't start."""
    ports = ("--http-port", "0", "--grpc-port", "0")
    return partial(run_forked, shared_server(*GATEWAYS), tmp_path, "pagestream_gateway.__main__", *ports)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def test_redis_that_does_not_answer_is_told(failure: Callable[..., tuple[int, str]]) -> None:
    given = {"PAGESTREAM_BROKER__CONNECT_TIMEOUT_S": "0.5"}
    status, said = await asyncio.to_thread(failure, "--redis", "redis://user:password@127.0.0.1:1/0", **given)
    assert status == 1
    assert "pagestream-gateway: Redis does not answer at redis://127.0.0.1:1/0 (--redis)" in said
    assert "password" not in said


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
async def test_a_port_that_is_taken_is_told(
    failure: Callable[..., tuple[int, str]], redis_url: str, taken_port: int, flag: str
) -> None:
    status, said = await asyncio.to_thread(failure, "--redis", redis_url, flag, str(taken_port))
    assert status == 1
    assert f"127.0.0.1:{taken_port}" in said.splitlines()[-1]
    assert "Traceback" not in said


async def test_wrong_flags_are_told(failure: Callable[..., tuple[int, str]], redis_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("not-a-hash tenant\n")
    for flags, word in (
        (["--api-keys", str(keys)], "--api-keys"),
        (["--redis", "localhost"], "--redis"),
        (["--host"], "--host"),
    ):
        status, said = await asyncio.to_thread(failure, "--redis", redis_url, *flags)
        assert status == 2
        assert word in said
        assert "Traceback" not in said


@pytest.mark.parametrize("host", ["::", "localhost", "[::1]"])
async def test_it_is_reached_over_each_address_family_of_its_host(
    engine: SyntheticEngine, redis_url: str, tmp_path: Path, host: str
) -> None:
    if loopback_host() != "::1":
        pytest.skip("this machine has no IPv6 loopback address")
    reached = {"::": ("127.0.0.1", "[::1]"), "localhost": ("localhost",), "[::1]": ("[::1]",)}[host]
    with forked(tmp_path / "log", "--redis", redis_url, "--host", host, "--metrics-host", host) as running:
        await asyncio.to_thread(wait_until, lambda: '"serving"' in running.log.read_text(), "its ports")
        ports = next(json.loads(line) for line in running.log.read_text().splitlines() if '"serving"' in line)
        for name in reached:
            async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                for port in (ports["http_port"], ports["metrics_port"]):
                    assert (await client.get(f"http://{name}:{port}/healthz")).status_code == 200
            async with AsyncClient([f"{name}:{ports['grpc_port']}"]) as client:
                assert [model.name for model in await client.list_models()] == [MODEL]
        running.signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.wait) == 0


async def test_sigterm_ends_an_open_stream_and_the_process(engine: SyntheticEngine, redis_url: str) -> None:
    engine.hold_at = 2
    with process("--redis", redis_url, "--gateway-id", "g1") as running:
        port = (await asyncio.to_thread(serving, running))["http_port"]
        title = await asyncio.to_thread(Path(f"/proc/{running.pid}/cmdline").read_bytes)
        codes = []
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            async for event in sse_events(response):
                if event.next_index == 2 and "error" not in event.body:
                    running.send_signal(signal.SIGTERM)
                if "error" in event.body:
                    codes.append(event.body["error"]["code"])
        _, said = await asyncio.to_thread(running.communicate, timeout=LIMIT_S)
    assert title.startswith(b"pagestream-gateway")
    assert codes == ["gateway_stopping"]
    assert running.returncode == 0
    assert all(json.loads(line)["level"] == "INFO" for line in said.splitlines()), said
    assert "my secret" not in said


async def test_a_server_that_ends_at_its_start_ends_the_gateway(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start used to wait for it without a limit."""

    async def ends(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(uvicorn.Server, "serve", ends)
    with pytest.raises(OSError, match="too many open files"):
        async with asyncio.timeout(LIMIT_S), running_gateway(settings):
            pass
