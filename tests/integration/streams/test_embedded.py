"""The server as a child process: ready when started, its data kept over every kind of end."""

from pathlib import Path

import pytest
from pagestream_streams import EmbeddedRedis, ServerBinary, Unavailable, server_command
from redis import Redis
from support.redis.servers import oldest_server


@pytest.fixture(name="binary")
def oldest() -> ServerBinary:
    return oldest_server()


async def test_data_outlives_stop_and_kill(tmp_path: Path, binary: ServerBinary) -> None:
    server = EmbeddedRedis(tmp_path / "data", binary=binary)
    for number, end in enumerate(("stop", "kill", "stop")):
        await server.start()
        with Redis(port=server.port) as client:
            assert client.incr("starts") == number + 1
        if end == "stop":
            await server.stop()
        else:
            server.kill()
        assert server.pid is None


async def test_a_port_that_is_taken_is_told_with_the_server_s_words(tmp_path: Path, binary: ServerBinary) -> None:
    first = EmbeddedRedis(tmp_path / "a", binary=binary)
    await first.start()
    second = EmbeddedRedis(tmp_path / "b", port=first.port, binary=binary)
    try:
        with pytest.raises(Unavailable, match="ended with"):
            await second.start()
    finally:
        await first.stop()


def test_command_keeps_append_only_files_and_listens_here_only(tmp_path: Path, binary: ServerBinary) -> None:
    command = server_command(binary, tmp_path, 1234)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "everysec"
    assert options["--bind"] == "127.0.0.1"
    assert options["--dir"] == str(tmp_path)
    assert options["--port"] == "1234"
