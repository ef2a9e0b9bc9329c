"""Whether the logits of the Triton kernels have the same bits whatever happens to a request: on a GPU, and interpreted.

Run as a script under the interpreter, since a process interprets from Triton's import on or not at all:
`triton_bits.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pagestream_engine.attention.triton.deterministic_attention import DeterministicTritonAttention
from support.engines.recorded_logits import Run, differences
from support.engines.tiny_models import random_prompts
from support.kernels.worker import fix_order_of_additions

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""A model that the interpreter runs in a third of a second a step."""


class Comparison:
    """Requests, and their logits when each runs alone."""

    def __init__(self, folder: Path, options: dict[str, Any], prompts: dict[str, list[int]], num_tokens: int) -> None:
        self._folder, self._options, self._prompts = folder, options, prompts
        self._alone = Run(folder, {**options, "enable_prefix_caching": False}, num_tokens)
        self._expected = self._alone.alone(prompts)
        self.num_compared = len(self._expected)
        """Tokens of all requests."""

    def together(self, **changes: Any) -> dict[str, int]:
        """Run them together under changed options. Return how many tokens have other logits, and preemptions."""
        run = Run(self._folder, {**self._options, "enable_prefix_caching": False, **changes}, self._alone.num_tokens)
        got = run.generate(self._prompts)
        return {
            "differing": len(differences(got, self._expected)),
            "preemptions": run.engine.stats().num_preemptions,
        }

    def resumed(self, **changes: Any) -> dict[str, int]:
        """Let requests go on before their last token, from nothing and from a prefix cache, under changed options. Then
        the next turn of the last one's conversation begins with what is cached of it.

        Returns:
            How many tokens have other logits, how many prompt tokens the next turn found in the cache, and how many
            kernels were compiled after the warm-up.
        """
        num_tokens = self._alone.num_tokens
        given = {name: tokens[:-1] for name, tokens in self._alone.tokens.items()}
        left = {key: logits for key, logits in self._expected.items() if key[1] == num_tokens - 1}
        run = Run(self._folder, {**self._options, **changes}, num_tokens)
        found = {
            "differing": len(differences(run.generate(self._prompts, given), left)),
            "differing on a cache": len(differences(run.generate(self._prompts, given), left)),
        }
        last = [*self._prompts][-1]
        turns = {f"{last}, next turn": self._prompts[last] + self._alone.tokens[last] + [5, 7]}
        self._alone.num_tokens = run.num_tokens = 1
        before = run.engine.stats().prefix_hit_tokens
        found["differing in the next turn"] = len(differences(run.generate(turns), self._alone.alone(turns)))
        found["cached tokens of the next turn"] = run.engine.stats().prefix_hit_tokens - before
        found["late compilations"] = run.runner.num_late_compilations
        return found


def main(folder: Path) -> dict[str, dict[str, int]]:
    """Compare in float32 on a model that is `SMALL`, with a pool that is too small for both requests to end in."""
    torch.set_num_threads(1)
    DeterministicTritonAttention.split_tokens = 64  # so that few tokens have two splits
    options = {"attention_backend": "triton", "device": "cpu", "dtype": "float32", "max_model_len": 72}
    prompts = {f"request {index}": prompt for index, prompt in enumerate(random_prompts([23, 63]))}
    tight = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 96, "max_num_seqs": 3}
    exact = Comparison(folder, {**options, "deterministic": True}, prompts, 3)
    default = Comparison(folder, {**options, "deterministic": False}, prompts, 3)
    return {
        "together": exact.together(**tight),
        "resumed": exact.resumed(max_num_batched_tokens=40),
        "default": default.together(**tight),
    }


if __name__ == "__main__":
    fix_order_of_additions()
    print(json.dumps(main(Path(sys.argv[1]))))
