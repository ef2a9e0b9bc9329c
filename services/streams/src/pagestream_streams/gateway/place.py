"""Choose partitions for prompts: where an engine has their beginning, unless it is late.

Gateways hear which engines live, which prompts they have claimed, and how long their answers were.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log2
from typing import NamedTuple

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.topologies import Command
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import DIGEST_BYTES, Keyspace, Partition, Prefix, ownership, prefixes_of
from pagestream_streams.protocol.records import LENGTHS_FIELD, POISON_S, equality_digest
from pagestream_streams.scripts import REGISTRY
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import within


class Placed(NamedTuple):
    """Where a request goes."""

    model: str
    engine: str
    partition: int
    new_tokens: int
    """Of its prompt, that the partition's engine has to compute."""
    held_tokens: int
    """Of its prompt, that the partition's engine seems to have computed."""
    reading: int
    """Number of the partition's reading of its queue that this request was added to."""


def left_ms(settings: StreamsSettings, held_tokens: int) -> int:
    """Return how much longer than others a request is left to its partition's engine: stealing moves the coldest."""
    return min(settings.steal_held_most_ms, settings.steal_held_us * held_tokens // 1000)


class Fleet:
    """One model's engines, as a gateway knows them."""

    def __init__(self, most_digests: int, clock: Callable[[], float]) -> None:
        """Create it without engines."""
        self.held = HeldPrefixes(most_digests)
        self.work = RecentWork(clock)
        self.living: frozenset[str] = frozenset()
        self._partitions = 0
        self._owned: Mapping[str, Sequence[int]] = {}
        self._owned_by: frozenset[str] | None = None

    def owned(self, partitions: int) -> Mapping[str, Sequence[int]]:
        """Return the partitions of each engine that owns any; where none lives, each counts as an engine of its own."""
        if partitions != self._partitions or self.living != self._owned_by:
            self._partitions, self._owned_by = partitions, self.living
            found = ownership(partitions, self.living)
            alone = {f"partition {number}": [number] for number in range(partitions)}
            self._owned = {each: numbers for each, numbers in found.items() if numbers} or alone
        return self._owned


class Placer:
    """Chooses the partitions of one gateway's requests."""

    def __init__(
        self, settings: StreamsSettings, keyspace: Keyspace, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it without any knowledge of engines. `keyspace`: that of the partitions; `clock` returns seconds."""
        self._settings = settings
        self._keyspace = keyspace
        self._fleets: defaultdict[str, Fleet] = defaultdict(lambda: Fleet(settings.placement_digests, clock))
        self.queued: Counter[Partition] = Counter()
        """Queued requests of each partition at the last reading, and those placed since."""
        self._readings: Counter[Partition] = Counter()

    def note_living(self, model: str, engines: Collection[str]) -> None:
        """Note which engines of a model live, which decides who owns its partitions."""
        self._fleets[model].living = frozenset(engines)

    def note_queued(self, where: Partition, count: int) -> None:
        """Note how many requests a partition's queue has, as it was read now."""
        self.queued[where] = count
        self._readings[where] += 1

    def note_held(self, model: str, engine: str, digests: Iterable[bytes]) -> None:
        """Note beginnings of prompts that an engine has published as computed."""
        self._fleets[model].held.note(digests, engine)

    def keep_only(self, models: Collection[str]) -> None:
        """Forget models that are not published any more."""
        for model in self._fleets.keys() - models:
            del self._fleets[model]
        for where in [each for each in self.queued if each.model not in models]:
            del self.queued[where]
            del self._readings[where]

    def place(self, model: str, partitions: int, prompt_token_ids: Sequence[int], cache_salt: bytes) -> Placed:
        """Return the partition of a prompt among those of its model.

        Of the engines that this gateway has not given much more than the others lately, it is one of that which begins
        with the answer first: what is queued before it and what is not cached of it are least.
        """
        fleet = self._fleets[model]
        owned = fleet.owned(partitions)
        prefixes = prefixes_of(prompt_token_ids, self._settings.placement_tokens, cache_salt)
        lengths = fleet.held.lengths(prefixes, owned)
        waiting = {each: sum(self._load(model, number) for number in owned[each]) for each in owned}

        mean = fleet.work.mean_tokens(len(prompt_token_ids))

        def cost(engine: str) -> tuple[float, int]:
            need = len(prompt_token_ids) - lengths.get(engine, 0)
            return waiting[engine] * mean + need, fleet.work.tokens[engine]

        engine = min(fleet.work.with_room(owned, self._settings.placement_most_work), key=cost)
        held = lengths.get(engine, 0)
        number = min(owned[engine], key=lambda each: self._load(model, each))
        where = self._keyspace.partition(model, number)
        placed = Placed(model, engine, number, len(prompt_token_ids) - held, held, self._readings[where])
        fleet.work.add(engine, placed.new_tokens)
        fleet.held.expect((digest for _, digest in prefixes), engine)
        self.queued[where] += 1
        return placed

    def note_refused(self, placed: Placed) -> None:
        """Note that a request was not accepted where it was placed: its engine has no work by it."""
        if placed.model not in self._fleets:
            return
        self._fleets[placed.model].work.add(placed.engine, -placed.new_tokens, -1)
        where = self._keyspace.partition(placed.model, placed.partition)
        if placed.reading == self._readings[where]:  # else the count is read anew, without it
            self.queued[where] -= 1

    def _load(self, model: str, number: int) -> int:
        return self.queued[self._keyspace.partition(model, number)]


MOST_HOLDERS = 16
"""Engines that are remembered for each beginning, the last ones: a prompt that is a fifth of all has 13 of 64."""


class HeldPrefixes:
    """The digests of beginnings with the engines that have computed them, least recently used out first.

    An engine may have evicted what stands here, or hold what doesn't: that costs a cached prefix and nothing else.
    """

    def __init__(self, most: int) -> None:
        """`most`: digests that are kept; docs/benchmarks/placement.md says what they take."""
        self._most = most
        self._engines: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._expected: dict[bytes, str] = {}
        """Where the last request with a beginning was placed, until any engine says that it has computed it."""

    def __len__(self) -> int:
        """Return how many digests are known."""
        return len(self._engines)

    def expect(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that a request with these beginnings was placed where an engine is expected to take it."""
        for digest in digests:
            self._touch(digest)
            self._expected[digest] = engine
        self._forget()

    def note(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that an engine has taken a request with these beginnings, whichever was expected to."""
        for digest in digests:
            engines = self._touch(digest)
            if engine not in engines:
                self._engines[digest] = (*engines, engine)[-MOST_HOLDERS:]
            self._expected.pop(digest, None)
        self._forget()

    def _touch(self, digest: bytes) -> tuple[str, ...]:
        engines = self._engines.setdefault(digest, ())
        self._engines.move_to_end(digest)
        return engines

    def _forget(self) -> None:
        while len(self._engines) > self._most:
            digest, _ = self._engines.popitem(last=False)
            self._expected.pop(digest, None)

    def lengths(self, prefixes: Sequence[Prefix], among: Collection[str]) -> dict[str, int]:
        """Return for each of the living engines that holds any of a prompt's beginnings how many tokens it holds."""
        found: dict[str, int] = {}
        for num_tokens, digest in prefixes:
            engines = self._engines.get(digest)
            if engines is None:
                break
            found.update((engine, num_tokens) for engine in engines if engine in among)
            expected = self._expected.get(digest)
            if expected is not None and expected in among:
                found[expected] = num_tokens
        return found


WINDOW_S = 30.0
AHEAD = 16
"""Requests by which an engine may be ahead of the others in any case: few requests are no load."""


class RecentWork:
    """Requests placed in the last WINDOW_S seconds, and the tokens that their engines had to compute for them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._clock = clock
        self._last: deque[tuple[float, str, int, int]] = deque()

    def add(self, engine: str, num_tokens: int, requests: int = 1) -> None:
        """Note a request of which an engine has to compute `num_tokens`; both negative: one that was refused."""
        self._last.append((self._clock(), engine, num_tokens, requests))
        self.tokens[engine] += num_tokens
        self.requests[engine] += requests

    def mean_tokens(self, num_tokens: int) -> float:
        """Return what a request's engine has to compute on average, one of `num_tokens` among them."""
        return (self.tokens.total() + num_tokens) / (self.requests.total() + 1)

    def with_room(self, engines: Collection[str], most: float) -> list[str]:
        """Return the engines with at most `most` times what the others have on average, and some more; never none."""
        since = self._clock() - WINDOW_S
        while self._last and self._last[0][0] < since:
            _, oldest, num_tokens, requests_of = self._last.popleft()
            self.tokens[oldest] -= num_tokens
            self.requests[oldest] -= requests_of
        tokens, requests = (sum(each[engine] for engine in engines) for each in (self.tokens, self.requests))
        part = most / (len(engines) - 1 + most)  # of the sum: with two engines most : 1
        more = AHEAD * tokens / max(1, requests)
        found = [
            each
            for each in engines
            if self.tokens[each] <= part * tokens + more and self.requests[each] <= part * requests + AHEAD
        ]
        return found or list(engines)


_log = logging.getLogger(__name__)

_READ_AT_ONCE = 64  # entries of a model
OLD_S = 1.0
"""A model that no heartbeat has read for so long is read before a request of it is placed."""
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
        self.read_at: dict[str, float] = {}
        """By model, on time.monotonic()."""
        self.poison: dict[str, dict[bytes, tuple[str, float]]] = {}
        """By model and digest: the id of a request whose equals are refused, and until when, on time.monotonic()."""
        self._next_poison: dict[str, bytes] = {}

    def poison_like(self, spec: RequestSpec) -> str | None:
        """Return the id of a request that equals a new one and that engines died of lately; None where none is known.

        Nothing is reckoned of a request while its model has none.
        """
        known = self.poison.get(spec.model)
        if not known:
            return None
        request_id, until = known.get(equality_digest(spec), ("", 0.0))
        return request_id if until > time.monotonic() and request_id != spec.request_id else None

    def keep_only(self, models: Collection[str]) -> None:
        """Forget models that are not published any more."""
        self._placer.keep_only(models)
        for known in (self._next, self.read_at, self._lengths_read_at, self._living, self.poison, self._next_poison):
            for model in known.keys() - models:
                del known[model]

    async def read(self, models: Collection[str], limit_s: float) -> None:
        """Read what is new of some models. What can't be read in `limit_s` seconds is read the next time."""
        self.read_at.update(dict.fromkeys(models, time.monotonic()))
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
        known = {digest: each for digest, each in self.poison.get(model, {}).items() if each[1] > now}
        for entry, fields in entries:
            self._next_poison[model] = b"(" + entry
            known[fields[b"digest"]] = (fields[b"id"].decode(), now + POISON_S)
        self.poison[model] = known

    def _note_held(self, model: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        for entry, fields in entries:
            self._next[model] = b"(" + entry
            digests = fields[b"digests"]
            found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
            self._placer.note_held(model, fields[b"engine"].decode(), found)


_Key = tuple[int | None, str | None]
"""Part of the octave of the prompt's length, and tenant; None for any."""


_MOST = 2**40
"""Greatest number of a table that is believed; sums of products stay finite."""


@dataclass
class _Medians:
    octave_parts: int = 1
    prior: int = 1
    sums: defaultdict[_Key, float] = field(default_factory=lambda: defaultdict(float))
    """Of the engines' medians, each times its requests."""
    counts: defaultdict[_Key, int] = field(default_factory=lambda: defaultdict(int))


class _Table(NamedTuple):
    octave_parts: int
    prior: int
    rows: list[tuple[_Key, float, int]]
    """Median in tokens, and the number of requests that it is of."""

    @classmethod
    def parse(cls, text: bytes) -> _Table:
        """Read what `LengthPredictor.table` wrote. ValueError, TypeError, KeyError, OverflowError or RecursionError."""
        document = json.loads(text)
        rows: list[tuple[_Key, float, int]] = []
        for length, tenant, median, count in document["rows"]:
            if not (length is None or isinstance(length, int)) or not (tenant is None or isinstance(tenant, str)):
                raise TypeError(f"expected a length and a tenant, got {length!r} and {tenant!r}")
            rows.append(((length, tenant), _within(float(median), 0, _MOST), int(_within(count, 1, _MOST))))
        octave_parts, prior = (int(_within(document[name], 1, _MOST)) for name in ("octave_parts", "prior"))
        return cls(octave_parts, prior, rows)


def _within(value: float, least: int, most: int) -> float:
    if not least <= value <= most:  # nor is NaN
        raise ValueError(f"expected a number from {least} to {most}, got {value}")
    return value


class ExpectedLengths:
    """Expectations of one process, of models by name. Where nothing is known of a model they are 0."""

    def __init__(self) -> None:
        """Create it without knowledge."""
        self._models: dict[str, _Medians] = {}

    def note(self, model: str, tables: Collection[bytes]) -> None:
        """Take what a model's living engines have published (`LengthPredictor.table`) in place of what was known.

        Without any table what is known stays: the last engine may have gone.
        """
        medians = _Medians()
        for text in tables:
            try:
                table = _Table.parse(text)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                _log.debug("an engine of %s publishes lengths that can't be read: %s", model, error)
                continue
            medians.octave_parts, medians.prior = table.octave_parts, table.prior
            for key, median, count in table.rows:
                medians.sums[key] += median * count
                medians.counts[key] += count
        if medians.counts:
            self._models[model] = medians

    def expected(self, model: str, num_prompt_tokens: int, tenant: str, most: int) -> int:
        """Return the output tokens to expect of a request, at most `most`.

        Medians of ever more similar requests, each blended with the one before by how many requests it knows, as in
        `LengthPredictor`.
        """
        medians = self._models.get(model)
        if medians is None or num_prompt_tokens < 1:
            return 0
        length = int(medians.octave_parts * log2(num_prompt_tokens))
        found, weight = 0.0, 0
        for key in ((None, None), (length, None), (length, tenant)):
            count = medians.counts.get(key, 0)
            if count:
                found = (found * weight + medians.sums[key]) / (weight + count)
            weight = medians.prior
        return min(round(found), most)
