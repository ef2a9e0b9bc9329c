"""The KV blocks of engines as rows of characters, for `pagestream top --blocks`."""

from __future__ import annotations

import asyncio
import string
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagestream.v1.records_pb2 import BlockMap
    from pagestream_streams import Broker
    from pagestream_streams.admin.observation import ModelRow

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
