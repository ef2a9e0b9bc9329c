"""An engine on the Triton kernels under the interpreter: its tokens, the launches of its steps, and its operations.

Run as a script, since a process interprets from Triton's import on or not at all: `triton_steps.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.runner import ModelRunner
from pagestream_engine.runner.recorder import EagerRecorder, Step
from pagestream_kernels.launcher import recorded_launches
from support.engines.tiny_models import random_prompts
from support.kernels.worker import fix_order_of_additions
from torch.utils._python_dispatch import TorchDispatchMode

READING = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}
"""Operations that wait for a device, whose result's value or shape the host needs."""


class Operations(TorchDispatchMode):
    """Notes the operations under it: their names, and the shapes and addresses of what stays in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.found.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


class CheckingRecorder(EagerRecorder):
    """Compares what a step does with what it did when it was recorded: a graph repeats that."""

    is_strict = True

    def __init__(self) -> None:
        self.num_checked = 0

    def record(self, step: Step) -> Step:
        with Operations() as recorded, recorded_launches() as launches:
            step()
        reading = READING & {name for name, _ in recorded.found}
        if reading:
            raise AssertionError(f"a recorded step waits for {reading}")

        def replay() -> None:
            with Operations() as found, recorded_launches() as launched:
                step()
            if (found.found, launched) != (recorded.found, launches):
                raise AssertionError("a step does other than what was recorded")
            self.num_checked += 1

        return replay


def main(folder: Path) -> dict[str, Any]:
    """Serve some requests by the Triton kernels with recorded decodes, and by torch's operations without."""
    torch.set_num_threads(1)
    options = {"block_size": 8, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 60, "max_num_seqs": 5}
    recorder = CheckingRecorder()

    def engine(backend: str, recorder: CheckingRecorder | None) -> Engine:
        config = EngineConfig.from_options({**options, "attention_backend": backend, "max_model_len": 64})

        def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
            runner = ModelRunner(folder, config, torch.device("cpu"), recorder)
            if backend == "triton":  # warm up, as where kernels are compiled
                runner._backend = replace(runner._backend, num_compilations=lambda: 0)
            return runner

        return Engine(folder, config, make_runner=make_runner)

    with recorded_launches() as warmed:
        recorded = engine("triton", recorder)
    with recorded_launches() as launched:
        tokens = [_serve(recorded), _serve(engine("torch", None))]
    return {
        "tokens": tokens,
        "checked": recorder.num_checked,
        "kernels": sorted({name for name, *_ in launched}),
        "late": sorted(map(str, launched - warmed)),
    }


def _serve(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(random_prompts([3, 30, 11, 1], seed=1)):
        temperature = 0.9 if number == 1 else 0.0
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=6 + number, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.token_id is not None:
                tokens.setdefault(output.seq_id, []).append(output.token_id)
    return tokens


if __name__ == "__main__":
    fix_order_of_additions()
    print(json.dumps(main(Path(sys.argv[1]))))
