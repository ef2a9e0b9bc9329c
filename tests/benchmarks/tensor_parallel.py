"""Step times of one rank, of two ranks and of two stages, a thread each, and how soon a lost rank ends its group.

    PYTHONPATH=tests python tests/benchmarks/tensor_parallel.py [--dtype bfloat16] [--rounds 3] [--ends 5]

The reference model of `engine_throughput.py`, deterministic, in processes of one thread. All engines are alive and
take turns: decodes of some sequences, and prompts of 512 tokens. The times are medians of the rounds' means. Stages
overlap only chunks of different steps, so that one step at a time gains nothing by them: beside it stands the rate of
prompts of four chunks, with steps scheduled ahead. Then a rank of the group is killed, or stopped, while it decodes;
the time is that until the engine raises.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from engine_throughput import make_model
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.errors import RankLost
from pagestream_engine.executor.rank_group import RankGroup

BATCHES = (1, 16, 64)
SIZES = ((1, 1), (2, 1), (1, 2))
PROMPT_TOKENS, NUM_DECODES, CHUNK = 16, 24, 512


def load(folder: Path, dtype: str, ranks: tuple[int, int], *, ahead: bool = False) -> LLM:
    """Load an engine whose steps run in processes of their own: so many ranks a stage, and stages."""
    return LLM(
        folder,
        device="cpu",
        dtype=dtype,
        deterministic=True,
        executor="process",
        tensor_parallel_size=ranks[0],
        pipeline_parallel_size=ranks[1],
        num_gpu_blocks_override=1024,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        async_scheduling=ahead,
    )


def decode_ms(llm: LLM, num_sequences: int) -> float:
    """Return the mean duration of a step that decodes so many sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODES, ignore_eos=True)
    for number in range(num_sequences):
        llm.engine.add_request(f"{number}", [number + 3] * PROMPT_TOKENS, params)
    times = []
    while llm.engine.has_unfinished_requests():
        started = perf_counter()
        outputs = llm.engine.step()
        took = perf_counter() - started
        stats = llm.engine.stats()
        if len(outputs) == num_sequences and not stats.last_step_prompt_tokens:
            times.append(took)
    return mean(times) * 1000


def prefill_ms(llm: LLM) -> float:
    """Return the duration of a step with a prompt of CHUNK tokens."""
    llm.engine.add_request("prompt", [5] * CHUNK, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    started = perf_counter()
    llm.engine.step()
    return (perf_counter() - started) * 1000


def prompts_s(llm: LLM) -> float:
    """Return the seconds of eight prompts of four chunks each."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    started = perf_counter()
    llm.generate([[number + 3] * (4 * CHUNK - 2) for number in range(8)], params)
    return perf_counter() - started


def end_s(llm: LLM, number: signal.Signals) -> float:
    """Send a signal to the last rank in the middle of decodes, and return the seconds until the engine raises."""
    group = llm.engine._steps.executor
    if not isinstance(group, RankGroup):
        raise TypeError(f"executor: given {type(group).__name__}, expected a RankGroup")
    llm.engine.add_request("last", [5] * PROMPT_TOKENS, SamplingParams(max_tokens=2000, ignore_eos=True))
    for _ in range(10):
        llm.engine.step()
    os.kill(group.pids[-1], number)
    started = perf_counter()
    try:
        while True:
            llm.engine.step()
    except RankLost as error:
        took = perf_counter() - started
        print(f"  {number.name}: {took:.2f} s ({error})")
    llm.engine.abort_request("last")
    llm.engine.restart_executor()
    return took


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ends", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), options.dtype)
        engines = {ranks: load(folder, options.dtype, ranks) for ranks in SIZES}
        kinds = {f"decode {count}": (lambda llm, count=count: decode_ms(llm, count)) for count in BATCHES}
        kinds[f"prefill {CHUNK}"] = prefill_ms
        times: dict[str, dict[tuple[int, int], list[float]]] = {kind: {ranks: [] for ranks in SIZES} for kind in kinds}
        for turn in range(options.rounds):
            for kind, measure in kinds.items():
                for ranks, llm in engines.items() if turn % 2 else reversed(engines.items()):
                    times[kind][ranks].append(measure(llm))
        print("| step | 1 rank, ms | 2 ranks, ms | ratio | 2 stages, ms | ratio |\n|---|---|---|---|---|---|")
        for kind, of_kind in times.items():
            one, two, stages = (median(of_kind[ranks]) for ranks in SIZES)
            print(f"| {kind} | {one:.1f} | {two:.1f} | {one / two:.2f} | {stages:.1f} | {one / stages:.2f} |")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            ends = [end_s(engines[2, 1], number) for _ in range(options.ends)]
            print(f"{number.name}: noticed within {max(ends):.2f} s, median {median(ends):.2f} s")
        for llm in engines.values():
            llm.engine.close()
        ahead = {ranks: load(folder, options.dtype, ranks, ahead=True) for ranks in (SIZES[0], SIZES[2])}
        rates: dict[tuple[int, int], list[float]] = {ranks: [] for ranks in ahead}
        for turn in range(options.rounds):
            for ranks, llm in ahead.items() if turn % 2 else reversed(ahead.items()):
                rates[ranks].append(8 * 4 * CHUNK / prompts_s(llm))
        one, stages = (median(rates[ranks]) for ranks in ahead)
        print(f"prompts of 4 chunks: {one:.0f} tokens/s by 1 rank, {stages:.0f} by 2 stages, {stages / one:.2f}")
        for llm in ahead.values():
            llm.engine.close()


if __name__ == "__main__":
    main()
