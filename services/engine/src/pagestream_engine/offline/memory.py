"""Memory of engines that are no longer used."""

from __future__ import annotations

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to, as vLLM's function of this name; there is no Ray to end."""
    del shutdown_ray
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
