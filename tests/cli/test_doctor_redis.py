"""`pagestream doctor --redis`: what real servers are configured for, and what to do about it."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pagestream_cli import DataDir, ProcessRecord, ServeRecord, write_record
from pagestream_cli.__main__ import main
from pagestream_cli.doctor import Finding, Verdict, check_running_redis
from pagestream_streams.connection import EmbeddedRedis, ServerBinary, find_servers, free_port
from redis import Redis
from support.redis.servers import running_server, server_of_seven
from support.redis.topologies import Topology, running_cluster, running_sentinels, running_tls_server

pytestmark = pytest.mark.served

FSYNC, REPLICAS = "PAGESTREAM_BROKER__WAIT_FSYNC", "PAGESTREAM_BROKER__WAIT_REPLICAS"


def examine(url: str, folder: Path) -> dict[str, list[Finding]]:
    """Findings by the first word of their subject."""
    found: dict[str, list[Finding]] = {}
    for finding in check_running_redis(url, DataDir.at(folder)):
        found.setdefault(finding.subject.split()[0], []).append(finding)
    return found


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pagestream_cli.doctor.redis"], "LIMIT_S", 0.3)


@pytest.fixture(scope="module")
def seven() -> ServerBinary:
    return server_of_seven()


@pytest.fixture(scope="module")
def cluster(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), seven) as topology:
        yield topology


@pytest.fixture(scope="module")
def sentinels(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with running_sentinels(tmp_path_factory.mktemp("sentinels"), seven) as topology:
        yield topology


NEWEST, *OLDER = sorted(find_servers(), key=lambda each: each.version, reverse=True)


@pytest.fixture(
    scope="module",
    params=[NEWEST, *(pytest.param(each, marks=pytest.mark.slow) for each in OLDER)],
    ids=lambda each: ".".join(map(str, each.version)),
)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis"), request.param) as server:
        yield server
        server.kill()  # it takes no other signal while it begins an append-only file


@pytest.fixture
def server(any_server: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    """Configured as serve does it, before and after."""
    yield any_server
    configure(any_server, appendonly="yes", appendfsync="everysec", maxmemory=0)
    configure(any_server, **{"maxmemory-policy": "noeviction", "no-appendfsync-on-rewrite": "no"})


def configure(server: EmbeddedRedis, **settings: str | int) -> None:
    with Redis.from_url(server.url) as client:
        for name, value in settings.items():
            client.config_set(name, value)


def test_a_server_as_serve_starts_it_is_well(server: EmbeddedRedis, tmp_path: Path) -> None:
    found = examine(server.url, tmp_path)
    assert {finding.verdict for each in found.values() for finding in each} == {Verdict.OK}
    assert ".".join(map(str, server.binary.version)) in found["redis"][0].found
    assert "up to a second" in found["persistence"][0].found
    assert "none asked for" in found["waits"][0].found


@pytest.mark.parametrize(
    ("settings", "subject", "verdict", "said", "advice"),
    [
        ({"appendonly": "no"}, "persistence", Verdict.PROBLEM, "a restart forgets", "appendonly yes"),
        ({"appendfsync": "no"}, "persistence", Verdict.WARNING, "half a minute", "everysec"),
        ({"appendfsync": "always"}, "persistence", Verdict.OK, "loses nothing", ""),
        (
            {"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"},
            "persistence",
            Verdict.WARNING,
            "during a rewrite",
            "no-appendfsync-on-rewrite no",
        ),
        ({"maxmemory-policy": "allkeys-lru"}, "memory", Verdict.WARNING, "no limit", "noeviction"),
        (
            {"maxmemory-policy": "volatile-ttl", "maxmemory": 1 << 30},
            "memory",
            Verdict.PROBLEM,
            "drops requests",
            "noeviction",
        ),
        ({"maxmemory": 1 << 19}, "memory", Verdict.WARNING, "of 0.5 MiB", "raise maxmemory"),
        ({"maxmemory": 1 << 30}, "memory", Verdict.OK, "of 1024.0 MiB", ""),
    ],
)
def test_a_wrong_configuration_is_reported_with_its_remedy(
    server: EmbeddedRedis,
    tmp_path: Path,
    *,
    settings: dict[str, str | int],
    subject: str,
    verdict: Verdict,
    said: str,
    advice: str,
) -> None:
    configure(server, **settings)
    [finding] = examine(server.url, tmp_path)[subject]
    assert finding.verdict is verdict
    assert said in finding.found
    assert advice in finding.advice


def test_waiting_for_the_disk(server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FSYNC, "true")
    [finding] = examine(server.url, tmp_path)["waits"]
    if server.binary.version < (7, 2):
        assert finding.verdict is Verdict.PROBLEM
        assert "WAITAOF" in finding.found
        return
    assert finding.verdict is Verdict.WARNING
    assert "appendfsync always" in finding.advice
    configure(server, appendfsync="always")
    assert [each.verdict for each in examine(server.url, tmp_path)["waits"]] == [Verdict.OK]
    configure(server, appendonly="no")
    [finding] = examine(server.url, tmp_path)["waits"]
    assert finding.verdict is Verdict.PROBLEM


def test_waiting_for_a_replica_that_is_not_there(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPLICAS, "1")
    [finding] = examine(server.url, tmp_path)["waits"]
    assert finding.verdict is Verdict.PROBLEM
    assert "0 are connected" in finding.found


def test_a_wrong_variable_is_a_problem(server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICAS, "many")
    [finding] = examine(server.url, tmp_path)["waits"]
    assert (finding.verdict, REPLICAS in finding.found) == (Verdict.PROBLEM, True)


@pytest.mark.slow
def test_the_master_that_sentinels_name(sentinels: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICAS, "1")
    found = examine(sentinels.url, tmp_path)
    assert [each.found for each in found["role"]] == ["master with 1 replicas"]
    assert [each.verdict for each in found["waits"]] == [Verdict.OK]
    [replica] = [each for each in sentinels.servers if each not in sentinels.masters()]
    [finding] = examine(f"redis://127.0.0.1:{replica.port}/0", tmp_path)["role"]
    assert finding.verdict is Verdict.PROBLEM
    assert "takes no writes" in finding.found


@pytest.mark.slow
def test_each_node_of_a_cluster(cluster: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICAS, "1")
    found = examine(cluster.url, tmp_path)
    assert (
        sorted(each.found for each in found["role"])
        == ["a replica of the cluster"] * 3 + ["master with 1 replicas"] * 3
    )
    assert {each.verdict for findings in found.values() for each in findings} == {Verdict.OK}
    [finding] = examine(f"redis://127.0.0.1:{cluster.servers[0].port}/0", tmp_path)["role"]
    assert (finding.verdict, "redis+cluster://" in finding.advice) == (Verdict.PROBLEM, True)


def test_a_server_named_as_a_cluster(server: EmbeddedRedis, tmp_path: Path) -> None:
    [finding] = examine(f"redis+cluster://127.0.0.1:{server.port}", tmp_path)["role"]
    assert (finding.verdict, "name it alone" in finding.advice) == (Verdict.PROBLEM, True)


def test_a_user_who_may_not_ask_and_whose_password_is_not_shown(seven: ServerBinary, tmp_path: Path) -> None:
    with running_tls_server(tmp_path / "tls", seven) as (topology, _):
        found = examine(topology.url, tmp_path)
    assert found["persistence"][0].verdict is Verdict.WARNING
    assert "can't be read" in found["persistence"][0].found
    assert not any("secret" in f"{each.subject}{each.found}{each.advice}" for some in found.values() for each in some)


@pytest.mark.usefixtures("_impatient")
def test_no_server_and_a_malformed_address(tmp_path: Path) -> None:
    [finding] = examine(f"redis://127.0.0.1:{free_port()}/0", tmp_path)["redis"]
    assert (finding.verdict, bool(finding.advice)) == (Verdict.PROBLEM, True)
    [finding] = examine("http://127.0.0.1", tmp_path)["redis"]
    assert "redis://" in finding.found


@pytest.mark.usefixtures("_impatient")
def test_what_listens_there_is_no_redis(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        [finding] = examine(f"redis://127.0.0.1:{other.server_port}/0", tmp_path)["redis"]
        other.shutdown()
    assert finding.verdict is Verdict.PROBLEM
    assert "is not Redis protocol" in finding.found


@pytest.mark.slow
def test_the_command_looks_at_the_redis_of_the_running_serve(
    server: EmbeddedRedis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = DataDir.at(tmp_path)
    assert list(check_running_redis(None, data_dir)) == []
    serve = ProcessRecord("serve", 1)
    write_record(data_dir.serve_file, ServeRecord("demo", server.url, "127.0.0.1", (serve,), 0.0))
    configure(server, appendonly="no")
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    assert main(["doctor", "--json", "--data-dir", str(tmp_path), *ports]) == 1
    said = json.loads(capsys.readouterr().out)
    verdicts = {each["subject"]: each["verdict"] for each in said}
    assert verdicts[f"persistence 127.0.0.1:{server.port}"] == "problem"
