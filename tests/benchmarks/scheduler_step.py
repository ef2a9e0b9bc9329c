"""Time of the scheduler in a step (plan, bookkeeping, block hashes; without the model) with many running decodes.

    python tests/benchmarks/scheduler_step.py [--steps 400] [--running 256 1024]

Two arrivals: staggered prompts fill their blocks in different steps; aligned ones all in the same step, which is the
worst case for block allocation and hashing. "Waiting" are steps of 32 decodes while a prompt of 131,072 cached tokens
finds no room; "alone" are those before it came. The line "text and ends" is what the engine adds for stop checks, text
of a byte-level tokenizer and output records. Times are CPU time, which other load on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import gc
from statistics import fmean, quantiles
from time import thread_time

from pagestream_engine.config import SchedulerConfig
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.output import IncrementalDetokenizer, Pieces, begin_text, take
from pagestream_engine.plan import full_attention
from pagestream_engine.request import Sequence, SequenceOutput
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.policies import make_policy
from pagestream_engine.scheduler.scheduler import Scheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BLOCK_SIZE = 16
PROMPT_LEN = 64
LONG_PROMPT_LEN = 131_072
LIMITS_MS = {256: 0.5, 1024: 2.0}


def make_scheduler(num_running: int, *, num_steps: int) -> tuple[Scheduler, CacheManager]:
    """Return a scheduler over a pool in which everything fits."""
    num_blocks = num_running * ((PROMPT_LEN + BLOCK_SIZE + num_steps) // BLOCK_SIZE + 2)
    cache = CacheManager(BlockPool(num_blocks), full_attention(BLOCK_SIZE), enable_prefix_caching=True)
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * (PROMPT_LEN + BLOCK_SIZE))
    return Scheduler(config, cache, make_policy("fcfs")), cache


def make_sequences(num_running: int, *, staggered: bool) -> list[Sequence]:
    """Return sequences without a common prefix."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    return [
        Sequence(
            str(index),
            [index, *range(PROMPT_LEN - 1 + (index % BLOCK_SIZE if staggered else 0))],
            params,
            seed=index,
            arrival=index,
            max_total_tokens=1 << 30,
        )
        for index in range(num_running)
    ]


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of single bytes."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure(num_running: int, *, staggered: bool, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of the scheduler, and of text and ends, in each step."""
    scheduler, _ = make_scheduler(num_running, num_steps=num_steps)
    sequences = make_sequences(num_running, staggered=staggered)
    pieces = Pieces(make_tokenizer())
    for seq in sequences:
        begin_text(seq, IncrementalDetokenizer(pieces, seq.token_ids))
        scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.update_after_schedule(step)
    scheduler.update_from_output(step, [(0,)] * num_running)
    scheduling, text = [], []
    for index in range(num_steps):
        token_ids = [(index + row) % 256 for row in range(num_running)]
        tokens = [(token_id,) for token_id in token_ids]
        start = thread_time()
        step = scheduler.schedule()
        planned = thread_time()
        # -- here the model runs --
        resumed = thread_time()
        scheduler.update_after_schedule(step)
        scheduler.update_from_output(step, tokens)
        advanced = thread_time()
        outputs = []
        for entry, token_id in zip(step.decodes, token_ids, strict=True):
            seq = entry.seq
            taken = take(seq, token_id, seq.num_output_tokens)
            outputs.append(SequenceOutput(seq.seq_id, token_id, *taken, seq.num_cached_tokens))
        done = thread_time()
        scheduling.append((planned - start + advanced - resumed) * 1e3)
        text.append((done - advanced) * 1e3)
    return scheduling, text


def measure_waiting(num_steps: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of the scheduler in steps of 32 decodes: alone, and while a long cached prompt waits."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    num_blocks = (LONG_PROMPT_LEN + 32 * 1024) // BLOCK_SIZE
    cache = CacheManager(BlockPool(num_blocks), full_attention(BLOCK_SIZE), enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192), cache, make_policy("fcfs"))
    names = ["cached", *map(str, range(32)), "waiting"]
    prompts = [[1] * LONG_PROMPT_LEN, *([2 + index] * 1024 for index in range(32)), [1] * LONG_PROMPT_LEN]
    cached, *decoding, waiting = (
        Sequence(name, prompt, params, seed=0, arrival=arrival, max_total_tokens=1 << 30)
        for arrival, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    )

    def run_step() -> float:
        start = thread_time()
        step = scheduler.schedule()
        scheduler.update_after_schedule(step)
        scheduler.update_from_output(step, [(7,)] * len(step.sampled()))
        return (thread_time() - start) * 1e3

    scheduler.add(cached)
    while not cached.num_output_tokens:
        run_step()
    scheduler.finish_requests([cached])
    for seq in decoding:
        scheduler.add(seq)
    while not all(seq.num_output_tokens for seq in decoding):
        run_step()
    alone = [run_step() for _ in range(num_steps)]
    scheduler.add(waiting)
    run_step()
    times_ms = [run_step() for _ in range(num_steps)]
    if scheduler.num_waiting != 1:
        raise RuntimeError("the long prompt was to wait for room")
    return alone, times_ms


def describe(times_ms: list[float]) -> str:
    """Format mean and percentiles."""
    cuts = quantiles(times_ms, n=100)
    return f"mean {fmean(times_ms):.3f}  p50 {cuts[49]:.3f}  p99 {cuts[98]:.3f}  max {max(times_ms):.3f} ms"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024])
    options = parser.parse_args()
    for num_running in options.running:
        for staggered in (True, False):
            scheduling, text = measure(num_running, staggered=staggered, num_steps=options.steps)
            name = "staggered" if staggered else "aligned"
            limit = LIMITS_MS.get(num_running)
            target = f"  (limit {limit} ms)" if limit else ""
            print(f"{num_running:5d} running, {name:9s}  scheduler      {describe(scheduling)}{target}")
            print(f"{'':5s}          {'':9s}  text and ends  {describe(text)}")
            gc.collect()
    alone, waiting = measure_waiting(options.steps)
    print(f"   32 running, alone      scheduler      {describe(alone)}")
    print(f"   32 running, waiting    scheduler      {describe(waiting)}")


if __name__ == "__main__":
    main()
