"""The Redis of a deployment, for commands that read it directly."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pagestream_cli.datadir import DataDir, read_record
from pagestream_cli.errors import CliError, NotFoundError, ServerNotFoundError, UsageError

if TYPE_CHECKING:
    from pagestream_streams import Broker

CONNECT_LIMIT_S = 5.0
"""Short, since a user waits."""


def add_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options that name the Redis; `default` is SUPPRESS where the command's own parser has them, too."""
    parser.add_argument(
        "--redis", metavar="URL", default=default, help="default: that of the serve that runs in the data folder"
    )
    parser.add_argument("--data-dir", metavar="DIR", default=default, help="the data folder of that serve")


def redis_url(arguments: argparse.Namespace) -> str:
    """Return the given URL, else that of the serve that runs in the data folder.

    Raises:
        ServerNotFoundError: no serve runs there.
    """
    if arguments.redis is not None:
        return str(arguments.redis)
    data_dir = DataDir.at(arguments.data_dir)
    record = read_record(data_dir.serve_file)
    if record is None:
        raise ServerNotFoundError(
            f"no pagestream serve runs in {data_dir.path}", hint="name the deployment's Redis with --redis URL"
        )
    return record.redis_url


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Broker]:
    """Open the deployment's records; their errors inside the block are raised as errors of the command.

    Raises:
        CliError: Redis does not answer, or has no such request or model.
        UsageError: `url` or a variable of the environment is malformed.
    """
    from dataclasses import replace

    from pagestream_streams import Broker, ModelNotFound, RequestNotFound, StreamsError, settings_from_environment

    try:
        settings = replace(settings_from_environment(os.environ), connect_timeout_s=CONNECT_LIMIT_S)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        connected = await Broker.connect(url, settings)
    except ValueError as error:
        raise UsageError(f"--redis {url} is not the URL of a Redis: {error}") from error
    except StreamsError as error:
        raise ServerNotFoundError(f"Redis does not answer at {url}: {error}", hint="check --redis URL") from error
    async with connected as broker:
        try:
            yield broker
        except (RequestNotFound, ModelNotFound) as error:
            raise NotFoundError(str(error)) from error
        except StreamsError as error:
            raise CliError(str(error)) from error
