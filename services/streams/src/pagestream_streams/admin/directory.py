"""The models that a deployment knows: their cards, partitions and living engines, cached for a second.

A model's card says which contexts its living engines hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagestream.v1.records_pb2 import ModelCard

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import ModelNameRefused, ModelNotFound, PartitionGone, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import MAX_PARTITIONS, Partition, model_tag, parse_request_id
from pagestream_streams.protocol.records import CONTEXT_FIELD, ModelInfo
from pagestream_streams.scripts import AMEND_MODEL, FORGET_MODEL, REGISTRY
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import within

_NAME = re.compile(r"[^\s{}\x00-\x1f\x7f]{1,256}")
_FIELDS = ("created", "digest", "partitions")
_MISSED_S = 0.1
"""Age of a view that is read anew for a model that it lacks: it may have been published since, and engines be ready."""

_MISSED_LIMIT_S = 2.0
"""Of that read: others wait for it, and a connection may be dead."""
_READ = "a read of the models"


@dataclass(frozen=True)
class _Entry:
    created: int
    digest: str
    partitions: int


class ModelDirectory:
    """A process' view of the models, read at most every settings.directory_ttl_s. It stays valid while Redis is away.

    Every method raises Unavailable where Redis is needed and can't serve.
    """

    def __init__(self, connection: Connection, settings: StreamsSettings) -> None:
        """Create it empty; the first use reads the models."""
        self._connection = connection
        self._keyspace = connection.keyspace
        self._ttl = settings.directory_ttl_s
        self._limit_s = settings.beat_limit_s / 2  # heartbeats and sweeps wait for it
        self._entries: dict[str, _Entry] = {}
        self._tags: dict[str, str] = {}
        self._cards: dict[str, ModelCard] = {}
        self._age = ViewAge()
        self._reading = asyncio.Lock()  # held while the models are read anew: others wait for what comes of it
        self._failed_at = float("-inf")  # as time.monotonic()
        self._is_stale = False  # whether the last read failed: models that are missing here may exist

    async def publish(self, card: ModelCard, partitions: int) -> None:
        """Store a model's card with the contexts of the engines that live; see Broker.publish_model."""
        _check(card.name, partitions)
        tag = model_tag(card.name)
        await self._connection.execute("HSETNX", self._keyspace.models, tag, card.name)
        holder = (await self._connection.execute("HGET", self._keyspace.models, tag)).decode()
        if holder != card.name:
            raise ModelNameRefused(
                f"the name {card.name!r} has the same tag {tag} as {holder!r}; serve the model under another name"
            )
        stored, digest = _stored(await with_living(self._connection, card))
        key, (seconds, _) = self._keyspace.model(card.name), await self._connection.execute("TIME")
        await self._connection.pipeline(
            [
                ("HSET", key, "card", stored, "digest", digest),  # first: with it, an unpublishing leaves the row
                ("HSETNX", key, "created", seconds),
                ("HSETNX", key, "partitions", partitions),
            ]
        )
        self._age.note_change()

    async def set_contexts(self, name: str, max_model_len: int, default_model_len: int) -> None:
        """Change a card's contexts, unless another card is published meanwhile. ModelNotFound."""
        key = self._keyspace.model(name)
        found, digest = await self._connection.execute("HMGET", key, "card", "digest")
        if found is None or digest is None:
            raise ModelNotFound(name)
        changed = with_bounds(ModelCard.FromString(found), max_model_len, default_model_len)
        await self._connection.run(AMEND_MODEL, key, digest, *_stored(changed))
        self._age.note_change()

    async def stored_partitions(self, name: str) -> int | None:
        """Return the number of partitions that is stored for a model, also for one that is withdrawn; None for none."""
        stored = await self._connection.execute("HGET", self._keyspace.model(name), "partitions")
        return None if stored is None else int(stored)

    async def withdraw(self, name: str) -> None:
        """Unpublish a model. Its number of partitions stays until `forget`, so that a removal can go on."""
        await self._connection.execute("HDEL", self._keyspace.model(name), "card", "digest", "created")
        self._age.note_change()

    async def is_published(self, name: str) -> bool:
        """Return whether a model's card is stored now."""
        return bool(await self._connection.execute("HEXISTS", self._keyspace.model(name), "card"))

    async def forget(self, name: str) -> bool:
        """Delete what is stored for a withdrawn model. Its tag stays: ids of its logs name it.

        Returns:
            False where the model was published again, and stays.
        """
        if not await self._connection.run(FORGET_MODEL, self._keyspace.model(name)):
            return False
        await self._connection.execute("DEL", self._keyspace.engines(name))
        return True

    async def check_published(self, request_id: str) -> None:
        """Read the models anew. ModelNotFound where that of a request isn't published, PartitionGone."""
        self._age.note_change()
        where = await self.locate(request_id)
        entry = await self._entry(where.model)
        if where.number >= entry.partitions:
            raise PartitionGone(request_id, where.number, entry.partitions)

    async def names(self) -> list[str]:
        """Return the names of all models, sorted."""
        await self._refresh()
        return sorted(self._entries)

    async def partitions(self, name: str) -> int:
        """Return a model's number of partitions. ModelNotFound."""
        return (await self._entry(name)).partitions

    async def all_partitions(self, name: str) -> list[Partition]:
        """Return a model's partitions. ModelNotFound."""
        return [self._keyspace.partition(name, number) for number in range(await self.partitions(name))]

    async def card(self, name: str) -> ModelCard:
        """Return a model's card, fetched once for each digest; don't change it. ModelNotFound."""
        entry = await self._entry(name)
        card = self._cards.get(entry.digest)
        if card is None:
            stored, digest = await self._connection.execute("HMGET", self._keyspace.model(name), "card", "digest")
            if stored is None or digest is None:  # Redis has lost it since the entry was read
                raise ModelNotFound(name)
            card = ModelCard.FromString(stored)
            self._cards[digest.decode()] = card
        return card

    async def infos(self) -> list[ModelInfo]:
        """Return all models, sorted by name, with the number of engines that live now."""
        await self._refresh()
        models = sorted(self._entries.items())  # a copy: the entries may change while the engines are counted
        living = await self._connection.run_many(
            [Call(REGISTRY, self._keyspace.engines(name), ("", 0)) for name, _ in models]
        )
        return [
            ModelInfo(name, entry.created, entry.digest, len(engines), entry.partitions)
            for (name, entry), engines in zip(models, living, strict=True)
        ]

    def knows(self, name: str) -> bool:
        """Return whether a model is in the view, without reading anything."""
        return name in self._entries

    async def locate_published(self, request_id: str) -> Partition:
        """Return the partition of a request id as `locate`, where requests are served.

        RequestNotFound also for a model that was unpublished; PartitionGone where it was published anew with fewer
        partitions.
        """
        where = await self.locate(request_id)
        try:
            entry = await self._entry(where.model)
        except ModelNotFound as error:
            raise RequestNotFound(request_id) from error
        if where.number >= entry.partitions:
            raise PartitionGone(request_id, where.number, entry.partitions)
        return where

    async def locate(self, request_id: str) -> Partition:
        """Return the partition of a request id. RequestNotFound for a malformed id or an unknown model.

        A number above the model's present count of partitions is valid: it is from a time with more partitions.
        """
        parts = parse_request_id(request_id)
        if parts is None:
            raise RequestNotFound(request_id)
        if parts.model_tag not in self._tags:
            await self._refresh()
        if parts.model_tag not in self._tags:
            await self._read_missed()
        name = self._tags.get(parts.model_tag)
        if name is None:
            raise RequestNotFound(request_id)
        return self._keyspace.partition(name, parts.partition)

    async def _entry(self, name: str) -> _Entry:
        await self._refresh()
        if name not in self._entries:
            await self._read_missed()
        if name not in self._entries:
            raise ModelNotFound(name)
        return self._entries[name]

    async def _refresh(self) -> None:
        if self._age.seconds < self._ttl:
            return
        if not self._entries or self._age.seconds == float("inf"):
            await self._read()
            return
        async with self._reading:
            if self._age.seconds < self._ttl:
                return
            try:
                async with within(self._limit_s, _READ):
                    await self._read()
            except Unavailable:
                # Known models are good enough for heartbeats and sweeps; the next read tries again.
                self._age.end_reading(self._age.begin_reading())
                self._is_stale = True

    async def _read_missed(self) -> None:
        """Read anew for a model that is missing, unless the view is of just now. Whoever misses one meanwhile waits."""
        asked_at = time.monotonic()
        async with self._reading:
            age_s = self._age.seconds
            is_read_since = age_s < time.monotonic() - asked_at
            if not self._is_stale and (age_s <= _MISSED_S or is_read_since):
                return
            if self._failed_at > asked_at:
                raise Unavailable(f"{_READ} has just failed")
            try:
                async with within(_MISSED_LIMIT_S, _READ):
                    await self._read()
            except Unavailable:
                self._failed_at = time.monotonic()
                raise

    async def _read(self) -> None:
        reading = self._age.begin_reading()
        found = await self._connection.execute("HGETALL", self._keyspace.models)
        tags = {tag.decode(): name.decode() for tag, name in found.items()}
        rows = await self._connection.pipeline(
            [("HMGET", self._keyspace.model(name), *_FIELDS) for name in tags.values()]
        )
        # A first publication writes the name before the row.
        self._entries = {
            name: _Entry(int(row[0]), row[1].decode(), int(row[2]))
            for name, row in zip(tags.values(), rows, strict=True)
            if None not in row
        }
        self._tags = tags
        self._age.end_reading(reading)
        self._is_stale = False


def _stored(card: ModelCard) -> tuple[bytes, str]:
    """Return a card's bytes and their digest."""
    stored = card.SerializeToString(deterministic=True)
    return stored, hashlib.sha256(stored).hexdigest()


def _check(name: str, partitions: int) -> None:
    if not _NAME.fullmatch(name):
        raise ModelNameRefused(
            f"expected a model name of 1 to 256 characters without spaces, control characters and braces, got {name!r}"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"partitions: expected 1 to {MAX_PARTITIONS}, got {partitions}")


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


class Reading(NamedTuple):
    """A view that is being read."""

    began_at: float
    num_changes: int


class ViewAge:
    """Of a view that tasks read and change.

    What a task reads while another one changes it may be as it was before: such a view counts as never read.
    """

    def __init__(self) -> None:
        """Create it for a view that was never read."""
        self._read_at = float("-inf")
        self._num_changes = 0

    @property
    def seconds(self) -> float:
        """Since its reading began; infinite where that has to be done before the view is used."""
        return time.monotonic() - self._read_at

    def begin_reading(self) -> Reading:
        """Note that the view is being read."""
        return Reading(time.monotonic(), self._num_changes)

    def end_reading(self, reading: Reading) -> None:
        """Note that it has been read."""
        is_whole = reading.num_changes == self._num_changes
        self._read_at = reading.began_at if is_whole else float("-inf")

    def note_change(self) -> None:
        """Note that this process has changed what Redis holds."""
        self._num_changes += 1
        self._read_at = float("-inf")
