"""The real worker process with a model whose step takes a fixed time and no processor, as on a GPU.

    PACED_STEP_S=0.03 python -m support.engines.paced_worker MODEL --redis URL [engine options]

Everything but the model's arithmetic is real: scheduler, block tables, detokenizer, claims, appends. The folder gives
the card and the tokenizer. The arithmetic model would not do: reading its cache back takes longer than a GPU's step.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from pagestream_engine import Engine, EngineConfig
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.scheduler.base import SampledTokens, ScheduledStep
from pagestream_worker import process
from pagestream_worker.__main__ import main

NUM_BLOCKS = 8192
PACE = "PACED_STEP_S"
"""Environment variable: seconds a step."""


class PacedRunner:
    """Returns a token for each sequence after a fixed time."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.model_config = ModelInfo.from_folder(folder)
        self.max_model_len = self.model_config.max_position_embeddings
        self.fingerprint = "0" * 16
        self._step_s = step_s

    def profile_num_blocks(self) -> int:
        return NUM_BLOCKS

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate nothing: no step reads it."""

    def execute(self, step: ScheduledStep) -> SampledTokens:
        time.sleep(self._step_s)
        return SampledTokens([10 + len(seq.token_ids) % 100 for seq in step.sampled()])


def paced_engine(model: str | Path, config: EngineConfig, *, step_s: float) -> Engine:
    """Return an engine whose model takes `step_s` seconds a step."""
    return Engine(model, config, make_runner=lambda folder, _: PacedRunner(folder, step_s))


if __name__ == "__main__":
    vars(process)["Engine"] = partial(paced_engine, step_s=float(os.environ[PACE]))
    sys.exit(main())
