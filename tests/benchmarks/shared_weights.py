"""Memory, start and speed of one and of three engines with weights that they share, and without.

    python tests/benchmarks/shared_weights.py [--dtype bfloat16] [--rounds 3] [--short]

The reference model of `engine_throughput.py`, deterministic. Each engine is a process that loads it, generates the
same tokens, and then reads its own PSS (proportional set size: a page counts by its share) while all are alive. Engines
start one after the other, as the load alone is timed, and generate one after the other, in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine_throughput import make_model

_ENGINE = """
import json, sys, time
from pathlib import Path
from random import Random
import torch
torch.set_num_threads(1)
from pagestream_engine import LLM, SamplingParams
import pagestream_engine.runner.runner
folder, dtype, shared = sys.argv[1], sys.argv[2], float(sys.argv[3])
begin = time.perf_counter()
llm = LLM(folder, dtype=dtype, device="cpu", deterministic=True, shared_weights_gb=shared,
          num_gpu_blocks_override=512, max_num_batched_tokens=512)
print(json.dumps(time.perf_counter() - begin), flush=True)
chance = Random(0)
prompts = [[chance.randrange(3, 8192) for _ in range(64)] for _ in range(8)]
def pss():
    rows = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) / 1024
for line in sys.stdin:
    if line == "pss\\n":
        print(json.dumps(pss()), flush=True)
        continue
    begin = time.process_time()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    took = time.process_time() - begin
    print(json.dumps([took, [list(o.outputs[0].token_ids) for o in outputs]]), flush=True)
"""


@dataclass
class EngineProcess:
    """A process with one engine."""

    process: subprocess.Popen[str]
    start_s: float

    @classmethod
    def start(cls, folder: Path, dtype: str, shared: float) -> EngineProcess:
        """Start one, and wait until the model is loaded."""
        command = [sys.executable, "-c", _ENGINE, str(folder), dtype, str(shared)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(process, json.loads(process.stdout.readline()))

    def ask(self, what: str) -> object:
        """Return the answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", options.dtype)
        engines: dict[str, list[EngineProcess]] = {}
        tokens = set()
        for kind, shared in (("own memory", 0.0), ("shared", 4.0)):
            engines[kind] = []
            for count in (1, 3):
                while len(engines[kind]) < count:
                    engines[kind].append(EngineProcess.start(folder, options.dtype, shared))
                tokens.update(json.dumps(engine.ask("go")[1]) for engine in engines[kind])  # type: ignore[index]
                used = sum(float(str(engine.ask("pss"))) for engine in engines[kind])
                starts = ", ".join(f"{engine.start_s:.2f}" for engine in engines[kind])
                print(f"{kind}, {count} engines: PSS {used:,.0f} MiB, loaded in {starts} s", flush=True)
        times: dict[str, list[float]] = {kind: [] for kind in engines}
        for _ in range(1 if options.short else options.rounds):
            for kind, started in engines.items():
                times[kind].append(started[0].ask("go")[0])  # type: ignore[index]
        for kind, taken in times.items():
            print(f"{kind}: {median(taken):.2f} s of the processor for 256 tokens and 8 prompts of 64")
        print(f"{len(tokens)} kinds of tokens")
        for started in engines.values():
            for engine in started:
                engine.end()


if __name__ == "__main__":
    main()
