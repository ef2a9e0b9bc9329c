"""The cost of durability: client, gateway, Redis and engine process against the engine alone, on the same requests.

The same requests (the reference workload of `engine_throughput.py`) run in turn through `Engine.step` in this process,
and through gateway, Redis and an engine process of the same options. The load generator is this process; on a small
machine it takes processor time from what it measures, so its own processor seconds, divided by the number of cores, are
taken off the wall time of the full path. Both figures are printed, the uncorrected one too.

    PYTHONPATH=tests python tests/benchmarks/full_path.py [--short] [--repeats 3] [--step-ms MS] [--json FILE]

With `--step-ms` a step of the model takes this long and no processor time, on both sides: the case of a GPU, where the
path does not compete with the model for the cores. With `--rate` requests arrive one by one: the delay of the first
token is then the path's own, without the time to accept all requests.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import grpc.aio
import torch
from engine_throughput import SHAPE, make_model, make_prompts
from goals import print_goal
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_engine import Engine, EngineConfig, SamplingParams
from support.engines.paced_worker import PACE, paced_engine
from support.processes.stack import Stack, running_stack
from tokenizers import Tokenizer, models, pre_tokenizers

ENGINE_OPTIONS = {"max_num_seqs": 64, "enable_prefix_caching": False}
ENGINE_FLAGS = ("--max-num-seqs", "64", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Run:
    """One run of all requests."""

    tokens_per_s: float
    uncorrected_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for every id, since both sides detokenize."""
    vocabulary = {f"w{number}": number for number in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def summarise(arrivals: Sequence[Sequence[float]], due: Sequence[float], *, wall_s: float, load_s: float) -> Run:
    """Return the figures of a run from the arrival times of tokens and requests, in seconds from the start."""
    count = sum(len(times) for times in arrivals)
    gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times)]
    return Run(
        tokens_per_s=round(count / (wall_s - load_s), 1),
        uncorrected_tokens_per_s=round(count / wall_s, 1),
        ttft_p50_ms=round(median(times[0] - at for times, at in zip(arrivals, due, strict=True)) * 1000, 2),
        itl_p50_ms=round(median(gaps) * 1000, 2),
    )


def due_times(count: int, rate: float | None) -> list[float]:
    """Return when each request is due: all at the start, or by a Poisson process of `rate` a second (seed 0)."""
    if rate is None:
        return [0.0] * count
    draw = random.Random(0)
    return list(accumulate(draw.expovariate(rate) for _ in range(count)))


def run_engine(engine: Engine, prompts: Sequence[Sequence[int]], output_tokens: int, due: Sequence[float]) -> Run:
    """Run the requests through the engine alone."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    arrivals: dict[str, list[float]] = {str(number): [] for number in range(len(prompts))}
    coming = deque(enumerate(prompts))
    started = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        if coming and not engine.has_unfinished_requests():
            time.sleep(max(0.0, due[coming[0][0]] - (time.perf_counter() - started)))
        while coming and due[coming[0][0]] <= time.perf_counter() - started:
            number, prompt = coming.popleft()
            engine.add_request(str(number), prompt, params)
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            arrivals[output.seq_id].append(now)
    return summarise(list(arrivals.values()), due, wall_s=time.perf_counter() - started, load_s=0.0)


async def run_full_path(target: str, prompts: Sequence[Sequence[int]], output_tokens: int, due: Sequence[float]) -> Run:
    """Run the requests through the gateway, each a stream."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

    async def read(stub: InferenceStub, prompt: Sequence[int], number: int, times: list[float]) -> None:
        await asyncio.sleep(started + due[number] - time.perf_counter())
        if paced:
            sent[number] = time.perf_counter() - started
        request = pb.GenerateRequest(model="demo", prompt_token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        async for response in stub.Generate(request):
            now = time.perf_counter() - started
            times.extend([now] * len(response.chunk.token_ids))

    arrivals: list[list[float]] = [[] for _ in prompts]
    sent, paced = list(due), any(due)  # with arrivals one by one, this process' own delay is not the path's
    async with grpc.aio.insecure_channel(target) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)
        cpu = time.process_time()
        started = time.perf_counter()
        calls = enumerate(zip(prompts, arrivals, strict=True))
        await asyncio.gather(*(read(stub, prompt, number, times) for number, (prompt, times) in calls))
        wall_s = time.perf_counter() - started
        load_s = (time.process_time() - cpu) / (os.cpu_count() or 1)
    if any(len(times) != output_tokens for times in arrivals):
        raise RuntimeError("a stream lost or repeated tokens")
    return summarise(arrivals, sent, wall_s=wall_s, load_s=load_s)


def summary(runs: Sequence[Run]) -> Run:
    """Return the highest throughput (other load on the machine only lowers it), and the median delays."""
    return Run(
        tokens_per_s=max(run.tokens_per_s for run in runs),
        uncorrected_tokens_per_s=max(run.uncorrected_tokens_per_s for run in runs),
        ttft_p50_ms=round(median(run.ttft_p50_ms for run in runs), 2),
        itl_p50_ms=round(median(run.itl_p50_ms for run in runs), 2),
    )


def measure(options: argparse.Namespace, folder: Path) -> tuple[Run, Run]:
    """Run both sides in turn; return the figures of the engine alone and of the full path."""
    num_requests, output_tokens = (16, 16) if options.short else (64, 64)
    prompts = make_prompts(num_requests)
    due = due_times(num_requests, options.rate)
    model = make_model(folder / "model", "bfloat16")
    add_tokenizer(model)
    config = EngineConfig.from_options(ENGINE_OPTIONS)
    if options.step_ms is None:
        engine, module = Engine(model, config), "pagestream_worker"
    else:
        engine, module = paced_engine(model, config, step_s=options.step_ms / 1000), "support.engines.paced_worker"
        os.environ[PACE] = str(options.step_ms / 1000)
    alone: list[Run] = []
    full: list[Run] = []

    def rounds(stack: Stack) -> None:
        target = stack.gateways[0].grpc_target
        run_engine(engine, prompts, output_tokens, due)
        asyncio.run(run_full_path(target, prompts, output_tokens, due))
        for _ in range(options.repeats):
            alone.append(run_engine(engine, prompts, output_tokens, due))
            full.append(asyncio.run(run_full_path(target, prompts, output_tokens, due)))

    with running_stack(
        folder,
        model=model,
        engine_options=ENGINE_FLAGS,
        engine_threads=torch.get_num_threads(),
        engine_module=module,
    ) as stack:
        rounds(stack)
    return summary(alone), summary(full)


def main() -> None:
    """Print the figures side by side."""
    parser = argparse.ArgumentParser(description="Full path against the engine alone.")
    parser.add_argument("--short", action="store_true", help="a quarter of the requests and tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, metavar="MS", help="step time of a model without processor time")
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second, at random (default: all at once)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, full = measure(options, Path(folder))
    cost = 1.0 - full.tokens_per_s / alone.tokens_per_s
    print(f"engine alone: {alone}\nfull path:    {full}")
    print(
        f"cost of the full path: {cost:.1%} of throughput (uncorrected "
        f"{1.0 - full.uncorrected_tokens_per_s / alone.tokens_per_s:.1%}), TTFT p50 "
        f"{full.ttft_p50_ms - alone.ttft_p50_ms:+.1f} ms, ITL p50 {full.itl_p50_ms - alone.itl_p50_ms:+.2f} ms"
    )
    print_goal("throughput of the engine alone that is left", ">= 97 %", f"{1 - cost:.1%}")
    goal = "<= 3 ms" if options.rate else "<= 20 ms"  # one by one, or 64 at once
    print_goal("added to the first token, p50", goal, f"{full.ttft_p50_ms - alone.ttft_p50_ms:+.1f} ms")
    print_goal("added between tokens, p50", "<= 2 ms", f"{full.itl_p50_ms - alone.itl_p50_ms:+.2f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps({"engine alone": asdict(alone), "full path": asdict(full)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
