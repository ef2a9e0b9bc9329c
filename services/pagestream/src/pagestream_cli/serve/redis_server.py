"""The Redis that serve uses: one of its own, or somebody else's."""

from __future__ import annotations

from pathlib import Path

from pagestream_cli.errors import CliError, UsageError


def redis_command(data_dir: Path, port: int) -> list[str]:
    """Command line of our own Redis, which keeps append-only files in `data_dir`.

    Raises:
        CliError: this machine has no Redis server that is new enough.
    """
    from pagestream_streams.connection.embedded import find_server, server_command
    from pagestream_streams.errors import StreamsError

    try:
        return server_command(find_server(), data_dir, port)
    except StreamsError as error:
        raise CliError(
            str(error), hint="apt-get install redis-server, or name one that runs: --redis redis://HOST:PORT/0"
        ) from error


def says_torn(line: str) -> bool:
    """Whether our own Redis says that its file ended in the middle of a command: it has to be written anew."""
    from pagestream_streams.connection.embedded import TORN

    return TORN in line


async def check_redis(url: str) -> None:
    """Check that somebody else's Redis answers, before anything starts.

    Raises:
        UsageError: the URL is malformed.
        CliError: nobody answers there.
    """
    from pagestream_streams import Broker, StreamsSettings
    from pagestream_streams.errors import StreamsError

    try:
        broker = await Broker.connect(url, StreamsSettings(connect_timeout_s=3.0))
    except ValueError as error:
        raise UsageError(f"--redis {url}: {error}", hint="give redis://HOST:PORT/0") from error
    except StreamsError as error:
        raise CliError(
            f"no Redis answers at {url}: {error}", hint="start it, or leave --redis out: serve then runs its own"
        ) from error
    await broker.close()
