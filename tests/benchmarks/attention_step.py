"""Time of attention on this machine's CPU, and what each option of a layer makes of it, in turns.

    python tests/benchmarks/attention_step.py [--threads 1] [--dtype bfloat16] [--rounds 20]

The reference workload's shapes: 12 layers, 12 heads of 64, 4 KV heads. Decode: 64 sequences of 32 to 319 tokens, one
new token each ("drafts": four). Prefill: 256 new tokens after 256 others. Each figure is the sum over the layers of the
shortest time of each, since other load only slows a call down; "share" is of the time without options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch
from pagestream_engine.attention import AttentionBatch, AttentionSpec, Backend, CacheShape, select_backend
from torch import Tensor

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 12, 4, 64, 16
PLAIN = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, scale=HEAD_DIM**-0.5)
SPECS: Mapping[str, AttentionSpec] = {
    "plain": PLAIN,
    "window of 64": replace(PLAIN, window=64),
    "soft cap": replace(PLAIN, soft_cap=50.0),
    "sinks": replace(PLAIN, sinks=torch.zeros(HEADS)),
    "slopes": replace(PLAIN, slopes=torch.full((HEADS,), 0.1)),
}


def make_batch(seq_lens: list[int], query_len: int, *, prefill: bool) -> AttentionBatch:
    """Return a batch of sequences whose blocks lie scattered, each with `query_len` new tokens."""
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.nn.utils.rnn.pad_sequence(list(torch.split(ids, counts)), batch_first=True)
    positions = torch.cat([torch.arange(length - query_len, length) for length in seq_lens])
    query_lens = [query_len] * len(seq_lens)
    rows, num_prefills = torch.arange(len(seq_lens)), len(seq_lens) if prefill else 0
    return AttentionBatch(positions, positions, tables, rows, query_lens, seq_lens, num_prefills)


def best_times(backend: Backend, batch: AttentionBatch, query: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds of all layers under each spec."""
    best = {name: [float("inf")] * LAYERS for name in SPECS}
    for _ in range(rounds):
        for name, spec in SPECS.items():
            metadata = backend.attention.prepare(batch, BLOCK_SIZE)
            for layer in range(LAYERS):
                started = perf_counter()
                backend.attention.attend(layer, query, spec, metadata)
                best[name][layer] = min(best[name][layer], perf_counter() - started)
    return {name: sum(times) * 1e3 for name, times in best.items()}


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description="Time of attention on this machine's CPU.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--float8", action="store_true", help="keep keys and values in float8")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype: torch.dtype = getattr(torch, given.dtype)
    seq_lens = torch.randint(32, 320, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = {
        "decode": make_batch(seq_lens, 1, prefill=False),
        "decode with drafts": make_batch(seq_lens, 4, prefill=False),
        "prefill": make_batch([512], 256, prefill=True),
    }
    kept = torch.float8_e4m3fn if given.float8 else None
    shape = CacheShape(tuple(range(LAYERS)), KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype, kept)
    backend = select_backend("auto", [shape], torch.device("cpu"))
    backend.store.allocate(max(int(batch.block_tables.max()) for batch in batches.values()) + 1)
    if given.float8:
        backend.store.cache.random_(0, 126)
        backend.store.parts[1].fill_(2.0**-6)
    else:
        backend.store.cache.normal_()
    print(f"{backend.name}, {given.dtype}, {given.threads} threads")
    print("| batch | layers | ms | share |\n|---|---|---|---|")
    for kind, batch in batches.items():
        query = torch.randn(len(batch.positions), HEADS, HEAD_DIM).to(dtype)
        times = best_times(backend, batch, query, given.rounds)
        for name, time in times.items():
            print(f"| {kind} | {name} | {time:.2f} | {time / times['plain']:.2f} |")


if __name__ == "__main__":
    main()
