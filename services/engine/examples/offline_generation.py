"""Generate text without a server: prompts in, finished outputs out.

.venv/bin/python services/engine/examples/offline_generation.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagestream_engine import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo-model" / "model"
PROMPTS = ["Once upon a time", "The harbour"]


def main(model: str) -> None:
    """Print what a model makes of the prompts."""
    llm = LLM(model, max_model_len=256)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.7, max_tokens=24, seed=1)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO_MODEL))
