"""The real worker process with a model whose step takes a fixed time and no processor, as on a GPU.

    PACED_STEP_S=0.03 python -m support.engines.paced_worker MODEL --redis URL [engine options]

Everything but the model's arithmetic is real: scheduler, block tables, detokenizer, claims, appends. The folder gives
the card and the tokenizer. The arithmetic model would not do: reading its cache back takes longer than a GPU's step.
With POISON_TOKEN=N, a prompt that begins with this token kills the engine's process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pagestream_engine import Engine, EngineConfig
from pagestream_engine.models.registry import read_info
from pagestream_engine.plan import PendingResult, StepPlan, full_attention
from pagestream_worker import main as engine_command
from support.engines.arithmetic_model import as_result

NUM_BLOCKS, BLOCK_SIZE = 8192, 16
PACE = "PACED_STEP_S"
"""Environment variable: seconds a step."""
POISON = "POISON_TOKEN"
"""Environment variable: the token of a prompt that kills."""


class PacedRunner:
    """Returns a token for each sample after a fixed time: it follows from the prompt's first token and the length."""

    def __init__(self, folder: Path, config: EngineConfig, step_s: float, poison: int) -> None:
        self.model_info = read_info(folder)
        self.max_model_len = self.model_info.max_position_embeddings
        self.kv_layout = full_attention(config.cache.block_size or BLOCK_SIZE)
        self.fingerprint = "0" * 16
        self._step_s = step_s
        self._poison = poison
        self._lengths: dict[int, int] = {}

    def profile_num_blocks(self) -> int:
        return NUM_BLOCKS

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate nothing: no step reads it."""

    def execute(self, plan: StepPlan) -> PendingResult:
        for new in plan.added:
            if new.token_ids[0] == self._poison:
                os.kill(os.getpid(), signal.SIGKILL)
            self._lengths[new.row] = new.token_ids[0] + len(new.token_ids)
        tokens = []
        for row in plan.sampled_rows.tolist():
            tokens.append(token_at(self._lengths[row]))
            self._lengths[row] += 1
        result = as_result(plan, tokens)
        time.sleep(self._step_s)
        return lambda: result


def token_at(place: int) -> int:
    """Return the token that follows where the first token and the number of tokens have this sum."""
    return 10 + place % 100


def paced_engine(model: str | Path, config: EngineConfig) -> Engine:
    """Return an engine whose model takes as many seconds a step as the environment says."""
    step_s, poison = float(os.environ[PACE]), int(os.environ.get(POISON, "-1"))
    return Engine(model, config, make_runner=lambda folder, config: PacedRunner(folder, config, step_s, poison))


def main() -> int:
    """Run the worker's command; returns its exit code."""
    return engine_command(make_engine="support.engines.paced_worker:paced_engine")


if __name__ == "__main__":
    sys.exit(main())
