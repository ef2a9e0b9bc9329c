"""What engines would gain by sharing their cached blocks, on a trace with block hashes.

    PYTHONPATH=tests python tests/benchmarks/cache_sharing.py mooncake_conversation.jsonl [--short]

Each engine has a cache of its own (`prefix_cache.py` says how a request goes through it), and each request goes to one:
"random"; "prefix", the engine that has most of its prompt, of equal ones the one with least work; or "bounded", the
same, but none whose work is above 1.3 times the mean. Work is the prompt tokens that an engine had to compute for the
last 1,000 requests. "shared" is one cache of the same blocks in all, as if what any engine has were free to fetch. The
rate is that of prompt tokens; the number behind it is the largest engine's work over the whole trace beside the mean.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from pagestream_engine.config import CacheConfig
from pagestream_engine.kv_cache.block_pool import make_eviction_order
from pagestream_simulator.load import TraceRow, read_trace
from prefix_cache import SHORT_REQUESTS, TraceCache

BLOCKS = (1000, 4000, 16_000)
"""Of each engine: a card's own are some hundred to a thousand, the others have a tier in host memory."""
ENGINES = (2, 8)
WINDOW = 1000
BOUND = 1.3

Choice = Callable[["Pool", TraceRow], int]


class Pool:
    """Engines that a trace's requests are divided between."""

    def __init__(self, num_engines: int, num_blocks: int) -> None:
        order = CacheConfig().eviction_policy
        self.engines = [TraceCache(make_eviction_order(order, num_blocks), num_blocks) for _ in range(num_engines)]
        self.work = [0] * num_engines
        """Computed prompt tokens of each, of the last requests."""
        self.total = [0] * num_engines
        self._recent: deque[tuple[int, int]] = deque()

    def serve(self, row: TraceRow, index: int) -> None:
        """Give a request to an engine."""
        cache = self.engines[index].cache
        before = cache.num_hit_tokens
        self.engines[index].serve(row)
        computed = row.input_tokens - (cache.num_hit_tokens - before)
        self._recent.append((index, computed))
        self.work[index] += computed
        self.total[index] += computed
        if len(self._recent) > WINDOW:
            oldest, tokens = self._recent.popleft()
            self.work[oldest] -= tokens

    def result(self) -> str:
        """The hit rate, and the largest engine's work beside the mean."""
        found = sum(engine.cache.num_hit_tokens for engine in self.engines)
        rate = found / sum(engine.cache.num_query_tokens for engine in self.engines)
        return f"{rate:.1%} ({max(self.total) * len(self.total) / sum(self.total):.2f})"


def at_random(generator: Random) -> Choice:
    """Choose any engine."""
    return lambda pool, _: generator.randrange(len(pool.engines))


def by_prefix(pool: Pool, row: TraceRow) -> int:
    """Choose the engine with the longest prefix."""
    return _longest(pool, row, range(len(pool.engines)))


def bounded(pool: Pool, row: TraceRow) -> int:
    """Choose the same among those without too much work."""
    most = BOUND * sum(pool.work) / len(pool.work)
    return _longest(pool, row, [index for index, work in enumerate(pool.work) if work <= most])


def _longest(pool: Pool, row: TraceRow, among: Sequence[int]) -> int:
    return max(among, key=lambda index: (pool.engines[index].num_hit_tokens(row), -pool.work[index]))


def measure(rows: Sequence[TraceRow], num_engines: int, num_blocks: int, choose: Choice) -> str:
    """Serve a trace; return `Pool.result`."""
    pool = Pool(num_engines, num_blocks)
    for row in rows:
        pool.serve(row, choose(pool, row))
    return pool.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a .jsonl file with hash_ids")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_REQUESTS} requests")
    options = parser.parse_args()
    rows = read_trace(options.trace, SHORT_REQUESTS if options.short else None)
    print("| engines | blocks each | random | prefix | bounded | shared |\n|---|---|---|---|---|---|")
    for num_engines in ENGINES:
        for num_blocks in BLOCKS:
            cells = [
                measure(rows, num_engines, num_blocks, choose) for choose in (at_random(Random(1)), by_prefix, bounded)
            ]
            shared = measure(rows, 1, num_engines * num_blocks, lambda *_: 0).split()[0]
            print(f"| {num_engines} | {num_blocks:,} | {' | '.join(cells)} | {shared} |", flush=True)


if __name__ == "__main__":
    main()
