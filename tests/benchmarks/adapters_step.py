"""What LoRA adapters cost a decode step on a CPU, beside the same step without any, in turns in one process.

    python tests/benchmarks/adapters_step.py [--rounds 4] [--dtype bfloat16]

64 sequences of the reference model (see `engine_throughput`), each with 16 tokens of prompt; their adapters have
matrices for all seven projections of its 12 layers, and take turns over the rows. "off" is an engine without
`enable_lora`, "none" one with it whose requests name no adapter. A side's time is its shortest step, in milliseconds of
the processor by one thread: other load on the machine only slows a step down. The cost is over "none".
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_throughput import DTYPES, make_model
from goals import print_goal
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.features.lora.files import adaptable_modules
from pagestream_engine.models.registry import open_model
from pagestream_engine.request import Adapter
from safetensors.torch import save_file

NUM_ROWS, PROMPT_TOKENS, STEPS, MAX_TOKENS = 64, 16, 10, 100
SIDES = ((1, 8), (8, 8), (32, 8), (8, 16), (8, 64), (8, 256))
"""Numbers of adapters, and their rank."""
GOAL_PERCENT = 15.0


@dataclass(frozen=True)
class Side:
    """An engine, and the adapters of its rows."""

    name: str
    engine: Engine
    adapters: list[Adapter]


def make_adapter(model: Path, folder: Path, rank: int, dtype: torch.dtype) -> Path:
    """Write an adapter with random matrices for all modules of a model."""
    folder.mkdir(parents=True)
    weights = open_model(model).weights
    if weights is None:
        raise SystemExit("the reference model takes no adapters")
    tensors = {}
    for name, module in adaptable_modules(weights).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, module.in_features, dtype=dtype) * 0.02
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(module.rows, rank, dtype=dtype) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def shortest_step(side: Side) -> float:
    """Run 64 sequences, and return the shortest of their decode steps, in ms."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for row in range(NUM_ROWS):
        prompt = [(row * 97 + place * 31) % 1000 + 3 for place in range(PROMPT_TOKENS)]
        adapter = side.adapters[row % len(side.adapters)] if side.adapters else None
        side.engine.add_request(str(row), prompt, params, adapter=adapter)
    times = []
    # Adapters are read one after the other: the first rows have many tokens by the time that the last one begins.
    while len(times) < STEPS:
        started = time.process_time()
        tokens = [output for output in side.engine.step() if output.token_id is not None]
        seconds = time.process_time() - started
        # Steps that wait for an adapter's tensors have no tokens, and the statistics of the step before.
        if len(tokens) == NUM_ROWS and not side.engine.stats().last_step_prompt_tokens:
            times.append(seconds)
        if not side.engine.has_unfinished_requests():
            raise SystemExit(f"{side.name}: fewer than {STEPS} steps had all {NUM_ROWS} rows")
    for row in range(NUM_ROWS):
        side.engine.abort_request(str(row))
    while side.engine.has_unfinished_requests():
        side.engine.step()
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args()
    logging.getLogger("pagestream_engine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", options.dtype)
        common = {"num_gpu_blocks_override": 512, "device": "cpu", "enable_prefix_caching": False}
        off = Engine(model, EngineConfig.from_options(common))
        engine = Engine(model, EngineConfig.from_options({**common, "enable_lora": True, "max_cpu_loras": 80}))
        sides = [Side("off", off, []), Side("none", engine, [])]
        for count, rank in SIDES:
            folders = [Path(name) / f"{count}-{rank}" / str(index) for index in range(count)]
            made = [make_adapter(model, folder, rank, DTYPES[options.dtype]) for folder in folders]
            loaded = [engine.adapters.load(str(folder), folder) for folder in made]
            sides.append(Side(f"{count} of rank {rank}", engine, loaded))
        best = {side.name: float("inf") for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                best[side.name] = min(best[side.name], shortest_step(side))
    print("| adapters | ms a step | over none |\n|---|---|---|")
    for side, milliseconds in best.items():
        print(f"| {side} | {milliseconds:.2f} | {100 * (milliseconds / best['none'] - 1):+.1f} % |")
    cost = 100 * (best["8 of rank 8"] / best["none"] - 1)
    print_goal("a step of 64 rows with 8 adapters of rank 8, over none", f"<= {GOAL_PERCENT:g} %", f"{cost:+.1f} %")


if __name__ == "__main__":
    main()
