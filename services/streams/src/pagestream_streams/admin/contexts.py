"""The contexts that a model's living engines hold, and what a model's card says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagestream.v1.records_pb2 import ModelCard

from pagestream_streams.connection.connection import Connection
from pagestream_streams.protocol.records import CONTEXT_FIELD
from pagestream_streams.scripts import REGISTRY

_LEAST_SHARE = 2
"""An engine that holds less than the longest context divided by this does not shorten what all are asked for."""


def bounds(contexts: Collection[int]) -> tuple[int, int]:
    """Return the longest of some contexts, and the context of requests that leave their length open: the least one that
    is at least half as long, 0 where that is the longest. All engines but much smaller ones can run them then.
    """
    longest = max(contexts)
    default = min(each for each in contexts if each * _LEAST_SHARE >= longest)
    return longest, default if default < longest else 0


async def read_contexts(connection: Connection, engine_ids: Sequence[str]) -> dict[str, int]:
    """Return the context of each engine that has published it: tokens, 0 for no limit. Unavailable."""
    keyspace = connection.keyspace
    found = await connection.pipeline([("HGET", keyspace.engine(each), CONTEXT_FIELD) for each in engine_ids])
    return {each: int(text) for each, text in zip(engine_ids, found, strict=True) if text}


async def with_living(connection: Connection, card: ModelCard) -> ModelCard:
    """Return the card of an engine that starts, with the contexts of the engines that live beside it. Unavailable."""
    living = await connection.run(REGISTRY, connection.keyspace.engines(card.name), "", 0)
    contexts = await read_contexts(connection, [each.decode() for each in living])
    known: Iterable[int] = (each for each in contexts.values() if each)
    return with_bounds(card, *bounds([card.max_model_len, *known]))


def with_bounds(card: ModelCard, longest: int, default: int) -> ModelCard:
    """Return a copy of a card with these contexts."""
    changed = ModelCard()
    changed.CopyFrom(card)
    changed.max_model_len, changed.default_model_len = longest, default
    return changed
