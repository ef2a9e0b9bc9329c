"""Choose partitions for prompts: where an engine has their beginning, unless it is late (docs/decisions/0217)."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pagestream_streams.gateway.held_prefixes import HeldPrefixes
from pagestream_streams.gateway.recent_work import RecentWork
from pagestream_streams.protocol.keys import Keyspace, Partition, ownership, prefixes_of
from pagestream_streams.settings import StreamsSettings


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
