"""`pagestream replay`: generate a past request again and compare."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import CliError, ReplayFailedError
from pagestream_cli.replay.answers import Answer, read_log
from pagestream_cli.replay.comparison import first_difference, largest_gap

if TYPE_CHECKING:
    from pagestream.v1.records_pb2 import LogEntry, RequestSpec
    from pagestream_streams import Broker

EQUAL, DIFFERENT, TROUBLE = 0, 1, 2
READ_LIMIT_S = 30.0
COPY_LIMIT_S = 300.0
QUARANTINED = "quarantined"  # error code at the end of the log of a quarantined request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of replay."""
    parser.epilog = "Exit code: 0 equal, 1 different, 2 it could not be compared."
    parser.add_argument("request_id", metavar="ID", help="a finished request whose log is still kept")
    parser.add_argument(
        "--tenant", metavar="NAME", default="default", help="tenant of the request (default: %(default)s)"
    )
    store.add_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="generate in this process from this model folder (default: the running deployment generates a copy)",
    )
    parser.add_argument("--dtype", default="auto", help="with --model: that of the engine (default: %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="with --model: where the engine had it")
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=COPY_LIMIT_S,
        help="without --model: longest wait for the copy (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay and compare. The exit code is that of diff: 0 equal, 1 different, 2 not comparable.

    Raises:
        CliError: Redis does not answer, the request is not there or has not ended, or it can't be generated again.
    """
    try:
        recorded, again = asyncio.run(_both(arguments))
    except CliError as error:
        error.exit_code = TROUBLE
        raise
    return _report(recorded, again)


async def _both(arguments: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    from pagestream_cli.replay.regeneration import bounded, by_deployment, offline

    async with store.opened(store.redis_url(arguments)) as broker:
        spec, entries = await _recorded(broker, arguments.request_id, arguments.tenant)
        if arguments.model is None and entries[-1].end.error.code == QUARANTINED:
            raise ReplayFailedError(
                f"{spec.request_id} is quarantined: engines died while they computed it, and would again",
                hint=f"generate here with --model FOLDER, or requeue it: pagestream dead requeue {spec.request_id}",
            )
        if spec.HasField("pooling"):
            raise ReplayFailedError(f"{spec.request_id} is a request for vectors: it has no tokens to compare")
        recorded = read_log(spec, entries)
        spec = bounded(spec, recorded)
        say(f"{spec.request_id}: {sum(len(answer.token_ids) for answer in recorded)} tokens of {spec.model}, again ...")
        if arguments.model is None:
            return recorded, await by_deployment(broker, spec, arguments.limit)
    return recorded, offline(spec, arguments.model, dtype=arguments.dtype, deterministic=arguments.deterministic)


async def _recorded(broker: Broker, request_id: str, tenant: str) -> tuple[RequestSpec, list[LogEntry]]:
    from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
    from pagestream_streams import GatewaySession

    from pagestream_cli.replay.regeneration import whole_log

    view = await broker.view(request_id, tenant)
    if view.state != REQUEST_STATE_FINISHED:
        raise ReplayFailedError(f"{request_id} has not ended yet", hint="replay it when it has")
    async with GatewaySession(broker, "replay", serves=False) as session:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                return view.spec, await whole_log(session, request_id, tenant)
        except TimeoutError as error:
            raise ReplayFailedError(f"the log of {request_id} did not come within {READ_LIMIT_S:g} s") from error


def _report(recorded: list[Answer], again: list[Answer]) -> int:
    difference = first_difference(recorded, again)
    if difference is not None:
        print(f"different: {difference}")
        return DIFFERENT
    cut = sum(answer.is_cut_short for answer in recorded)
    tokens = sum(len(answer.token_ids) for answer in recorded)
    print(f"equal: {tokens} tokens in {len(recorded)} {'choice' if len(recorded) == 1 else 'choices'}")
    if cut:
        say(f"{cut} of them had been cut short (cancelled, deadline or error) and were compared as far as they went")
    gap = largest_gap(recorded, again)
    if gap is not None:
        say(f"log probabilities of the chosen tokens differ by at most {gap:.2g}")
    return EQUAL
