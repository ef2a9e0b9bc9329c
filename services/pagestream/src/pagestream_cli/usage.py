"""`pagestream usage`: what tenants have used, as the records in Redis have it."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import UsageError

if TYPE_CHECKING:
    from pagestream_streams.limits import Usage

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_COLUMNS = {"tenant": "tenant", "key": "credential", "model": "model", "time": "start_s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of usage."""
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's; default: all tenants'")
    parser.add_argument(
        "--since",
        metavar="SPAN",
        default="24h",
        help="such as 90m, 24h or 7d: the hours, or where these are no longer kept the days, that end within it "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--by",
        metavar="COLUMNS",
        default="tenant,model",
        help="what rows are summed by: some of tenant, key, model and time, separated by commas (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    store.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was used.

    Raises:
        CliError: Redis does not answer.
        UsageError: an option is malformed.
    """
    since_s, by = seconds_of(arguments.since), columns_of(arguments.by)
    rows = asyncio.run(_read(arguments, since_s))
    found = summed(rows, by)
    if arguments.json:
        print(json.dumps(found, indent=2))
    elif not found:
        say("nothing was used that is kept")
    else:
        print(table(found, by))
    return 0


def seconds_of(text: str) -> int:
    """Return a span such as 24h in seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if match is None or not int(match[1]):
        raise UsageError(f"--since: expected a number with m, h or d, such as 24h, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def columns_of(text: str) -> list[str]:
    """Return what rows are summed by. Raises UsageError."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        if name not in _COLUMNS:
            raise UsageError(f"--by: expected some of {', '.join(_COLUMNS)}, got {name!r}")
    return names


def summed(rows: Iterable[Usage], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return the sums of rows that have the same columns, those with the most tokens first; by time, in order."""
    sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(_COUNTS))
    for row in rows:
        key = tuple(_shown(name, getattr(row, _COLUMNS[name])) for name in by)
        for place, name in enumerate(_COUNTS):
            sums[key][place] += getattr(row, name)
    found = [
        {**dict(zip(by, key, strict=True)), **dict(zip(_COUNTS, counts, strict=True))} for key, counts in sums.items()
    ]
    found.sort(key=lambda row: (row.get("time", ""), -row["prompt_tokens"] - row["output_tokens"]))
    return found


def table(rows: Sequence[dict[str, Any]], by: Sequence[str]) -> str:
    """Format rows with aligned columns, and a last one with the sums where there are several."""
    names = [*by, *_COUNTS]
    lines = [[name.replace("_", " ") for name in names]]
    lines += [[_text(row[name]) for name in names] for row in rows]
    if len(rows) > 1:
        head = ["all", *[""] * (len(by) - 1)] if by else []
        lines.append(head + [_text(sum(row[name] for row in rows)) for name in _COUNTS])
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if place < len(by) else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


async def _read(arguments: argparse.Namespace, since_s: int) -> list[Usage]:
    from pagestream_streams.limits import read_usage

    async with store.opened(store.redis_url(arguments)) as broker:
        return await read_usage(broker, since_s=since_s, tenant=arguments.tenant)


def _shown(column: str, value: Any) -> str:
    if column == "time":
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return str(value) or "-"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
