"""The engine end to end on a model with random weights: tokens a second, and what was compiled while it served."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.runner import ModelRunner
from pagestream_engine.sampling_params import SamplingParams
from support.engines.tiny_models import make_model
from timing import Figure

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
CONCURRENT = (1, 32, 256)
MODES: Mapping[str, Mapping[str, Any]] = {
    "decodes recorded": {},
    "each kernel launched": {"enforce_eager": True},
    "decodes recorded, deterministic": {"deterministic": True},
}
OUTPUT_TOKENS = 128


def engine(device: torch.device, *, dry: bool) -> Iterator[Figure]:
    """Serve batches of requests with recorded decodes, without, and with recorded ones in deterministic mode."""
    with tempfile.TemporaryDirectory() as scratch:
        changes = {"num_hidden_layers": 1} if dry else SHAPE
        folder = make_model(Path(scratch, "model"), "llama", dtype=torch.bfloat16, **changes)
        for name, options in MODES.items():
            yield from _serve(folder, device, name, options, dry=dry)
            gc.collect()  # the next engine takes the memory that is free
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _serve(folder: Path, device: torch.device, name: str, options: Mapping[str, Any], *, dry: bool) -> Iterator[Figure]:
    options = {"attention_backend": "triton", "max_num_seqs": 256, **options}
    if dry:
        small = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "num_gpu_blocks_override": 6}
        options |= {**small, "dtype": "float32", "block_size": 16}
    config = EngineConfig.from_options(options)
    runners: list[ModelRunner] = []

    def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
        runners.append(ModelRunner(folder, config, device))
        return runners[-1]

    engine = Engine(folder, config, make_runner=make_runner)
    for concurrent in (1,) if dry else CONCURRENT:
        seconds, num_tokens = _run(engine, concurrent, 2 if dry else OUTPUT_TOKENS, 4 if dry else 255)
        yield {
            "name": f"{concurrent} at once, {name}",
            "tokens_per_s": num_tokens / seconds if device.type == "cuda" else None,
            "late_compilations": runners[0].num_late_compilations,
        }
    engine.close()


def _run(engine: Engine, concurrent: int, max_tokens: int, longest: int) -> tuple[float, int]:
    chooser, num_tokens = random.Random(0), 0
    for number in range(concurrent):
        prompt = [chooser.randrange(3, 300) for _ in range(chooser.randint(min(32, longest), longest))]
        params = SamplingParams(temperature=number % 2, seed=number, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        num_tokens += sum(output.token_id is not None for output in engine.step())
    return time.perf_counter() - start, num_tokens
