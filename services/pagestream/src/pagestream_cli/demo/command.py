"""`pagestream demo`: read streams undisturbed, read them again while processes are killed, and compare."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pagestream_cli import store
from pagestream_cli.console import can_redraw, has_colours, say
from pagestream_cli.demo import report
from pagestream_cli.demo.host import DemoHost, new_reporter, running
from pagestream_cli.demo.streams import (
    FINISHED,
    NO_OWNER,
    UNKNOWN,
    DemoStream,
    Kill,
    Timeline,
    character_of,
    fraction_read,
    new_streams,
    read_all,
)

if TYPE_CHECKING:
    from pagestream_streams import Broker

SAMPLE_S = 0.05
READ_LIMIT_S = 0.5
"""For one reading of the owners; Redis may be dead."""
IDENTICAL, DIFFERENT = 0, 1


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration. The exit code is 0 where every stream is identical to the undisturbed one.

    Raises:
        CliError: the deployment can't be started, or a stream failed or was lost.
    """
    with tempfile.TemporaryDirectory(prefix="pagestream-demo-", ignore_cleanup_errors=True) as folder:
        data_dir = Path(arguments.data_dir or folder).absolute()
        return asyncio.run(_demonstrate(arguments, data_dir))


async def _demonstrate(arguments: argparse.Namespace, data_dir: Path) -> int:
    is_live = can_redraw(sys.stdout) and not arguments.json
    say("starting two engines, two gateways and Redis")
    reporter = new_reporter(is_quiet=is_live or arguments.json)
    async with running(data_dir, arguments.model, arguments.dtype, reporter) as host:
        undisturbed = new_streams(arguments.streams, arguments.tokens, arguments.seed)
        say(f"{arguments.streams} streams of {arguments.tokens} tokens, undisturbed")
        await _read(host, undisturbed)
        killed, timeline = new_streams(arguments.streams, arguments.tokens, arguments.seed), Timeline()
        say(f"the same streams; kill -9 of: {', '.join(arguments.kill)}")
        show = _live if is_live else _silent
        async with show(lambda: report.picture(killed, timeline)):
            await _read_with_kills(host, killed, timeline, arguments.kill)
    if arguments.json:
        print(report.as_json(undisturbed, killed, timeline))
    else:
        if not is_live:
            print(report.picture(killed, timeline))
        _print("", report.table(undisturbed, killed), "", report.verdict(undisturbed, killed, timeline))
    same = all(report.is_identical(*pair) for pair in zip(undisturbed, killed, strict=True))
    return IDENTICAL if same else DIFFERENT


async def _read(host: DemoHost, streams: Sequence[DemoStream]) -> None:
    """Read all streams. Raises the first error of one."""
    from pagestream_client import Reconnection

    from pagestream_cli.client.endpoint import Endpoint
    from pagestream_cli.client.gateways import Gateways

    try:
        async with Gateways(Endpoint(tuple(host.urls)), Reconnection()) as gateways:
            await read_all(streams, gateways, host.model)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _read_with_kills(
    host: DemoHost, streams: Sequence[DemoStream], timeline: Timeline, kinds: Sequence[str]
) -> None:
    began_s = time.monotonic()
    async with store.opened(host.redis_url) as broker:
        reading = asyncio.create_task(_read(host, streams))
        try:
            left = list(kinds)
            while not reading.done():
                owners = await _owners(broker, streams)
                timeline.add(
                    time.monotonic() - began_s, [_character(*each) for each in zip(streams, owners, strict=True)]
                )
                if left and fraction_read(streams) >= (len(kinds) - len(left) + 1) / (len(kinds) + 1):
                    part = _victim(host, left[0], owners)
                    if part is not None:
                        pid = host.kill(part)
                        timeline.kills.append(Kill(time.monotonic() - began_s, part, pid))
                        left.pop(0)
                await asyncio.wait([reading], timeout=SAMPLE_S)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _victim(host: DemoHost, kind: str, owners: Sequence[str]) -> str | None:
    """Return the part of a kind to kill: the engine with most streams. None while none of them runs."""
    parts = host.parts(kind)
    by_load = Counter(owner.rpartition("-")[0] for owner in owners if owner and owner != UNKNOWN)
    return max(parts, key=lambda part: by_load[part], default=None)


async def _owners(broker: Broker, streams: Sequence[DemoStream]) -> list[str]:
    """Return the engine that has each stream; "" for none, UNKNOWN while Redis does not answer."""
    from pagestream_streams import StreamsError
    from pagestream_streams.admin.broker import read_owners

    accepted = [each.request_id for each in streams if each.request_id]
    found: dict[str, str] = dict.fromkeys(accepted, UNKNOWN)
    with suppress(StreamsError, TimeoutError):
        async with asyncio.timeout(READ_LIMIT_S):
            found = dict(zip(accepted, await read_owners(broker, accepted), strict=True))
    return [found.get(each.request_id, "") for each in streams]


def _character(stream: DemoStream, owner: str) -> str:
    if stream.is_finished:
        return FINISHED
    return {"": NO_OWNER, UNKNOWN: UNKNOWN}.get(owner) or character_of(owner)


@asynccontextmanager
async def _silent(_: Callable[[], str]) -> AsyncIterator[None]:
    """Show nothing while the block lasts."""
    yield


@asynccontextmanager
async def _live(text: Callable[[], str]) -> AsyncIterator[None]:
    """Show a text that changes while the block lasts; its last state stays."""
    from rich.live import Live

    with Live(get_renderable=lambda: report.styled(text()), refresh_per_second=8):
        yield


def _print(*parts: str) -> None:
    """Print parts of the report; in colours on a terminal."""
    if not has_colours(sys.stdout):
        print(*parts, sep="\n")
        return
    from rich.console import Console

    for part in parts:
        Console().print(report.styled(part), soft_wrap=True)
