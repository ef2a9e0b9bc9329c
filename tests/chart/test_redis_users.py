"""The bundled Redis as the chart configures it: TLS, users by role, metrics. Real processes on a real server."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.kubernetes.chart import one, render
from support.processes.part import Part
from support.processes.stack import DEMO_MODEL, Gateway, free_port
from support.processes.waiting import LIMIT_S, wait_until
from support.protocol.adapter_folders import write_adapter
from support.redis.servers import server_of_seven, skip_for_want_of

pytestmark = pytest.mark.kube

OPTIONS = ("--set", "redis.bundled.tls.enabled=true,redis.bundled.metrics.enabled=true")
HOST = "pagestream-redis.llm.svc:6379"
OBSERVER = "user observer on nopass ~* &* +@all"


@dataclass(frozen=True)
class Server:
    """Redis with the chart's files; the addresses are those of the chart's Secret."""

    part: Part
    port: int
    secret: dict[str, Any]
    socket: Path

    def url(self, key: str) -> str:
        return str(self.secret[key]).replace(HOST, f"localhost:{self.port}")

    def as_user(self, user: str, password: str = "") -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), username=user, password=password, decode_responses=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    binary = server_of_seven()
    manifests = render(*OPTIONS)
    secret = one(manifests, "Secret", "pagestream-redis")["stringData"]
    text = one(manifests, "ConfigMap", "pagestream-redis")["data"]["redis.conf"]
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="ps-"))  # short: a socket's path has at most 107 bytes
    for file in ("users.acl", "tls.crt", "tls.key"):
        (folder / file).write_text(secret[file])
    with (folder / "users.acl").open("a") as users:
        users.write(f"\n{OBSERVER}\n")
    for path in ("/etc/redis-auth", "/etc/redis-tls", "/run/redis"):
        text = text.replace(path, str(folder))
    text = text.replace("dir /data", f"dir {folder}").replace("tls-port 6379", f"tls-port {port}")
    (folder / "redis.conf").write_text(text)
    part = Part("redis", [str(binary.path), str(folder / "redis.conf")], folder / "redis.log")
    found = Server(part, port, secret, folder / "redis.sock")
    part.start()
    try:
        wait_until(lambda: answers(found), what=f"Redis: {part.log_tail()}")
        yield found
    finally:
        part.stop()
        shutil.rmtree(folder)


def answers(server: Server) -> bool:
    with suppress(redis.exceptions.ConnectionError):
        return bool(server.as_user("probe", server.secret["probe-password"]).ping())
    return False


def test_gateway_and_engine_have_the_rights_that_they_need(server: Server, tmp_path: Path) -> None:
    """Accept, claim, stream, cancel, sweep and end, each process as its own user, over TLS."""
    engine = Part(
        "engine",
        [sys.executable, "-m", "pagestream_worker", str(DEMO_MODEL), "--dtype", "float32"],
        tmp_path / "engine.log",
        {"PAGESTREAM_WORKER__REDIS": server.url("url"), "PAGESTREAM_WORKER__SERVED_MODEL_NAME": "demo"},
    )
    port = free_port()
    gateway = Gateway(
        "gateway",
        [sys.executable, "-m", "pagestream_gateway", "--http-port", str(port), "--grpc-port", "0"],
        tmp_path / "gateway.log",
        {"PAGESTREAM_GATEWAY__REDIS": server.url("gateway-url")},
        http_port=port,
    )
    try:
        for part in (engine, gateway):
            part.start()
        wait_until(gateway.has_become_ready, what=f"the gateway {gateway.log_tail()}")
        wait_until(engine.has_said_ready, what=f"the engine {engine.log_tail()}")
        body = {"model": "demo", "prompt": "The lighthouse", "max_tokens": 8}
        headers = {"Idempotency-Key": "one"}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)
        assert answer.status_code == httpx.codes.OK, answer.text
        long = {**body, "stream": True, "max_tokens": 900, "ignore_eos": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=long, timeout=LIMIT_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            request_id = stream.headers["X-Request-Id"]
            assert httpx.delete(f"{gateway.url}/v1/requests/{request_id}").status_code < httpx.codes.BAD_REQUEST
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert '"revision"' in loaded_adapter(server, tmp_path)
    finally:
        for part in (gateway, engine):
            part.stop()
    refused = [(each["username"], each["object"]) for each in server.as_user("observer").acl_log()]
    # redis-py names itself and its version to the server; where that is refused it goes on.
    assert [each for each in refused if not each[1].startswith("client|")] == []


_ADAPTERS = "import sys; from pagestream_worker.jobs import run_adapters; sys.exit(run_adapters())"


def loaded_adapter(server: Server, folder: Path) -> str:
    """What the command of a pool's Job says of an adapter, with the engines' access."""
    write_adapter(folder)
    command = [sys.executable, "-c", _ADAPTERS, "demo", f"--load=a={folder}"]
    environment = {**os.environ, "PAGESTREAM_WORKER__REDIS": server.url("url")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("engine", ("GET", "ps:idem:0")),
        ("engine", ("SET", "other", "1")),
        ("engine", ("KEYS", "*")),
        ("engine", ("SCAN", "0")),
        ("gateway", ("SET", "other", "1")),
        ("gateway", ("PUBLISH", "other", "1")),
        ("gateway", ("FLUSHALL",)),
        ("gateway", ("CONFIG", "SET", "maxmemory", "1")),
        ("gateway", ("SCRIPT", "FLUSH")),
        ("gateway", ("ACL", "SETUSER", "gateway", "+@all")),
        ("probe", ("GET", "ps:models")),
        ("metrics", ("XRANGE", "ps:{demo/0}:queue:1", "-", "+")),
    ],
)
def test_no_user_may_do_more(server: Server, user: str, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        server.as_user(user, password_of(server, user)).execute_command(*command)


def password_of(server: Server, user: str) -> str:
    if user in ("probe", "metrics"):
        return str(server.secret[f"{user}-password"])
    address = server.secret["url" if user == "engine" else "gateway-url"]
    return str(address).partition(f"{user}:")[2].partition("@")[0]


def test_without_a_password_nobody_enters(server: Server) -> None:
    with pytest.raises((redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)):
        redis.Redis(unix_socket_path=str(server.socket)).ping()


def test_the_exporter_reads_what_the_alerts_need(server: Server, tmp_path: Path) -> None:
    binary = shutil.which("redis_exporter") or shutil.which("prometheus-redis-exporter")
    if binary is None:
        skip_for_want_of("redis_exporter", "neither redis_exporter nor prometheus-redis-exporter is on the PATH")
    port = free_port()
    password = server.secret["metrics-password"]
    environment = {"REDIS_ADDR": f"unix://{server.socket}", "REDIS_USER": "metrics", "REDIS_PASSWORD": password}
    environment["REDIS_EXPORTER_WEB_LISTEN_ADDRESS"] = f"127.0.0.1:{port}"
    part = Part("exporter", [str(binary)], tmp_path / "exporter.log", environment)
    part.start()
    try:
        wait_until(lambda: bool(scraped(port)), what=f"the exporter {part.log_tail()}")
        page = scraped(port)
    finally:
        part.stop()
    assert "\nredis_up 1" in page
    assert "\nredis_aof_last_write_status 1" in page
    assert "\nredis_memory_max_bytes 8.05306368e+08" in page


def scraped(port: int) -> str:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S).text
    return ""


def test_the_chart_probes_answer(server: Server) -> None:
    (pod,) = (
        each for each in render(*OPTIONS) if each["kind"] == "StatefulSet" and "redis" in each["metadata"]["name"]
    )
    container = pod["spec"]["template"]["spec"]["containers"][0]
    if shutil.which("redis-cli") is None:
        skip_for_want_of("redis7", "redis-cli, which the probes run, is not on the PATH")
    environment = {"REDISCLI_AUTH": server.secret["probe-password"], "PATH": os.environ["PATH"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = [
            part.replace("/run/redis/redis.sock", str(server.socket)) for part in container[probe]["exec"]["command"]
        ]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert result.returncode == 0, (probe, result.stdout + result.stderr)
        assert "ERR" not in result.stdout + result.stderr
