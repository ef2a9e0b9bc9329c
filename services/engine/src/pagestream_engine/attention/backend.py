"""What one kind of device computes with between the matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_engine.attention.base import Attention, AttentionBatch, DecodeBatch, StepContext
from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.attention.operators import Operators


def _none() -> int:
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """KV store, attention and operators that belong together."""

    name: str
    store: KVStore
    attention: Attention[Any]
    operators: Operators
    kernel_version: str = ""
    """Name of the build that computes beside torch; another one may give other bits. Empty without such a build."""

    compile_errors: tuple[type[Exception], ...] = ()
    """What is raised where a kernel can't be compiled for the device: each attempt ends so."""

    num_compilations: Callable[[], int] = _none
    """Kernels that were compiled in this process so far."""

    @property
    def compiles(self) -> bool:
        """Whether a kernel is compiled when it is first launched."""
        return self.num_compilations is not _none

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's results have the same bits in any batch, in any chunk, and whenever they are computed
        again. With scales a block's later tokens may change what an earlier one is rounded to."""
        return self.attention.is_deterministic and not self.store.has_scales

    def prepare_step(self, batches: Sequence[AttentionBatch]) -> StepContext:
        """Prepare a step; `batches` has one entry for each KV group, all of the same tokens."""
        pairs = zip(batches, self.store.shapes, strict=True)
        return StepContext(
            positions=batches[0].positions,
            slots=tuple(batch.slots for batch in batches),
            metadata=tuple(self.attention.prepare(batch, shape.block_size) for batch, shape in pairs),
        )

    def prepare_decodes(self, batches: Sequence[DecodeBatch]) -> StepContext:
        """Prepare a step of decodes from what is on the device; see `DecodeBatch`."""
        pairs = zip(batches, self.store.shapes, strict=True)
        return StepContext(
            positions=batches[0].positions,
            slots=tuple(batch.slots for batch in batches),
            metadata=tuple(self.attention.prepare_decodes(batch, shape.block_size) for batch, shape in pairs),
        )
