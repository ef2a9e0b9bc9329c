"""Takes the time, the bytes and the arithmetic of each operation of a model runner's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from machine_limits import clock
from pagestream_engine.attention import AttentionBatch, AttentionSpec
from pagestream_engine.layers.linear import Activation, LinearMethod
from pagestream_engine.runner import ModelRunner
from pagestream_engine.runner.batch import PersistentBatch
from pagestream_engine.sampler import SamplingBatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Work:
    """Of one operation, over all its calls in a step."""

    calls: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    """Read and written, each operand once."""
    flops: float = 0.0
    """Two for each multiplication that is added; of elementwise operations none."""


class TimedMethod(LinearMethod):
    """A linear method whose products are noted."""

    def __init__(self, method: LinearMethod, note: Callable[..., Any]) -> None:
        self._method, self._note = method, note
        self.shape, self.dtype, self.num_bytes = method.shape, method.dtype, method.num_bytes
        self.fuses_gates = method.fuses_gates
        self._name = f"linear {method.shape[1]} to {method.shape[0]}"

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._noted(self._name, self.shape[0], self._method.product, x, bias)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        name = f"{self._name}, gated"
        return self._noted(name, self.shape[0] // 2, self._method.gated_product, x, bias, activation)

    def _noted(self, name: str, columns: int, function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """`columns` are of the result."""
        rows, (outputs, inputs) = x.shape[0], self.shape
        num_bytes = self.num_bytes + rows * (inputs + columns) * x.itemsize
        result: Tensor = self._note(name, num_bytes, 2.0 * rows * inputs * outputs, function, x, *args)
        return result


class TimedOperations:
    """Replaces the operations of a runner by themselves with a clock: of a decoder with gated MLPs and one KV group."""

    def __init__(self, runner: ModelRunner) -> None:
        self.work: dict[str, Work] = {}
        """By operation, since it was emptied last."""
        self.query_lens: list[int] = []
        """New tokens of each sequence in the last step."""
        self._read_tokens = 0
        self._pairs = 0
        backend = runner._backend
        for linear in runner._model.linears():
            linear.method = TimedMethod(linear.method, self._note)
        self._replace(backend.attention, "prepare", "attention: tables and tiles", self._of_prepare)
        self._replace(backend.attention, "attend", "attention", self._of_attend)
        self._replace(backend.store, "rotate_and_write", "rotation and cache write", _of_tensors)
        for name in ("rms_norm", "add_rms_norm"):
            self._replace(backend.operators, name, name, _of_tensors)
        for layer in runner._model.layers:
            self._replace(layer.mlp, "_gated", "gated activation", lambda gate_up: (1.5 * gate_up.nbytes, 0.0))
        # Of the classes: the runner makes their objects anew.
        self._replace(SamplingBatch, "sample", "sampling", lambda batch, logits, rows: (logits.nbytes, 0.0))
        self._replace(PersistentBatch, "inputs", "batch: inputs of the step", lambda *_: (0.0, 0.0))

    def _note(
        self, name: str, num_bytes: float, flops: float, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        start = clock()
        result = function(*args, **options)
        seconds = clock() - start
        work = self.work.setdefault(name, Work())
        work.calls += 1
        work.seconds += seconds
        work.num_bytes += num_bytes
        work.flops += flops
        return result

    def _replace(self, owner: Any, method: str, name: str, amount: Callable[..., tuple[float, float]]) -> None:
        function = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            return self._note(name, *amount(*args), function, *args, **options)

        setattr(owner, method, timed)

    def _of_prepare(self, batch: AttentionBatch, block_size: int) -> tuple[float, float]:
        """Keep what `_of_attend` needs: it gets the step in a form of the backend's own."""
        self.query_lens, self._read_tokens = list(batch.query_lens), sum(batch.seq_lens)
        lens = zip(batch.query_lens, batch.seq_lens, strict=True)
        self._pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in lens)
        return 0.0, 0.0

    def _of_attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: object) -> tuple[float, float]:
        read = 2 * self._read_tokens * spec.num_kv_heads * spec.head_dim * query.itemsize
        return read + 2 * query.nbytes, 4.0 * self._pairs * spec.num_heads * spec.head_dim


def _of_tensors(*args: object) -> tuple[float, float]:
    """Twice the tensors among the arguments: read once, and as much written."""
    return 2.0 * sum(arg.nbytes for arg in args if isinstance(arg, Tensor)), 0.0


class CountedOperators(TorchDispatchMode):
    """Counts torch's operators while it is entered, those inside of others not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
