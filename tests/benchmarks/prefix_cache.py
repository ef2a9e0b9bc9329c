"""Hit rate of the prefix cache on a trace with block hashes, by order of eviction and size, beside the best possible.

    PYTHONPATH=tests python tests/benchmarks/prefix_cache.py mooncake_conversation.jsonl [--sizes 2000 ...] [--short]

The engine's own pool and cache take the trace's prompts one after the other, in blocks of its 512 tokens: each finds
its longest cached prefix, takes blocks for the rest and its answer, has its prompt's full blocks cached, and frees all.
The rate is that of prompt tokens. What is generated is not cached, as the trace does not say what continues it.

"best" is the same cache with an order that knows the future, and evicts the block that is used again last (Belady,
1966). It is the best possible: all blocks cost the same, each request needs all of its own at once, and no block is
used later than what continues it, so that a prefix never loses a block before its end.

The halves of the trace are runs of their own, with a cache that is empty at first: the default is chosen on the first
and judged on the second. The last line of each is the mean over sizes of the share of the best.
"""

from __future__ import annotations

import argparse
from collections import abc
from statistics import fmean

from pagestream_engine.config import ENGINE_OPTIONS
from pagestream_engine.kv_cache.block_pool import BlockPool, EvictionOrder, HeapOrder, make_eviction_order
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.plan import full_attention
from pagestream_engine.request import Sequence, SequenceState
from pagestream_engine.sampling_params import SamplingParams
from pagestream_simulator.load import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace

POLICIES = ENGINE_OPTIONS["eviction_policy"].choices or ()
SIZES = (500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000)
"""Blocks of 512 tokens: 64 MiB each in a model with 128 KiB of keys and values a token."""
SHORT_SIZES = (500, 2000)
SHORT_REQUESTS = 1000
BEST = "best"
_PARAMS = SamplingParams()
_NEVER = float("inf")
_TOKENS = [0] * 200_000
"""Of any prompt: what is equal is said by the hashes that a sequence brings."""


class TraceCache:
    """The engine's cache of one size, which a trace's requests go through one after the other."""

    def __init__(self, order: EvictionOrder, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, order)
        layout = full_attention(MOONCAKE_BLOCK_TOKENS)
        self.cache = CacheManager(self.pool, layout, enable_prefix_caching=True)

    @property
    def hit_rate(self) -> float:
        """Of the tokens of all prompts."""
        return self.cache.num_hit_tokens / self.cache.num_query_tokens

    def num_hit_tokens(self, row: TraceRow) -> int:
        """Tokens of a prompt that the cache has now."""
        return self.cache.get_computed_blocks(_sequence(row)).num_tokens

    def serve(self, row: TraceRow) -> None:
        """Take a request, and end it."""
        cache, seq = self.cache, _sequence(row)
        cache.touch_prefix(seq, cache.get_computed_blocks(seq))
        seq.state = SequenceState.RUNNING
        cache.allocate_slots(seq, row.input_tokens + row.output_tokens)
        seq.num_computed_tokens = row.input_tokens
        cache.free(seq)


class Clairvoyant(HeapOrder):
    """Evicts first what is used again last."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.next_use: dict[bytes, float] = {}
        """By block hash, the number of the next request that uses it."""
        self.pool = BlockPool(0)

    def value(self, block: int) -> float:
        return -self.next_use[self.pool.hashes[block] or b""]


def best_hit_rate(rows: abc.Sequence[TraceRow], num_blocks: int) -> float:
    """Return the best possible hit rate."""
    order = Clairvoyant(num_blocks)
    trace = TraceCache(order, num_blocks)
    order.pool = trace.pool
    for row, next_uses in zip(rows, _next_uses(rows), strict=True):
        order.next_use.update(zip(_hashes(row), next_uses, strict=True))
        trace.serve(row)
    return trace.hit_rate


def hit_rate(rows: abc.Sequence[TraceRow], name: str, num_blocks: int) -> float:
    """Return the hit rate with one of POLICIES."""
    trace = TraceCache(make_eviction_order(name, num_blocks), num_blocks)
    for row in rows:
        trace.serve(row)
    return trace.hit_rate


def _next_uses(rows: abc.Sequence[TraceRow]) -> list[list[float]]:
    """For each block of each request, the number of the next request that has it."""
    seen: dict[int, float] = {}
    next_uses = []
    for index in range(len(rows) - 1, -1, -1):
        next_uses.append([seen.get(block, _NEVER) for block in rows[index].blocks])
        seen.update(dict.fromkeys(rows[index].blocks, index))
    return next_uses[::-1]


def _hashes(row: TraceRow) -> list[bytes]:
    return [block.to_bytes(8, "little") for block in row.blocks]


def _sequence(row: TraceRow) -> Sequence:
    seq = Sequence("", _TOKENS[: row.input_tokens], _PARAMS, seed=0, arrival=0, max_total_tokens=len(_TOKENS))
    seq.block_hashes = _hashes(row)
    return seq


def print_table(title: str, rows: abc.Sequence[TraceRow], sizes: abc.Sequence[int]) -> None:
    """Measure every order at every size, and print the rates."""
    print(f"\n{title}: {len(rows):,} requests, {sum(row.input_tokens for row in rows):,} prompt tokens")
    print("\n| blocks | " + " | ".join((*POLICIES, BEST)) + " |")
    print("|---" * (len(POLICIES) + 2) + "|")
    shares: dict[str, list[float]] = {name: [] for name in POLICIES}
    for num_blocks in sizes:
        best = best_hit_rate(rows, num_blocks)
        rates = {name: hit_rate(rows, name, num_blocks) for name in POLICIES}
        for name, rate in rates.items():
            shares[name].append(rate / best)
        cells = [f"{rate:.1%}" for rate in (*rates.values(), best)]
        print(f"| {num_blocks:,} | " + " | ".join(cells) + " |", flush=True)
    print("| of the best, mean | " + " | ".join(f"{fmean(shares[name]):.1%}" for name in POLICIES) + " | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a .jsonl file with hash_ids")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BLOCKS", help=f"default: {SIZES}")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_REQUESTS} requests, {SHORT_SIZES} blocks")
    options = parser.parse_args()
    rows = read_trace(options.trace, SHORT_REQUESTS if options.short else None)
    sizes = options.sizes or (SHORT_SIZES if options.short else SIZES)
    half = len(rows) // 2
    print_table("the whole trace", rows, sizes)
    print_table("its first half", rows[:half], sizes)
    print_table("its second half", rows[half:], sizes)


if __name__ == "__main__":
    main()
