"""Which torch operations a decode step of one stream dispatches on a CPU.

The weights that pass through the processor's caches leave little else there: in a step of a model of 350 MB an
operation took 10 to 20 us, several times what it takes in a loop.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

_OF_LAYERS = {"mkldnn._linear_pointwise", "aten.linear", "aten.t", "aten.mm", "aten.addmm"} | {
    f"aten.{name}" for name in ("empty", "empty_like", "view", "tensor_split", "unsqueeze")
}
"""Products, by oneDNN or by torch, and what the C++ kernels between them write to and read."""
_ONCE = {f"aten.{name}" for name in ("index_select", "embedding", "add_", "index_copy_")}
"""The last token and its embedding, the last residual, and where the next token is kept. C++ chooses it."""
_OF_HOST_ARRAYS = {f"aten.{name}" for name in ("lift_fresh", "detach", "to", "_to_copy", "resolve_conj", "resolve_neg")}
"""Between numpy and torch."""


class _Recorder(TorchDispatchMode):
    """Counts what is dispatched under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_one_greedy_row_takes_no_operations_but_those_of_the_model(tmp_path: Path) -> None:
    options = {"num_gpu_blocks_override": 8, "max_model_len": 64, "dtype": "float32", "device": "cpu"}
    engine = Engine(make_model(tmp_path, "llama"), EngineConfig.from_options(options))
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    with _Recorder() as recorder:
        assert len(engine.step()) == 1
    counts = recorder.counts
    assert {name: counts[name] for name in _ONCE} == dict.fromkeys(_ONCE, 1)
    assert counts.keys() <= _OF_LAYERS | _ONCE | _OF_HOST_ARRAYS
