"""What gateways hear of engines: who lives, which prompts they have claimed, and how long their answers were."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.topologies import Command
from pagestream_streams.errors import Unavailable
from pagestream_streams.gateway.placing import Placer
from pagestream_streams.protocol.expected_lengths import ExpectedLengths
from pagestream_streams.protocol.keys import DIGEST_BYTES
from pagestream_streams.protocol.records import LENGTHS_FIELD, POISON_S, equality_digest
from pagestream_streams.scripts import REGISTRY
from pagestream_streams.tasks import within

_log = logging.getLogger(__name__)

_READ_AT_ONCE = 64  # entries of a model
_OLD_S = 1.0
_LENGTHS_S = 2.0  # between reads of the lengths of a model's answers


class EngineWatch:
    """Reads the registries of engines and what they publish, for a placer and for what answers are expected to have."""

    def __init__(self, connection: Connection, placer: Placer, lengths: ExpectedLengths) -> None:
        """Create it without having read anything."""
        self._connection = connection
        self._placer = placer
        self._lengths = lengths
        self._lengths_read_at: dict[str, float] = {}
        self._living: dict[str, Sequence[str]] = {}
        """Ids of the engines that lived at the last read, by model."""
        self._next: dict[str, bytes] = {}
        """From where to read on, by model."""
        self._read_at: dict[str, float] = {}
        self._poison: dict[str, dict[bytes, tuple[str, float]]] = {}
        """By model and digest: the id of a request whose equals are refused, and until when, on time.monotonic()."""
        self._next_poison: dict[str, bytes] = {}

    def poison_like(self, spec: RequestSpec) -> str | None:
        """Return the id of a request that equals a new one and that engines died of lately; None where none is known.

        Nothing is reckoned of a request while its model has none.
        """
        known = self._poison.get(spec.model)
        if not known:
            return None
        request_id, until = known.get(equality_digest(spec), ("", 0.0))
        return request_id if until > time.monotonic() and request_id != spec.request_id else None

    async def read_once_old(self, model: str, limit_s: float) -> None:
        """Read what is new of a model that no heartbeat has read lately, as it was at rest."""
        if time.monotonic() - self._read_at.get(model, -math.inf) > _OLD_S:
            await self.read({model}, limit_s)

    def keep_only(self, models: Collection[str]) -> None:
        """Forget models that are not published any more."""
        self._placer.keep_only(models)
        for known in (self._next, self._read_at, self._lengths_read_at, self._living, self._poison, self._next_poison):
            for model in known.keys() - models:
                del known[model]

    async def read(self, models: Collection[str], limit_s: float) -> None:
        """Read what is new of some models. What can't be read in `limit_s` seconds is read the next time."""
        self._read_at.update(dict.fromkeys(models, time.monotonic()))
        try:
            async with within(limit_s, "a read of the engines"):
                await self._read(sorted(models), limit_s / 2)  # a cluster's silent node does not hide what others said
        except Unavailable as error:
            _log.debug("places by what is known of the engines: %s", error)

    async def _read(self, models: list[str], limit_s: float) -> None:
        """Read in one round trip; the lengths are those of the engines that lived at the last one."""
        now, keyspace = time.monotonic(), self._connection.keyspace
        lengths = [(model, each) for model in models for each in self._with_lengths(model, now)]
        calls: list[Call | Command] = [Call(REGISTRY, keyspace.engines(model), ("", 0)) for model in models]
        calls += [
            ("XRANGE", keyspace.engine_prefixes(model), self._next.get(model, b"-"), "+", "COUNT", _READ_AT_ONCE)
            for model in models
        ]
        calls += [
            ("XRANGE", keyspace.poison(model), self._next_poison.get(model, b"-"), "+", "COUNT", _READ_AT_ONCE)
            for model in models
        ]
        calls += [("HGET", keyspace.engine(each), LENGTHS_FIELD) for _, each in lengths]
        replies = iter(await self._connection.run_each(calls, limit_s))
        for model, living in zip(models, islice(replies, len(models)), strict=True):
            if not isinstance(living, Unavailable):
                self._living[model] = [each.decode() for each in living]
                self._placer.note_living(model, set(self._living[model]))
        for model, entries in zip(models, islice(replies, len(models)), strict=True):
            if not isinstance(entries, Unavailable):
                self._note_held(model, entries)
        for model, entries in zip(models, islice(replies, len(models)), strict=True):
            if entries and not isinstance(entries, Unavailable):
                self._note_poison(model, entries, now)
        tables: dict[str, list[bytes]] = {}
        for (model, _), table in zip(lengths, replies, strict=True):
            self._lengths_read_at[model] = now
            if table and not isinstance(table, Unavailable):
                tables.setdefault(model, []).append(table)
        for model, found in tables.items():
            self._lengths.note(model, found)

    def _with_lengths(self, model: str, now: float) -> Sequence[str]:
        is_old = now - self._lengths_read_at.get(model, -math.inf) >= _LENGTHS_S
        return self._living.get(model, ()) if is_old else ()

    def _note_poison(self, model: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], now: float) -> None:
        known = {digest: each for digest, each in self._poison.get(model, {}).items() if each[1] > now}
        for entry, fields in entries:
            self._next_poison[model] = b"(" + entry
            known[fields[b"digest"]] = (fields[b"id"].decode(), now + POISON_S)
        self._poison[model] = known

    def _note_held(self, model: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        for entry, fields in entries:
            self._next[model] = b"(" + entry
            digests = fields[b"digests"]
            found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
            self._placer.note_held(model, fields[b"engine"].decode(), found)
