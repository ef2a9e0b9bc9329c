"""What a GPU records as CUDA graphs holds nothing that a graph can't: for each family and each feature of such steps.

The steps run on a CPU under Triton's interpreter. `make test` looks at what they do; `make deep` lets them compute too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pagestream_engine import EngineConfig
from pagestream_engine.models.registry import fused_architectures
from pagestream_engine.runner import ModelRunner
from support.engines.forbidding_recorder import Forbidden, ForbiddingRecorder, without_kernels
from support.engines.given_plans import decodes
from support.engines.tiny_models import make_model
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds

_CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "block_size": 16,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 24,
}
FLOAT8 = {"kv_cache_dtype": "fp8", "block_size": 64}


@dataclass(frozen=True)
class Served:
    """A model, and how it is served."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of its configuration."""
    form: str = ""
    """Of a quantised checkpoint."""


PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
OTHER = ("gptj", "codegen", "bloom", "mpt", "falcon", "xglm", "biogpt", "gpt-neo", "stablelm", "gpt-neox-japanese")
"""Families with attention, norms or positions of their own."""
CASES: dict[str, Served] = {
    **{name: Served(name) for name in (*PLAIN, *OTHER)},
    **{f"{name}, cache of fp8": Served(name, FLOAT8) for name in PLAIN},
    "windows in some layers": Served("qwen3-window"),
    "tied head, biases": Served("llama-tied"),
    "scaled rotation": Served("llama3-rope"),
    "deterministic": Served("qwen3", {"deterministic": True}),
    "deterministic, norms in float32": Served("gemma3", {"deterministic": True, "dtype": "float32"}),
    "float16": Served("llama", {"dtype": "float16"}),
    "int8 weights": Served("llama", {"quantization": "int8"}),
    "weights of 4 bits in a checkpoint": Served("llama", changes={"intermediate_size": 128}, form="awq"),
    "weights of fp8 in a checkpoint": Served("llama", changes={"intermediate_size": 128}, form="fp8"),
    "adapters, for rows without one": Served("llama", {"enable_lora": True}),
    "drafts, for steps without any": Served("llama", {"speculative_method": "ngram"}),
    "heads of 24": Served("llama", changes={"head_dim": 24}),
    "heads of 24, cache of fp8": Served("gemma3", FLOAT8, {"head_dim": 24}),
}
NOT_RECORDED = ("mixtral", "qwen3-moe")
"""Which experts run depends on the tokens."""


def _folder(base: Path, served: Served) -> Path:
    from support.engines import quantised_checkpoints

    name = " ".join((served.model, *(f"{field} {value}" for field, value in served.changes.items())))
    made = make_model(base / name, served.model, **served.changes)
    if not served.form:
        return made
    quantised, _ = quantised_checkpoints.write(made, base / served.form, served.form)
    return quantised


def watch_steps(base: str, names: list[str]) -> dict[str, Any]:
    """Record the decodes of some cases and run them by their recordings, all without computing.

    Returns:
        Of each case how many steps were recorded and run, and what was forbidden.
    """

    found: dict[str, Any] = {}
    for name in names:
        served = CASES.get(name) or Served(name)
        folder = _folder(Path(base), served)
        config = EngineConfig.from_options({**OPTIONS, **served.options})
        recorder, fault = ForbiddingRecorder(), ""
        # Linears as a GPU has them.
        with without_kernels(), patch("pagestream_engine.layers.linear.runs_onednn", lambda *_: False):
            try:
                runner = ModelRunner(folder, config, _CPU, recorder)
                runner.allocate_kv_cache(24)
                runner.warm_up()
                for num_computed, count in ((5, 2), (40, 1), (5, 1)):
                    runner.execute(decodes(count, num_computed, runner.kv_layout))
            except Forbidden as error:
                fault = str(error)
        found[name] = [recorder.num_recorded, recorder.num_checked, fault]
    return found


QUICK = (
    *("mistral", "qwen2", "gemma2", "phi3"),
    *("gemma3, cache of fp8", "deterministic", "weights of 4 bits in a checkpoint"),  # of gemma3, qwen3 and llama
    *("bloom", "gptj"),  # slopes, and rotations of neighbours
)
"""Each kind of family once."""


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([*CASES.keys() - {*QUICK}], marks=pytest.mark.slow)], ids=["each family", "others"]
)
def test_recorded_steps_hold_nothing_of_the_host(
    interpreter: KernelWorker, tmp_path: Path, names: Sequence[str]
) -> None:
    found = interpreter.run(watch_steps, str(tmp_path), [*names, *NOT_RECORDED], limit_s=400)
    assert {name: fault for name, (_, _, fault) in found.items() if fault} == {}
    assert {name: counts for name, (*counts, _) in found.items()} == {
        **{name: [2, 3] for name in names},
        **{name: [0, 0] for name in NOT_RECORDED},
    }


def test_each_family_is_looked_at(model_of: Callable[..., Path]) -> None:
    folders = [model_of(name) for name in (*PLAIN, *OTHER, *NOT_RECORDED)]
    found = [json.loads((folder / "config.json").read_text())["architectures"][0] for folder in folders]
    assert sorted(found) == sorted(fused_architectures())


# -- the recorder itself -----------------------------------------------------------------------------------------------

_ROWS = torch.arange(6).float()
_INDICES = torch.tensor([4, 1])
_STATE = [1]


def _changing() -> None:
    _STATE[0] += 1
    _ROWS[: _STATE[0]].add(1)


STEPS: dict[str, tuple[Callable[[], object], str]] = {
    "torch.tensor": (lambda: torch.tensor([1.0]), "makes a tensor from numbers of the host"),
    "torch.tensor on the device": (lambda: torch.tensor([1.0], device=_ROWS.device), "from numbers of the host"),
    "new_tensor": (lambda: _ROWS.new_tensor([1.0]), "makes a tensor from numbers of the host"),
    "a list as an index": (lambda: _ROWS[[1, 2]], "makes a tensor"),
    "from_numpy": (lambda: torch.from_numpy(np.zeros(2)), "makes a tensor of the host"),
    "arange on the host": (lambda: _ROWS[:2] + torch.arange(2), "makes a tensor of the host"),
    "zeros on the host": (lambda: torch.zeros(2), "makes a tensor of the host"),
    "item": (_ROWS[0].item, "reads a result on the host"),
    "tolist": (_INDICES.tolist, "reads a result on the host"),
    "numpy": (lambda: np.asarray(_INDICES), "reads a result on the host"),
    "if": (lambda: bool(_ROWS[0] > 1), "reads a result on the host"),
    "a slice by a tensor": (lambda: _ROWS[: _INDICES[0]], "reads a result on the host"),
    "cpu": (_ROWS.cpu, "copies to the host"),
    "equal": (lambda: torch.equal(_ROWS, _ROWS), "reads a result on the host"),
    "nonzero": (_ROWS.nonzero, "shape depends on numbers of the device"),
    "unique": (_INDICES.unique, "shape depends on numbers of the device"),
    "a mask as an index": (lambda: _ROWS[_ROWS > 2], "shape depends on numbers of the device"),
    "a mask as a target": (lambda: _ROWS.clone().__setitem__(_ROWS > 2, _ROWS[:3]), "depends on numbers"),
    "repeat_interleave": (lambda: _ROWS[:2].repeat_interleave(_INDICES), "shape depends on numbers of the device"),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_no_graph_holds_is_refused(name: str) -> None:
    step, why = STEPS[name]
    with pytest.raises(Forbidden, match=why):
        ForbiddingRecorder().record(step)


def test_a_step_that_changes_with_the_host_is_refused() -> None:
    step = ForbiddingRecorder().record(_changing)
    with pytest.raises(Forbidden, match="something else at operation 0"):
        step()


def test_tensors_that_have_moved_are_refused() -> None:
    held = [torch.zeros(3)]
    step = ForbiddingRecorder().record(lambda: held[0].add_(1))
    step()
    held.append(held[0])
    held[0] = torch.zeros(3)
    with pytest.raises(Forbidden, match="something else at operation 0"):
        step()


def test_operations_of_the_device_are_permitted() -> None:
    def compute() -> None:
        found = _ROWS[_INDICES].where(_ROWS[:2] > 0, 0.0)
        found.masked_fill_(found > 3, 1.0).repeat_interleave(_INDICES, output_size=5)
        torch.arange(2, device=_ROWS.device)

    recorder = ForbiddingRecorder()
    recorder.record(compute)()
    assert recorder.num_checked == 1
