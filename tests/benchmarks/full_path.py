"""What durability costs: client, gateway, Redis and engine process against the engine alone, on the same requests.

The same requests (the reference workload of `engine_throughput.py`) run in turn through `Engine.step` in this process,
and through gateway, Redis and an engine process of the same options. The load generator is this process; on a small
machine it takes processor time from what it measures, so its own processor seconds, divided by the number of cores, are
taken off the wall time of the full path. Both figures are printed, the uncorrected one too.

    PYTHONPATH=tests/support python tests/benchmarks/full_path.py [--short] [--repeats 3] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import grpc.aio
import torch
from engine_throughput import SHAPE, make_model, make_prompts
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_engine import Engine, EngineConfig, SamplingParams
from stack import Stack, running_stack
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
    """Give the made model a tokenizer that has a word for every id: both sides turn tokens into text."""
    vocabulary = {f"w{number}": number for number in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def summarise(arrivals: Sequence[Sequence[float]], *, wall_s: float, load_s: float) -> Run:
    """Turn the arrival times of tokens (seconds from the start) of each request into figures."""
    count = sum(len(times) for times in arrivals)
    gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times)]
    return Run(
        tokens_per_s=round(count / (wall_s - load_s), 1),
        uncorrected_tokens_per_s=round(count / wall_s, 1),
        ttft_p50_ms=round(median(times[0] for times in arrivals) * 1000, 2),
        itl_p50_ms=round(median(gaps) * 1000, 2),
    )


def run_engine(engine: Engine, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    """Run the requests through the engine alone."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    arrivals: dict[str, list[float]] = {str(number): [] for number in range(len(prompts))}
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            arrivals[output.request_id].append(now)
    return summarise(list(arrivals.values()), wall_s=time.perf_counter() - started, load_s=0.0)


async def run_full_path(target: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    """Run the requests through the gateway, all at once, each a stream."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

    async def read(stub: InferenceStub, prompt: Sequence[int], times: list[float]) -> None:
        request = pb.GenerateRequest(model="demo", prompt_token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        async for response in stub.Generate(request):
            now = time.perf_counter() - started
            times.extend([now] * len(response.chunk.token_ids))

    arrivals: list[list[float]] = [[] for _ in prompts]
    async with grpc.aio.insecure_channel(target) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)
        cpu = time.process_time()
        started = time.perf_counter()
        await asyncio.gather(*(read(stub, prompt, times) for prompt, times in zip(prompts, arrivals, strict=True)))
        wall_s = time.perf_counter() - started
        load_s = (time.process_time() - cpu) / (os.cpu_count() or 1)
    if any(len(times) != output_tokens for times in arrivals):
        raise RuntimeError("a stream lost or repeated tokens")
    return summarise(arrivals, wall_s=wall_s, load_s=load_s)


def best(runs: Sequence[Run]) -> Run:
    """Return the fastest run: whatever else the machine does can only slow one down."""
    return max(runs, key=lambda run: run.tokens_per_s)


def measure(options: argparse.Namespace, folder: Path) -> tuple[Run, Run]:
    """Run both sides in turn; returns the best of the engine alone and of the full path."""
    num_requests, output_tokens = (16, 16) if options.short else (64, 64)
    prompts = make_prompts(num_requests)
    model = make_model(folder / "model", "bfloat16")
    add_tokenizer(model)
    engine = Engine(model, EngineConfig.from_options(ENGINE_OPTIONS))
    alone: list[Run] = []
    full: list[Run] = []

    def rounds(stack: Stack) -> None:
        target = stack.gateways[0].grpc_target
        run_engine(engine, prompts, output_tokens)
        asyncio.run(run_full_path(target, prompts, output_tokens))
        for _ in range(options.repeats):
            alone.append(run_engine(engine, prompts, output_tokens))
            full.append(asyncio.run(run_full_path(target, prompts, output_tokens)))

    with running_stack(
        folder, model=model, engine_options=ENGINE_FLAGS, engine_threads=torch.get_num_threads()
    ) as stack:
        rounds(stack)
    return best(alone), best(full)


def main() -> None:
    """Print the figures side by side."""
    parser = argparse.ArgumentParser(description="Full path against the engine alone.")
    parser.add_argument("--short", action="store_true", help="a quarter of the requests and tokens")
    parser.add_argument("--repeats", type=int, default=3)
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
    if options.json is not None:
        options.json.write_text(json.dumps({"engine alone": asdict(alone), "full path": asdict(full)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
