"""What a map of an engine's KV blocks costs the step before which it is asked for, by size of pool and batch.

    python tests/benchmarks/block_map.py [--short]

The pools are full of sequences that share a prompt of 1,024 tokens. A map is asked for about once a second while
somebody looks, and never otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time

from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.inspection import block_map
from pagestream_engine.request import Request, Sequence
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.stats import BlockMap, EngineStats
from pagestream_worker.telemetry import record_of

SHARED_BLOCKS = 64
REPEATS = 20
STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 1) | {"accepted_by_position": (1,)})  # type: ignore[arg-type]


def full_pool(num_blocks: int, num_sequences: int) -> tuple[BlockPool, list[Sequence]]:
    """Return a pool whose blocks are all held, the first ones by all sequences."""
    pool = BlockPool(num_blocks)
    shared = [pool.allocate() for _ in range(SHARED_BLOCKS)]
    own = (num_blocks - SHARED_BLOCKS) // num_sequences
    sequences = []
    for number in range(num_sequences):
        seq = Sequence(
            f"{number:048x}/0/0",
            [1],
            SamplingParams(),
            seed=0,
            arrival=number,
            max_total_tokens=9,
            request=Request((), (), tenant="tenant"),
        )
        for block in shared if number else []:
            pool.touch(block)
        seq.block_tables = [[*shared, *(pool.allocate() for _ in range(own))]]
        sequences.append(seq)
    return pool, sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one pool")
    sizes = [(512, 8), (4096, 64), (65536, 256), (524288, 256)]
    print("| blocks | sequences | a map, ms | its record, bytes |\n|---|---|---|---|")
    for num_blocks, num_sequences in sizes[:1] if parser.parse_args().short else sizes:
        pool, sequences = full_pool(num_blocks, num_sequences)

        def take() -> BlockMap:
            return block_map(pool, sequences, num_running=len(sequences), num_waiting=0)  # noqa: B023

        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            take()
            times.append(time.perf_counter() - began)
        size = len(record_of(take(), STATS, 16).SerializeToString())
        print(f"| {num_blocks:,} | {num_sequences} | {1000 * statistics.median(times):.2f} | {size:,} |", flush=True)


if __name__ == "__main__":
    main()
