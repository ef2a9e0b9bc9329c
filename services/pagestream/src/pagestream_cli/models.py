"""`pagestream models`: list the models of a deployment, have engines change theirs, and remove one without engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import CliError, NotFoundError

if TYPE_CHECKING:
    from pagestream_streams import Broker
    from pagestream_streams.admin.engine_models import EngineModelsView, EngineRow, Verb
    from pagestream_streams.protocol.records import ModelInfo


_CHANGES = {
    "load": "have an engine that lists a model load it",
    "unload": "have engines free a model; requests load it again",
    "sleep": "have engines free their models: all, or one",
    "wake": "have engines load what they had before they slept: all, or one model",
}
_OF_ALL = {"sleep", "wake"}
"""Which need no name."""
_POLL_S = 0.1


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

    for verb, text in _CHANGES.items():
        changing = actions.add_parser(verb, help=text)
        changing.add_argument(
            "name", metavar="NAME", nargs="?" if verb in _OF_ALL else None, help="served name of the model"
        )
        if verb == "sleep":
            changing.add_argument(
                "--level", type=int, choices=(1, 2), default=1, help="1: weights stay in host memory; 2: nothing does"
            )
        limit = "for it to be so (default: ask, and return)"
        changing.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help=limit)
        store.add_arguments(changing, argparse.SUPPRESS)
        changing.set_defaults(action=verb)

    removing = actions.add_parser("rm", help="remove a model that no engine serves")
    removing.add_argument("name", metavar="NAME", help="served name of the model")
    removing.add_argument("--end-requests", action="store_true", help="end unfinished requests with an error")
    removing.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="how long to wait for its engines to end"
    )
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
    actions = {"list": _list, "rm": _remove, **dict.fromkeys(_CHANGES, _change)}
    async with store.opened(store.redis_url(arguments)) as broker:
        await actions[arguments.action](broker, arguments)


async def _list(broker: Broker, arguments: argparse.Namespace) -> None:
    infos = await broker.models()
    if arguments.json:
        print(json.dumps([summary(info) for info in infos], indent=2))
        return
    if not infos:
        say("no model is published")
    known = await broker.engine_models.read()
    for info in infos:
        print(line(info))
    for engine_id, row in known.engines.items():
        print(engine_line(engine_id, row))


async def _change(broker: Broker, arguments: argparse.Namespace) -> None:
    from pagestream_streams.admin.engine_models import Verb

    action = arguments.action
    verb = Verb.LOAD if action in ("load", "wake") else Verb.UNLOAD
    if action == "sleep" and arguments.level == 1:
        verb = Verb.SLEEP
    names = _named(await broker.engine_models.read(), verb, arguments.name)
    if not names:
        say("no engine that may sleep serves a model" if action == "sleep" else "no engine sleeps")
        return
    for name in names:
        await broker.engine_models.order(name, verb)
    until = time.monotonic() + arguments.wait
    while True:
        view = await broker.engine_models.read()
        done = all(_is_done(view, name, verb) for name in names)
        if done or time.monotonic() >= until:
            break
        await asyncio.sleep(_POLL_S)
    if arguments.wait and not done:
        raise CliError(
            f"{', '.join(names)}: not changed after {arguments.wait:g} s", hint="see `pagestream models list`"
        )
    say(f"{', '.join(names)}: {action} is done" if done else f"{', '.join(names)}: engines were asked to {action}")


def _named(view: EngineModelsView, verb: Verb, name: str | None) -> list[str]:
    """Return the models that an action is about. NotFoundError where no engine lists the one that was named."""
    from pagestream_streams.admin.engine_models import Verb

    rows = view.engines.values()
    if name is None:
        kept = {row.keeps for row in rows if verb is Verb.UNLOAD}
        return sorted(({row.last if verb is Verb.LOAD else row.serving for row in rows} | kept) - {""})
    listed = sorted({each for row in rows for each in row.models})
    if name not in listed:
        raise NotFoundError(
            f"no engine that changes its model lists {name!r}; listed are: {', '.join(listed) or 'none'}"
        )
    return [name]


def _is_done(view: EngineModelsView, name: str, verb: Verb) -> bool:
    from pagestream_streams.admin.engine_models import Verb

    serving = [row for row in view.engines.values() if row.serving == name]
    if verb is Verb.LOAD:
        return any(not row.is_loading for row in serving)
    return not serving and not (verb is Verb.UNLOAD and any(row.keeps == name for row in view.engines.values()))


async def _remove(broker: Broker, arguments: argparse.Namespace) -> None:
    from pagestream_streams import ModelInUse, RequestsUnfinished, unpublish
    from pagestream_streams.limits import EndCounter

    count = EndCounter(broker).count_partition
    try:
        ended = await unpublish(
            broker, arguments.name, end_requests=arguments.end_requests, wait_s=arguments.wait, count_ended=count
        )
    except ModelInUse as error:
        raise CliError(str(error), hint="--wait SECONDS waits for engines that are ending") from error
    except RequestsUnfinished as error:
        raise CliError(str(error), hint="--end-requests ends them with the error model_removed") from error
    say(f"{arguments.name} was removed; {ended} requests were ended")


def line(info: ModelInfo) -> str:
    """Format one row of the list."""
    created = datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{info.name}  {info.engines} engines  {info.partitions} partitions  published {created}"


def engine_line(engine_id: str, row: EngineRow) -> str:
    """Format one engine that may change its model."""
    state = f"loads {row.serving}" if row.is_loading else f"serves {row.serving}"
    if not row.serving:
        state = (
            f"sleeps with the weights of {row.keeps}" if row.keeps else f"has no model since {row.last} was unloaded"
        )
    failed = "".join(f"; {name} can't be loaded: {reason}" for name, reason in row.failed.items())
    return f"  engine {engine_id.partition(':')[0]} {state}, of {', '.join(row.models)}{failed}"


def summary(info: ModelInfo) -> dict[str, Any]:
    """Return the row as JSON fields."""
    return {
        "name": info.name,
        "engines": info.engines,
        "partitions": info.partitions,
        "created": info.created,
        "digest": info.digest,
    }
