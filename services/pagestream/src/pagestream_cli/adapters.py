"""`pagestream adapters`: list the LoRA adapters of a deployment, load and unload them."""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import CliError, NotFoundError, UsageError

if TYPE_CHECKING:
    from pagestream.v1.records_pb2 import Adapter
    from pagestream_streams import Broker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of adapters."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="list the adapters")
    listing.add_argument("--json", action="store_true", help="print JSON")
    store.add_arguments(listing)

    loading = actions.add_parser("load", help="let requests name an adapter as their model")
    loading.add_argument("name", metavar="NAME", help="name that requests give")
    loading.add_argument("path", metavar="FOLDER", help="folder in PEFT's format, where engines find it")
    loading.add_argument("--model", metavar="NAME", help="its base model (default: the only one)")
    loading.add_argument("--revision", metavar="DIGEST", help="digest of its files, where they can't be read here")
    store.add_arguments(loading)

    unloading = actions.add_parser("unload", help="let requests name it no longer; accepted ones go on with it")
    unloading.add_argument("name", metavar="NAME", help="name that requests give")
    store.add_arguments(unloading)


def run(arguments: argparse.Namespace) -> int:
    """List, load or unload.

    Raises:
        CliError: Redis does not answer, or there is no such adapter or model, or its files can't be read.
    """
    asyncio.run(_acted(arguments))
    return 0


async def _acted(arguments: argparse.Namespace) -> None:
    actions = {"list": _list, "load": _load, "unload": _unload}
    async with store.opened(store.redis_url(arguments)) as broker:
        await actions[arguments.action](broker, arguments)


async def _list(broker: Broker, arguments: argparse.Namespace) -> None:
    adapters = (await broker.adapters.all()).values()
    if arguments.json:
        print(json.dumps([summary(adapter) for adapter in adapters], indent=2))
        return
    if not adapters:
        say("no adapter is loaded")
    for adapter in adapters:
        print(line(adapter))


async def _load(broker: Broker, arguments: argparse.Namespace) -> None:
    models = [info.name for info in await broker.models()]
    if arguments.model is None and len(models) != 1:
        raise UsageError(f"{len(models)} models are published; name the base model with --model")
    model = arguments.model or models[0]
    if model not in models:
        raise NotFoundError(f"no model {model!r} is published")
    if arguments.name in models:
        raise UsageError(f"{arguments.name!r} is a model's name; load the adapter under another")
    path = arguments.path if arguments.revision else await asyncio.to_thread(_whole, arguments.path)
    revision = await publish(broker, arguments.name, model, path, arguments.revision)
    say(f"{arguments.name} was loaded for {model}, revision {revision}")


async def publish(broker: Broker, name: str, model: str, path: str, revision: str | None = None) -> str:
    """Let requests name an adapter; return its revision, that of its files where none is given.

    Raises:
        CliError: its files can't be read, or it is refused.
    """
    from pagestream.v1.records_pb2 import Adapter
    from pagestream_streams import AdapterRefused
    from pagestream_streams.admin.adapters import adapter_revision

    try:
        found = revision if revision else await asyncio.to_thread(adapter_revision, Path(path))
        await broker.adapters.publish(Adapter(name=name, model=model, path=path, revision=found))
    except AdapterRefused as error:
        raise CliError(str(error)) from error
    return found


def _whole(path: str) -> str:
    return str(Path(path).expanduser().resolve())


async def _unload(broker: Broker, arguments: argparse.Namespace) -> None:
    await broker.adapters.withdraw(arguments.name)
    say(f"{arguments.name} was unloaded")


def line(adapter: Adapter) -> str:
    """Format one row of the list."""
    created = datetime.fromtimestamp(adapter.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{adapter.name}  of {adapter.model}  {adapter.path}  revision {adapter.revision}  loaded {created}"


def summary(adapter: Adapter) -> dict[str, Any]:
    """Return the row as JSON fields."""
    return {
        "name": adapter.name,
        "model": adapter.model,
        "path": adapter.path,
        "revision": adapter.revision,
        "created": adapter.created,
    }
