"""Choose partitions for prompts: by prefixes, for the engines' prefix caches, and by load (docs/decisions/0122)."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial

from pagestream_streams.protocol import placement
from pagestream_streams.protocol.keys import Keyspace, Partition
from pagestream_streams.settings import StreamsSettings

_REMEMBERED = 1024  # requests
_FEWEST = 16  # of the remembered ones that a prefix must have to count as common
_LENGTHS = 9  # 64, 128, ... 16,384 tokens


class PrefixLengths:
    """Counts the prefixes of the last requests, at doubling lengths.

    A prefix that more than a partition's part of them share is a system prompt, not a conversation: it would put them
    all on one partition. The next length is tried.
    """

    def __init__(self, first_tokens: int) -> None:
        """`first_tokens`: the shortest length."""
        self._first_tokens = first_tokens
        self._counts: Counter[bytes] = Counter()
        self._remembered: deque[list[bytes]] = deque()

    def of(self, prompt: Sequence[int], partitions: int, cache_salt: bytes = b"") -> int:
        """Return how many first tokens of a prompt decide its partition, and remember the prompt.

        `cache_salt`: as for `placement.choices`; only prompts with the same one are alike.
        """
        limit = max(_FEWEST, len(self._remembered) // partitions)
        prefixes, chosen, end = [], 0, 0
        hashed = hashlib.blake2b(len(cache_salt).to_bytes(8) + cache_salt, digest_size=8)
        for power in range(_LENGTHS):
            start, end = end, self._first_tokens << power
            hashed.update(array("Q", prompt[start:end]).tobytes())
            prefix = hashed.digest()
            prefixes.append(prefix)
            chosen = end
            if self._counts[prefix] < limit or end >= len(prompt):
                break
        self._remember(prefixes)
        return chosen

    def _remember(self, prefixes: list[bytes]) -> None:
        self._remembered.append(prefixes)
        self._counts.update(prefixes)
        if len(self._remembered) > _REMEMBERED:
            for prefix in self._remembered.popleft():
                self._counts[prefix] -= 1
                if not self._counts[prefix]:
                    del self._counts[prefix]


class Placer:
    """Chooses the partitions of one gateway's requests."""

    def __init__(self, settings: StreamsSettings, keyspace: Keyspace) -> None:
        """Create it without any knowledge of load. `keyspace`: that of the partitions."""
        self._settings = settings
        self._keyspace = keyspace
        self._lengths: defaultdict[str, PrefixLengths] = defaultdict(lambda: PrefixLengths(settings.placement_tokens))
        self.queued: Counter[Partition] = Counter()
        """Queued requests of each partition at the last heartbeat, and those placed since."""

    def place(self, model: str, partitions: int, prompt_token_ids: Sequence[int], cache_salt: bytes) -> int:
        """Return the partition of a prompt among those of its model.

        The prompt's prefix names two. Where the first one is overloaded the second is taken, and where both are, the
        one with the fewest requests: the queue's bounds are each partition's.
        """
        first_tokens = self._lengths[model].of(prompt_token_ids, partitions, cache_salt)
        first, second = placement.choices(prompt_token_ids, partitions, first_tokens, cache_salt)
        load = partial(self._load, model)
        number = second if self._is_overloaded(load(first), load(second)) else first
        if load(number) > self._settings.overload_requests:
            least = min(range(partitions), key=load)
            number = least if self._is_overloaded(load(number), load(least)) else number
        self.queued[self._keyspace.partition(model, number)] += 1
        return number

    def _load(self, model: str, number: int) -> int:
        return self.queued[self._keyspace.partition(model, number)]

    def _is_overloaded(self, here: int, other: int) -> bool:
        settings = self._settings
        return here > settings.overload_requests and here > settings.overload_factor * other
