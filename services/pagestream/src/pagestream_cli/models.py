"""`pagestream models`: list the models of a deployment, and remove one that no engine serves."""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import CliError

if TYPE_CHECKING:
    from pagestream_streams import Broker
    from pagestream_streams.protocol.records import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of models; without an action it lists.

    An action's parser writes its defaults over what stood before the action, so shared options have none there.
    """
    parser.add_argument("--json", action="store_true", help="print JSON")
    store.add_arguments(parser)
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(metavar="ACTION")

    listing = actions.add_parser("list", help="list the models, with their living engines")
    listing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    store.add_arguments(listing, argparse.SUPPRESS)
    listing.set_defaults(action="list")

    removing = actions.add_parser("rm", help="remove a model that no engine serves")
    removing.add_argument("name", metavar="NAME")
    removing.add_argument("--end-requests", action="store_true", help="end unfinished requests with an error")
    removing.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="for its engines to end")
    store.add_arguments(removing, argparse.SUPPRESS)
    removing.set_defaults(action="rm")


def run(arguments: argparse.Namespace) -> int:
    """List or remove.

    Raises:
        CliError: Redis does not answer, there is no such model, or it is in use.
    """
    asyncio.run(_acted(arguments))
    return 0


async def _acted(arguments: argparse.Namespace) -> None:
    actions = {"list": _list, "rm": _remove}
    async with store.opened(store.redis_url(arguments)) as broker:
        await actions[arguments.action](broker, arguments)


async def _list(broker: Broker, arguments: argparse.Namespace) -> None:
    infos = await broker.models()
    if arguments.json:
        print(json.dumps([summary(info) for info in infos], indent=2))
        return
    if not infos:
        say("no model is published")
    for info in infos:
        print(line(info))


async def _remove(broker: Broker, arguments: argparse.Namespace) -> None:
    from pagestream_streams import ModelInUse, RequestsUnfinished, unpublish

    try:
        ended = await unpublish(broker, arguments.name, end_requests=arguments.end_requests, wait_s=arguments.wait)
    except ModelInUse as error:
        raise CliError(str(error), hint="--wait SECONDS waits for engines that are ending") from error
    except RequestsUnfinished as error:
        raise CliError(str(error), hint="--end-requests ends them with the error model_removed") from error
    say(f"{arguments.name} was removed; {ended} requests were ended")


def line(info: ModelInfo) -> str:
    """Format one row of the list."""
    created = datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{info.name}  {info.engines} engines  {info.partitions} partitions  published {created}"


def summary(info: ModelInfo) -> dict[str, Any]:
    """Return the row as JSON fields."""
    return {
        "name": info.name,
        "engines": info.engines,
        "partitions": info.partitions,
        "created": info.created,
        "digest": info.digest,
    }
