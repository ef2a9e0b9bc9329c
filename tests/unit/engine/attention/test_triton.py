"""The engine itself on the Triton kernels, under Triton's interpreter: the same tokens as on torch's operations.

Whether a kernel is interpreted is fixed when Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pagestream_engine.attention import CacheShape, select_backend
from pagestream_engine.errors import ConfigError
from support.engines.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.builds

_RUN = """
import json, sys, torch
from pagestream_engine import LLM, SamplingParams
torch.set_num_threads(1)
folder, backend, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(folder, attention_backend=backend, block_size=8, max_num_batched_tokens=24, num_gpu_blocks_override=40)
params = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
]
outputs = llm.generate(prompts, params)
print(json.dumps([list(choice.token_ids) for output in outputs for choice in output.outputs]))
"""


def _run(folder: Path, backend: str, prompts: list[list[int]], **environment: str) -> list[list[int]]:
    command = [sys.executable, "-c", _RUN, str(folder), backend, json.dumps(prompts)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generate_gives_the_same_tokens_as_torch(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    prompts = random_prompts([3, 30, 11], seed=1)
    triton = _run(folder, "triton", prompts, TRITON_INTERPRET="1")
    assert [len(tokens) for tokens in triton] == [6, 5, 5, 4]
    assert triton[1] != triton[2]
    assert triton == _run(folder, "torch", prompts) == _run(folder, "auto", prompts)


def test_triton_on_a_cpu_needs_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("this process interprets")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET") as caught:
        select_backend("triton", [CacheShape((0,), 1, 64, 16, torch.float32)], torch.device("cpu"))
    assert caught.value.field == "attention_backend"
