"""Compares a simulated engine with the real one: `python -m research.autoscaling.validate MODEL TRACE`.

The real `Engine` computes the first requests of a trace on virtual time: a step takes the CPU time that it took on one
thread, and a request is added before the first step that begins after its arrival. The simulated engine gets the same
requests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pagestream_simulator.fleet import Fleet
from pagestream_simulator.load import Load, read_trace, scale_arrivals
from pagestream_simulator.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.simulation import Floats


def run_engine(engine: Any, vocab_size: int, load: Load) -> tuple[Floats, Floats]:
    """Run a load through the real engine; return each request's first and last token in virtual seconds."""
    from pagestream_engine import SamplingParams

    rng = random.Random(0)
    first, last = np.full(len(load), np.inf), np.full(len(load), np.inf)
    now_s, arrived = 0.0, 0
    while arrived < len(load) or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            now_s = max(now_s, float(load.arrival_s[arrived]))
        while arrived < len(load) and load.arrival_s[arrived] <= now_s:
            prompt = [rng.randrange(3, vocab_size) for _ in range(load.prompt_tokens[arrived])]
            output = int(load.output_tokens[arrived])
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            engine.add_request(str(arrived), prompt, params)
            arrived += 1
        begun = time.process_time()
        outputs = engine.step()
        now_s += time.process_time() - begun
        for output in outputs:
            number = int(output.seq_id)
            first[number] = min(first[number], now_s)
            last[number] = now_s
    return first, last


def run_model(profile: EngineProfile, load: Load) -> tuple[Floats, Floats]:
    """Return the same of a simulated engine that claims all requests on arrival, as `run_engine` adds them."""
    with Fleet(load, replace(profile, claim_tokens=2**53), partitions=1) as fleet:
        fleet.add_engine(0.0)
        fleet.advance(np.inf)
        return fleet.first_s.copy(), fleet.end_s.copy()


def figures(load: Load, first: Floats, last: Floats) -> dict[str, float]:
    """Return the figures that are compared."""
    ttft = first - load.arrival_s
    several = load.output_tokens > 1
    tpot = (last - first)[several] / (load.output_tokens[several] - 1)
    return {
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p90_s": float(np.percentile(ttft, 90)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "tpot_p50_s": float(np.percentile(tpot, 50)),
        "output_tokens_per_s": float(load.output_tokens.sum() / last.max()),
        "duration_s": float(last.max()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and write the figures."""
    parser = argparse.ArgumentParser(description="Compares the engine of `pagestream simulate` with the real one.")
    parser.add_argument("model", type=Path, help="model folder, as measured")
    parser.add_argument("trace", help="trace whose first requests are taken")
    parser.add_argument("--requests", type=int, default=200, metavar="N")
    parser.add_argument("--times", type=float, default=0.6, metavar="X", help="multiple of the trace's requests")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="lengths are shrunk to it")
    parser.add_argument("--profile", type=Path, default=packaged_profile(), metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    given = parser.parse_args(arguments)

    import torch
    from pagestream_engine import Engine
    from pagestream_engine.config import EngineConfig

    torch.set_num_threads(1)
    profile = read_profile(given.profile)
    rows = read_trace(given.trace)
    whole = scale_arrivals(rows, given.times, jitter_s=0.0, context_tokens=given.context, partitions=1, seed=0)
    n = given.requests
    load = Load(whole.arrival_s[:n], whole.prompt_tokens[:n], whole.output_tokens[:n], whole.partition[:n])
    options = {
        "num_gpu_blocks_override": profile.kv_blocks,
        "max_num_batched_tokens": profile.max_num_batched_tokens,
        "enable_prefix_caching": False,
    }
    engine = Engine(given.model, EngineConfig.from_options(options))
    run_engine(engine, engine.vocab_size, Load(*(column[:3] for column in _columns(load))))
    measured, modelled = (
        figures(load, *run_engine(engine, engine.vocab_size, load)),
        figures(load, *run_model(profile, load)),
    )
    errors = {name: modelled[name] / measured[name] - 1 for name in measured}
    content = {"trace": Path(given.trace).name, "requests": len(load), "times": given.times}
    content |= {"measured": measured, "modelled": modelled, "relative_error": errors}
    print(json.dumps(content, indent=2))
    if given.output is not None:
        given.output.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def _columns(load: Load) -> tuple[Any, ...]:
    return load.arrival_s, load.prompt_tokens, load.output_tokens, load.partition


if __name__ == "__main__":
    sys.exit(main())
