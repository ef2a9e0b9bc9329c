"""What reading a common prefix once for a whole batch could save a decode step on a CPU: an upper bound.

    python tests/benchmarks/shared_prefix.py [--rounds 20]

64 sequences with a common prefix and 64 tokens of their own each, one new token each, on the reference workload's
shapes. "now": attention as it is, with block tables that name the prefix's blocks 64 times. "apart": the same with
blocks of their own for all, which nothing reads twice. "own": attention over the own tokens alone. "once": 64 tokens
of one sequence attend to the prefix, as a chunk of a prompt does, each key being read once for all of them; "own" and
"once" together are what a step with a cascade takes at least. Milliseconds of one thread, of 12 layers, the shortest
call of each in turns.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from attention_step import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, LAYERS, PLAIN, make_batch
from pagestream_engine.attention import AttentionBatch, Backend, CacheShape, select_backend
from torch import Tensor

NUM_ROWS, NUM_OWN = 64, 64
PREFIXES = (256, 1024, 4096)


def shared_batch(num_prefix: int) -> AttentionBatch:
    """Return a decode of sequences whose first blocks are the same."""
    num_shared, num_own = num_prefix // BLOCK_SIZE, NUM_OWN // BLOCK_SIZE
    ids = torch.randperm(num_shared + NUM_ROWS * num_own, generator=torch.Generator().manual_seed(0)).int()
    prefix, own = ids[:num_shared], ids[num_shared:].view(NUM_ROWS, num_own)
    batch = make_batch([num_prefix + NUM_OWN] * NUM_ROWS, 1, prefill=False)
    tables = torch.cat((prefix.expand(NUM_ROWS, -1), own), dim=1).contiguous()
    return AttentionBatch(
        batch.positions, batch.slots, tables, batch.table_rows, batch.query_lens, batch.seq_lens, batch.num_prefills
    )


def best_times(backend: Backend, batches: dict[str, AttentionBatch], rounds: int) -> dict[str, float]:
    """Milliseconds of all layers."""
    queries: dict[str, Tensor] = {
        name: torch.randn(len(batch.positions), HEADS, HEAD_DIM).to(torch.bfloat16) for name, batch in batches.items()
    }
    best = {name: [float("inf")] * LAYERS for name in batches}
    for _ in range(rounds):
        for name, batch in batches.items():
            metadata = backend.attention.prepare(batch, BLOCK_SIZE)
            for layer in range(LAYERS):
                started = perf_counter()
                backend.attention.attend(layer, queries[name], PLAIN, metadata)
                best[name][layer] = min(best[name][layer], perf_counter() - started)
    return {name: sum(times) * 1e3 for name, times in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| tokens of the prefix | now | apart | own | once | now / (own + once) |\n|---|---|---|---|---|---|")
    for num_prefix in PREFIXES:
        batches = {
            "now": shared_batch(num_prefix),
            "apart": make_batch([num_prefix + NUM_OWN] * NUM_ROWS, 1, prefill=False),
            "own": make_batch([NUM_OWN] * NUM_ROWS, 1, prefill=False),
            "once": make_batch([num_prefix + NUM_ROWS], NUM_ROWS, prefill=True),
        }
        shape = CacheShape(tuple(range(LAYERS)), KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.bfloat16)
        backend = select_backend("auto", [shape], torch.device("cpu"))
        backend.store.allocate(max(int(batch.block_tables.max()) for batch in batches.values()) + 1)
        backend.store.cache.normal_()
        found = best_times(backend, batches, rounds)
        bound = found["now"] / (found["own"] + found["once"])
        columns = " | ".join(f"{found[name]:.1f}" for name in batches)
        print(f"| {num_prefix:,} | {columns} | {bound:.1f} |", flush=True)


if __name__ == "__main__":
    main()
