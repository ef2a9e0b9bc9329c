"""`pagestream top`: the models of a deployment with their engines and queues, as they change."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.block_rows import FIRST_MAP_S, LEGEND, block_rows, read_maps
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
