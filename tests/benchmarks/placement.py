"""What placement keeps of the prefix cache, and how evenly it loads engines: the placing code over a virtual fleet.

    PYTHONPATH=tests python tests/benchmarks/placement.py mooncake_conversation.jsonl [--engines 2 8 64] [--blocks 4000]

Requests arrive as the trace says, at a rate that keeps the engines busy for 80 % of the time where they hit as one
cache of all their blocks does. Engines have the engine's own cache of prefixes; they compute one request after the
other, prompt tokens that are not cached and, at the cost of ten of those, each token of the answer. They take the
oldest request that they may: of their own partitions, or one that has been left to its engine for long enough. Gateways
place in turns, hear from engines once a heartbeat, and know nothing else of each other. "hot" is a made-up trace: 70 %
of its requests begin with one of 20 prompts of 3,000 tokens, by Zipf's law, so that one prompt is a fifth of all; the
others go on with conversations.

"of one cache" is the hit rate as a share of that of one cache with all blocks of the fleet and the same order of
eviction; "best" is the share of what an order that knows the future finds in that cache (`prefix_cache.py`). Loads are
time that engines were busy: of the busiest beside the mean, and beside the one that was least busy.
"""

from __future__ import annotations

import argparse
import heapq
import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from pagestream_engine.config import CacheConfig
from pagestream_engine.kv_cache.block_pool import make_eviction_order
from pagestream_simulator.load import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace
from pagestream_streams import StreamsSettings
from pagestream_streams.gateway.accept import Placer, left_ms
from pagestream_streams.protocol.keys import Keyspace, Partition, ownership, prefixes_of
from prefix_cache import TraceCache, best_hit_rate

MODEL = "m"
SETTINGS = StreamsSettings()
LOAD = 0.8
DECODE = 10
"""Prompt tokens that cost as much as one of an answer."""
TOKENS_S = 20_000
"""That an engine computes in a second."""
PARTITIONS_EACH = 4


def hot_trace(requests: int) -> list[TraceRow]:
    """Return a made-up trace: prompts of blocks of 512 tokens, as Mooncake's."""
    chance, fresh = random.Random(3), count(1)
    heads = [[next(fresh) for _ in range(6)] for _ in range(20)]
    popularity = list(accumulate(1 / rank for rank in range(1, 21)))
    talks: list[list[int]] = [[] for _ in range(400)]
    rows = []
    for number in range(requests):
        if chance.random() < 0.7:
            [head] = chance.choices(heads, cum_weights=popularity)
            blocks = [*head, *(next(fresh) for _ in range(chance.randint(1, 3)))]
        else:
            talk = chance.choice(talks)
            talk += [next(fresh) for _ in range(chance.randint(1, 4))]
            blocks = list(talk)
            if len(talk) > 24:
                talk.clear()
        rows.append(
            TraceRow(float(number), len(blocks) * MOONCAKE_BLOCK_TOKENS, chance.randint(20, 200), tuple(blocks))
        )
    return rows


class Engine:
    """A virtual engine."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.trace = new_cache(num_blocks)
        self.is_busy = False
        self.busy_s = 0.0
        self.computed = 0
        self.unpublished: list[bytes] = []

    def begin(self, request: Request) -> float:
        """Take a request; return for how many seconds it is busy."""
        cache = self.trace.cache
        before = cache.num_hit_tokens
        self.trace.serve(request.row)
        need = request.row.input_tokens - (cache.num_hit_tokens - before)
        self.computed += need
        self.unpublished += request.digests
        seconds = (need + DECODE * request.row.output_tokens) / TOKENS_S
        self.busy_s += seconds
        self.is_busy = True
        return seconds


@dataclass
class Request:
    """A request in a partition's queue."""

    row: TraceRow
    arrived_s: float
    digests: list[bytes]
    idle_s: float
    """When an engine that has nothing else may take it."""
    ripe_s: float
    """When any engine may take it."""


def new_cache(num_blocks: int) -> TraceCache:
    return TraceCache(make_eviction_order(CacheConfig().eviction_policy, num_blocks), num_blocks)


class Fleet:
    """Engines, their partitions, and gateways that place."""

    def __init__(self, num_engines: int, num_blocks: int, num_gateways: int) -> None:
        self.engines = [Engine(f"engine-{number}:{number:016x}", num_blocks) for number in range(num_engines)]
        self.num_partitions = max(4, PARTITIONS_EACH * num_engines)
        names = frozenset(each.name for each in self.engines)
        owned = ownership(self.num_partitions, names)
        self.own = [owned[each.name] for each in self.engines]
        self.owner = {number: index for index, numbers in enumerate(self.own) for number in numbers}
        self.queues: list[deque[Request]] = [deque() for _ in range(self.num_partitions)]
        self._now = 0.0
        self.placers = [Placer(SETTINGS, Keyspace(), clock=lambda: self._now) for _ in range(num_gateways)]
        for placer in self.placers:
            placer.note_living(MODEL, names)
        self.waits: list[float] = []
        self.num_stolen = 0
        self._events: list[tuple[float, int, int]] = []
        """Time, engine (-1: heartbeats; -2: look at the queues), a number that keeps the order."""
        self._numbers = count()

    def run(self, rows: Sequence[TraceRow], rate: float) -> None:
        """Serve a trace at so many requests a second."""
        pace = len(rows) / rate / rows[-1].arrival_s
        self._at(0.0, -1)
        for number, row in enumerate(rows):
            now = row.arrival_s * pace
            self._advance(now)
            self._now = now
            prompt = tokens_of(row)
            placer = self.placers[number % len(self.placers)]
            placed = placer.place(MODEL, self.num_partitions, prompt, b"")
            digests = [digest for _, digest in prefixes_of(prompt, SETTINGS.placement_tokens)]
            left = left_ms(SETTINGS, placed.held_tokens)
            idle_s, ripe_s = (
                now + (SETTINGS.steal_after_ms + min(left, most)) / 1e3 for most in (SETTINGS.steal_idle_ms, left)
            )
            self.queues[placed.partition].append(Request(row, now, digests, idle_s, ripe_s))
            self._take(self.owner[placed.partition], now)
            self._at(idle_s, -2)
            self._at(ripe_s, -2)
        while any(self.queues):
            self._advance(self._events[0][0])

    def _at(self, when: float, what: int) -> None:
        heapq.heappush(self._events, (when, what, next(self._numbers)))

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            now, what, _ = heapq.heappop(self._events)
            if what == -1:
                self._beat()
                self._at(now + SETTINGS.heartbeat_ms / 1000, -1)
            elif what == -2:
                for index, engine in enumerate(self.engines):
                    if not engine.is_busy:
                        self._take(index, now)
            else:
                self.engines[what].is_busy = False
                self._take(what, now)

    def _beat(self) -> None:
        for engine in self.engines:
            for placer in self.placers:
                placer.note_held(MODEL, engine.name, engine.unpublished)
            engine.unpublished = []
        for placer in self.placers:
            for number, queue in enumerate(self.queues):
                placer.note_queued(Partition(MODEL, number), len(queue))

    def _take(self, index: int, now: float) -> None:
        """Let an idle engine take the oldest request that it may."""
        if self.engines[index].is_busy:
            return
        may = [
            (now < request.ripe_s and self.owner[number] != index, request.arrived_s, number, place)
            for number, queue in enumerate(self.queues)
            for place, request in enumerate(queue)
            if self.owner[number] == index or request.idle_s <= now
        ]
        if not may:
            return
        *_, number, place = min(may)
        self.num_stolen += self.owner[number] != index
        request = self.queues[number][place]
        del self.queues[number][place]
        self.waits.append(now - request.arrived_s)
        self._at(now + self.engines[index].begin(request), index)

    def result(self, shared: float, best: float) -> str:
        """Return a row of the table."""
        caches = [engine.trace.cache for engine in self.engines]
        rate = sum(each.num_hit_tokens for each in caches) / sum(each.num_query_tokens for each in caches)
        busy = [engine.busy_s for engine in self.engines]
        mean = sum(busy) / len(busy)
        waits = sorted(self.waits)
        return (
            f"{rate:.1%} | {rate / shared:.0%} | {rate / best:.0%} | {max(busy) / mean:.2f} "
            f"| {max(busy) / min(busy):.2f} | {self.num_stolen / len(waits):.1%} | {sum(waits) / len(waits):.2f} "
            f"| {waits[len(waits) * 99 // 100]:.2f}"
        )


def tokens_of(row: TraceRow) -> array[int]:
    """Return a prompt, in which each token says which block it is of."""
    tokens = array("I")
    for block in row.blocks:
        tokens.extend(array("I", [block]) * MOONCAKE_BLOCK_TOKENS)
    return tokens[: row.input_tokens]


def measure(rows: Sequence[TraceRow], num_engines: int, num_blocks: int, num_gateways: int, load: float) -> str:
    """Return a row of the table."""
    shared = new_cache(num_engines * num_blocks)
    for row in rows:
        shared.serve(row)
    missed = 1 - shared.hit_rate
    work = sum(row.input_tokens for row in rows) * missed + DECODE * sum(row.output_tokens for row in rows)
    fleet = Fleet(num_engines, num_blocks, num_gateways)
    fleet.run(rows, load * num_engines * TOKENS_S * len(rows) / work)
    return fleet.result(shared.hit_rate, best_hit_rate(rows, num_engines * num_blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help='a .jsonl file with hash_ids, or "hot"')
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 4000], help="of 512 tokens, of each engine")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--load", type=float, default=LOAD)
    parser.add_argument("--requests", type=int)
    options = parser.parse_args()
    is_made = options.trace == "hot"
    rows = hot_trace(options.requests or 12_000) if is_made else read_trace(options.trace, options.requests)
    print("| engines | blocks | hit rate | of one cache | of best | busiest : mean | : least | stolen | wait s | p99 |")
    for num_engines in options.engines:
        for num_blocks in options.blocks:
            row = measure(rows, num_engines, num_blocks, options.gateways, options.load)
            print(f"| {num_engines} | {num_blocks:,} | {row} |", flush=True)


if __name__ == "__main__":
    main()
