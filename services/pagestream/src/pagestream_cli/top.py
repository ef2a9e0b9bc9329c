"""`pagestream top`: the models of a deployment with their engines and queues, as they change.

With `--blocks` the KV blocks of engines are shown as rows of characters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import string
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import can_redraw
from pagestream_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagestream.v1.records_pb2 import BlockMap
    from pagestream_streams import Broker
    from pagestream_streams.admin.observation import EngineLoad, ModelRow

MOST_ENGINES_SHOWN = 40
_BAR = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of top."""
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two readings (default: %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print one reading, as in a pipe")
    parser.add_argument("--json", action="store_true", help="print one reading as JSON")
    parser.add_argument("--blocks", action="store_true", help="show which requests hold each engine's KV blocks")
    store.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the readings until Ctrl-C; one where stdout is no terminal.

    Raises:
        CliError: Redis does not answer.
        UsageError: the interval is no positive number.
    """
    if not 0.1 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval:g} was given, expected are 0.1 to 3600 seconds")
    asyncio.run(_show(arguments))
    return 0


def picture(models: Sequence[ModelRow], maps: Mapping[str, BlockMap | None] | None = None) -> str:
    """Return a reading as text.

    `maps`: of the engines' blocks, by the engines' ids; None: they are not shown.
    """
    if not models:
        return "no model is published"
    shown = "\n\n".join(_model(model, maps) for model in models)
    return shown if maps is None else f"{shown}\n\n{LEGEND}"


def _model(model: ModelRow, maps: Mapping[str, BlockMap | None] | None) -> str:
    waiting = sum(queue.requests for queue in model.queues)
    lines = [f"{model.name}: {len(model.engines)} engines, {model.running} requests running, {waiting} queued"]
    if model.engines:
        lines.append(f"  {'engine':<24}{'KV cache in use':<{_BAR + 8}}{'running':>8}{'waiting':>8}{'context':>9}")
    for each in model.engines[:MOST_ENGINES_SHOWN]:
        lines.append(_engine(each))
        lines += [] if maps is None else block_rows(maps.get(each.engine_id))
    if (more := len(model.engines) - MOST_ENGINES_SHOWN) > 0:
        lines.append(f"  and {more} more engines")
    if waiting:
        lines.append(f"  {'queue':<24}{'requests':>9}{'tokens':>10}{'oldest':>10}{'tokens/s taken':>16}")
    for queue in model.queues:
        if queue.requests:
            name = f"class {queue.name}" if queue.name.isdigit() else queue.name
            lines.append(
                f"  {name:<24}{queue.requests:>9}{queue.tokens:>10}{queue.oldest_s:>8.1f} s{queue.drain_rate:>16.0f}"
            )
    return "\n".join(lines)


def _engine(load: EngineLoad) -> str:
    name = load.engine_id.partition(":")[0]
    if load.kv_utilization is None:
        bar = "not known yet".ljust(_BAR + 8)
    else:
        full = round(min(max(load.kv_utilization, 0.0), 1.0) * _BAR)
        bar = f"{'█' * full}{'░' * (_BAR - full)} {load.kv_utilization:>5.0%}  "
    figures = [load.running, load.waiting, load.max_model_len]
    running, waiting, context = ("-" if each is None else str(each) for each in figures)
    return f"  {name:<24}{bar}{running:>8}{waiting:>8}{context:>9}"


def as_json(models: Sequence[ModelRow]) -> str:
    """Return a reading as JSON."""
    found: list[dict[str, Any]] = [asdict(model) for model in models]
    return json.dumps(found, indent=2)


async def _show(arguments: argparse.Namespace) -> None:
    from pagestream_streams.admin.observation import read_models

    async with store.opened(store.redis_url(arguments)) as broker:
        models = await read_models(broker)
        if arguments.json:
            print(as_json(models))
        elif arguments.once or not can_redraw(sys.stdout):
            maps = await read_maps(broker, models, wait_s=FIRST_MAP_S) if arguments.blocks else None
            print(picture(models, maps))
        else:
            await _follow(broker, models, arguments.interval, with_blocks=arguments.blocks)


async def _follow(broker: Broker, models: Sequence[ModelRow], interval_s: float, *, with_blocks: bool) -> None:
    """Show readings until the task is cancelled; while Redis is away, the last one with a line that says so."""
    from pagestream_streams import Unavailable
    from pagestream_streams.admin.observation import WATCHED_MS, read_models
    from rich.live import Live
    from rich.text import Text

    wait_s = FIRST_MAP_S if interval_s > WATCHED_MS / 2000 else 0.0  # else the last look has kept the maps coming
    maps = await read_maps(broker, models) if with_blocks else None
    with Live(Text(picture(models, maps)), auto_refresh=False, screen=True) as live:
        while True:
            await asyncio.sleep(interval_s)
            trouble = ""
            try:
                models = await read_models(broker)
                maps = await read_maps(broker, models, wait_s=wait_s) if with_blocks else None
            except Unavailable as error:
                trouble = f"\n\nRedis does not answer: {error}"
            live.update(Text(f"{picture(models, maps)}{trouble}\n\nCtrl-C ends it"), refresh=True)


WIDTH = 80
MOST_ROWS = 6
"""Of an engine; a larger pool is sampled."""
MOST_MAPS = 40
"""Read at once."""
MOST_REQUESTS = 16
"""Listed below the rows."""
FREE, CACHED, SHARED, UNLISTED = "·", "░", "#", "?"
LEGEND = f"a, b, ...: a request   {SHARED} shared   {CACHED} cached   {FREE} free   {UNLISTED} another request"
FIRST_MAP_S = 4.0
"""For which a single reading waits: an engine looks once a second whether somebody looks."""
_AGAIN_S = 0.2


async def read_maps(broker: Broker, models: Sequence[ModelRow], *, wait_s: float = 0.0) -> dict[str, BlockMap | None]:
    """Return the maps of the first MOST_MAPS engines by their ids; None where one has published none. Unavailable.

    `wait_s`: seconds for which engines without a map are waited for.
    """
    from pagestream_streams.admin.observation import BlockMaps

    maps, until = BlockMaps(broker.connection), time.monotonic() + wait_s
    ids = [load.engine_id for model in models for load in model.engines][:MOST_MAPS]
    while True:
        found = await maps.watch([model.name for model in models], ids)
        if None not in found or time.monotonic() >= until:
            return dict(zip(ids, found, strict=True))
        await asyncio.sleep(_AGAIN_S)


def block_rows(found: BlockMap | None) -> list[str]:
    """Return the rows of one engine, with its requests below them."""
    if found is None:
        return ["    no map of its blocks"]
    ids = list(dict.fromkeys(seq.request_id for seq in found.sequences))
    names = dict(zip(ids, string.ascii_letters, strict=False))
    of_place = [names.get(seq.request_id, UNLISTED) for seq in found.sequences]
    values = [FREE, CACHED]
    for holders in found.holders:
        alone = of_place[holders.sequences[0]] if holders.sequences else UNLISTED
        values.append(SHARED if holders.num_references > 1 else alone)
    num_shown = min(len(found.cells), WIDTH * MOST_ROWS)
    shown = "".join(values[found.cells[place * len(found.cells) // num_shown]] for place in range(num_shown))
    rows = [f"    {shown[start : start + WIDTH]}" for start in range(0, num_shown, WIDTH)]
    return rows + [_request(found, request_id, names) for request_id in ids[:MOST_REQUESTS]] + _more(ids)


def _request(found: BlockMap, request_id: str, names: Mapping[str, str]) -> str:
    own = [seq for seq in found.sequences if seq.request_id == request_id]
    phase = "prefill" if any(seq.is_prefill for seq in own) else "decode"
    tokens, blocks = sum(seq.num_tokens for seq in own), sum(seq.num_blocks for seq in own)
    return f"    {names.get(request_id, UNLISTED)} {request_id}  {phase:<8}{tokens:>7} tokens{blocks:>6} blocks"


def _more(ids: Sequence[str]) -> list[str]:
    more = len(ids) - MOST_REQUESTS
    return [f"    and {more} more requests"] if more > 0 else []
