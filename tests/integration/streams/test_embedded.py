"""The server as a child process: ready when started, its data kept over every kind of end."""

import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from pagestream_streams import EmbeddedRedis, ServerBinary, Unavailable, server_command
from pagestream_streams.connection.embedded import free_port, socket_path
from redis import Redis
from support.redis.servers import oldest_server


@pytest.fixture(name="binary")
def oldest() -> ServerBinary:
    return oldest_server()


async def test_data_outlives_stop_and_kill(tmp_path: Path, binary: ServerBinary) -> None:
    server = EmbeddedRedis(tmp_path / "data", binary=binary)
    for number, end in enumerate(("stop", "kill", "stop")):
        await server.start()
        with Redis.from_url(server.url) as client:
            assert client.incr("starts") == number + 1
        if end == "stop":
            await server.stop()
        else:
            server.kill()
        assert server.pid is None


async def test_a_port_that_is_taken_is_told_with_the_server_s_words(tmp_path: Path, binary: ServerBinary) -> None:
    port = free_port()
    first = EmbeddedRedis(tmp_path / "a", port=port, binary=binary)
    await first.start()
    second = EmbeddedRedis(tmp_path / "b", port=port, binary=binary)
    try:
        with pytest.raises(Unavailable, match="ended with"):
            await second.start()
    finally:
        await first.stop()


async def test_only_its_user_can_open_its_socket(tmp_path: Path, binary: ServerBinary) -> None:
    server = EmbeddedRedis(tmp_path / "data", binary=binary)
    await server.start()
    try:
        socket = tmp_path / "data" / "redis.sock"
        assert server.where == socket
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        with Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}
    finally:
        await server.stop()


async def test_a_path_that_is_too_long_for_a_socket_gets_a_folder_of_this_user_alone(
    tmp_path: Path, binary: ServerBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="ps-"))  # short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    data = tmp_path / ("long-name-" * 12)
    server = EmbeddedRedis(data, binary=binary)
    assert isinstance(server.where, Path)
    folder = server.where.parent
    assert folder.parent == runtime
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await server.start()
    try:
        with Redis.from_url(server.url) as client:
            assert client.config_get("dir") == {"dir": str(data)}
        assert socket_path(data) == server.where == folder / "redis.sock"
    finally:
        await server.stop()
    folder.chmod(0o755)
    with pytest.raises(Unavailable, match="is not a folder of this user alone"):
        socket_path(data)
    shutil.rmtree(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(data))  # too long itself
    assert socket_path(data).is_relative_to(tempfile.gettempdir())


def test_command_keeps_append_only_files_and_listens_here_only(tmp_path: Path, binary: ServerBinary) -> None:
    command = server_command(binary, tmp_path, 1234)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "everysec"
    assert options["--bind"] == "127.0.0.1"
    assert options["--dir"] == str(tmp_path)
    assert options["--port"] == "1234"
