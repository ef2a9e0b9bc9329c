"""`pagestream dead`: list, show and requeue quarantined requests."""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import say

if TYPE_CHECKING:
    from pagestream_streams import Broker, QuarantinedRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of dead."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="list the quarantined requests, the oldest first")
    listing.add_argument("--model", metavar="NAME", help="only those of this model")
    listing.add_argument("--json", action="store_true", help="print JSON")
    store.add_arguments(listing)

    showing = actions.add_parser("show", help="show one of them in full")
    showing.add_argument("request_id", metavar="ID", help="id of a quarantined request")
    showing.add_argument("--json", action="store_true", help="print JSON, with the whole request")
    store.add_arguments(showing)

    requeueing = actions.add_parser(
        "requeue",
        help="continue it from where it stopped, under a new id, which is printed (a second time: the same id)",
    )
    requeueing.add_argument("request_id", metavar="ID", nargs="+", help="ids of quarantined requests")
    store.add_arguments(requeueing)


def run(arguments: argparse.Namespace) -> int:
    """List, show or requeue.

    Raises:
        CliError: Redis does not answer, or there is no such request or model.
    """
    actions = {"list": _list, "show": _show, "requeue": _requeue}
    asyncio.run(_acted(actions[arguments.action], arguments))
    return 0


async def _acted(action: Any, arguments: argparse.Namespace) -> None:
    async with store.opened(store.redis_url(arguments)) as broker:
        await action(broker, arguments)


async def _list(broker: Broker, arguments: argparse.Namespace) -> None:
    models = [arguments.model] if arguments.model else [info.name for info in await broker.models()]
    found = [dead for model in models for dead in await broker.quarantined(model)]
    found.sort(key=lambda dead: (dead.quarantined_at, dead.request_id))
    if arguments.json:
        print(json.dumps([summary(dead) for dead in found], indent=2))
        return
    if not found:
        say("no request is quarantined")
    for dead in found:
        print(line(dead))


async def _show(broker: Broker, arguments: argparse.Namespace) -> None:
    dead = await broker.quarantined_request(arguments.request_id)
    print(json.dumps(whole(dead), indent=2) if arguments.json else description(dead))


async def _requeue(broker: Broker, arguments: argparse.Namespace) -> None:
    for request_id in arguments.request_id:
        print(await broker.requeue(request_id), flush=True)


def line(dead: QuarantinedRequest) -> str:
    """Format one row of the list."""
    on = f"  requeued as {dead.requeued_as}" if dead.requeued_as else ""
    return f"{dead.request_id}  {_time(dead)}  {dead.model}  {dead.tenant}  at {dead.next_index}  {dead.reason}{on}"


def description(dead: QuarantinedRequest) -> str:
    """Format a request in full; the prompt itself is in the JSON form alone."""
    sampling = dead.spec.sampling
    rows = {
        "request": dead.request_id,
        "model": dead.model,
        "tenant": dead.tenant,
        "quarantined": _time(dead),
        "reason": dead.reason,
        "stood at": f"log entry {dead.next_index}",
        "claims": str(dead.attempts),
        "engines that died": ", ".join(dead.engines),
        "prompts": ", ".join(f"{len(prompt.ids)} tokens" for prompt in dead.spec.prompts),
        "sampling": f"n {sampling.n}, max_tokens {sampling.max_tokens}, temperature {sampling.temperature:g}, "
        f"seed {sampling.seed}",
        "client's own id": dead.spec.client_request_id,
        "requeued as": dead.requeued_as or "",
    }
    return "\n".join(f"{name + ':':19} {value}" for name, value in rows.items() if value)


def summary(dead: QuarantinedRequest) -> dict[str, Any]:
    """Return the row as JSON fields."""
    return {
        "request_id": dead.request_id,
        "model": dead.model,
        "tenant": dead.tenant,
        "reason": dead.reason,
        "next_index": dead.next_index,
        "attempts": dead.attempts,
        "engines": list(dead.engines),
        "quarantined_at": dead.quarantined_at,
        "requeued_as": dead.requeued_as,
    }


def whole(dead: QuarantinedRequest) -> dict[str, Any]:
    """Return the row with the request as it was accepted, in protobuf's JSON form."""
    from google.protobuf.json_format import MessageToDict

    return {**summary(dead), "spec": MessageToDict(dead.spec, preserving_proto_field_name=True)}


def _time(dead: QuarantinedRequest) -> str:
    return datetime.fromtimestamp(dead.quarantined_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
