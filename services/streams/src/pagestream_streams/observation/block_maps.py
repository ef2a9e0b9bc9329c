"""Maps of engines' KV blocks: whoever wants to see them says so, and engines publish them while he does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import BlockMap

from pagestream_streams.connection.connection import Connection

_log = logging.getLogger(__name__)

WATCHED_MS = 5_000
"""For which a model counts as watched after the last look."""
KEPT_MS = 3_000
"""For which a map is kept: a dead engine's is gone soon."""
MOST_BYTES = 64 << 10
"""Of a map; a larger one is not published."""


class BlockMaps:
    """The maps of one deployment, in Redis. Every method raises Unavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keyspace = connection.keyspace

    # -- for who looks --

    async def watch(self, models: Sequence[str], engine_ids: Sequence[str]) -> list[BlockMap | None]:
        """Ask the engines of models for maps, for the next WATCHED_MS; return those that there are now.

        Returns:
            The map of each engine; None where it has published none yet, or one that this version can't read.
        """
        asks = [("SET", self._keyspace.watched(model), 1, "PX", WATCHED_MS) for model in models]
        reads = [("GET", self._keyspace.block_map(each)) for each in engine_ids]
        replies = await self._connection.pipeline([*asks, *reads])
        return [_parsed(each) for each in replies[len(asks) :]]

    # -- for engines --

    async def is_watched(self, model: str) -> bool:
        """Return whether somebody looks at a model's engines."""
        return await self._connection.execute("GET", self._keyspace.watched(model)) is not None

    async def publish(self, engine_id: str, block_map: BlockMap) -> None:
        """Publish an engine's map."""
        data = block_map.SerializeToString()
        if len(data) > MOST_BYTES:
            _log.warning("a map of %d bytes is not published: at most %d are", len(data), MOST_BYTES)
            return
        await self._connection.execute("SET", self._keyspace.block_map(engine_id), data, "PX", KEPT_MS)


def _parsed(data: bytes | None) -> BlockMap | None:
    if data is None:
        return None
    try:
        return BlockMap.FromString(data)
    except DecodeError:
        _log.warning("a map of %d bytes can't be read", len(data))
        return None
