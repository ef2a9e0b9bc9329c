"""What torch raises where memory runs out."""

from __future__ import annotations

import torch

_CPU_FAILURE = "DefaultCPUAllocator"
"""Names the allocator in the RuntimeError that torch raises where a CPU has no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host has run out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_FAILURE in str(error)
