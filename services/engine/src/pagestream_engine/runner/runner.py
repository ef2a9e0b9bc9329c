"""Runs scheduled steps: owns the model, the attention backend with its cache, and the sampler."""

from __future__ import annotations

from pathlib import Path

import torch

from pagestream_engine.attention import CacheShape, select_backend
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.rope import cos_sin_table
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.loader import load_model
from pagestream_engine.runner.batch import build_batch
from pagestream_engine.runner.fingerprint import fingerprint
from pagestream_engine.runner.memory import cache_bytes
from pagestream_engine.runner.numerics import possible_mode, settle_numerics
from pagestream_engine.sampler import sample
from pagestream_engine.scheduler.base import SampledTokens, ScheduledStep

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ModelRunner:
    """One model on one device.

    Construct, `allocate_kv_cache`, then `execute` any number of steps. Not thread-safe: the engine's step loop owns it.
    """

    def __init__(self, model_dir: Path, config: EngineConfig, device: torch.device) -> None:
        """Load the weights.

        Raises:
            ModelError: the folder is incomplete, or holds a model that is not supported.
            ConfigError: there is no such device, or an option does not fit it or the model.
        """
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", device.type, "cpu or auto", "torch finds no GPU on this machine")
        self.model_config = ModelInfo.from_folder(model_dir)
        self.device = device
        self.dtype = _DTYPES.get(config.model.dtype, self.model_config.dtype)
        self._config = config
        info = self.model_config
        self.max_model_len = _max_model_len(config.model.max_model_len, info)
        shape = CacheShape(info.num_layers, info.num_kv_heads, info.head_dim, config.cache.block_size, self.dtype)
        cos_sin = cos_sin_table(info.rope, info.head_dim, self.max_model_len, device)
        wanted = possible_mode(config.model.deterministic, self.dtype, device)
        self._backend = select_backend(config.model.attention_backend, shape, cos_sin, exact=wanted is True)
        with torch.inference_mode():
            self._model = load_model(model_dir, info, dtype=self.dtype, device=device)
            self.numerics = settle_numerics(self._model, self._backend, wanted)
        self._model_dir = model_dir
        self._num_blocks = 0

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits: in deterministic mode, engines that have them in common compute the same bits."""
        return fingerprint(self._model_dir, self._backend, self.max_model_len, self.numerics)

    def profile_num_blocks(self) -> int:
        """Blocks of the cache: `num_gpu_blocks_override`, or what fits (see `memory`) and can be used.

        Raises:
            ConfigError: not even one block fits.
        """
        cache, scheduler = self._config.cache, self._config.scheduler
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        fitting = cache_bytes(self.device, cache.gpu_memory_utilization) // self._backend.shape.block_bytes
        if fitting < 1:
            raise ConfigError(
                "gpu_memory_utilization",
                cache.gpu_memory_utilization,
                f"room for blocks of {self._backend.shape.block_bytes} bytes",
                "free some memory, lower block_size, or set num_gpu_blocks_override",
            )
        useful = scheduler.max_num_seqs * -(-self.max_model_len // cache.block_size)
        return min(fitting, useful)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache; block ids are 0 to `num_blocks - 1`.

        Raises:
            ConfigError: `num_blocks` is below 1.
        """
        if num_blocks < 1:
            raise ConfigError("num_gpu_blocks_override", num_blocks, "at least 1")
        self._backend.allocate(num_blocks)
        self._num_blocks = num_blocks

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights ("model") and of the KV cache ("kv_pool"), without what a step needs for itself."""
        return {"model": self._model.weight_bytes(), "kv_pool": self._num_blocks * self._backend.shape.block_bytes}

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> SampledTokens:
        """Compute a step and sample.

        Returns:
            One token id for each sequence of `step.sampled()`. None for an empty step, or one that only fills the
            cache.
        """
        if step.is_empty:
            return SampledTokens([])
        if step.copies:
            self._backend.copy_blocks(step.copies)
        batch = build_batch(step, self._config.cache.block_size, self.device)
        plan = self._backend.plan(batch.attention)
        hidden = self._model.forward(batch.token_ids, batch.sample_rows, self._backend, plan)
        if not batch.sample_seqs:
            return SampledTokens([])
        logits = self._model.logits(hidden, self._backend)
        if batch.sample_logits is not None:
            logits = logits[batch.sample_logits]
        return sample(logits, batch.sample_seqs, self.model_config.eos_token_ids)


def _max_model_len(given: int | None, info: ModelInfo) -> int:
    if given is None:
        return info.max_position_embeddings
    if given > info.max_position_embeddings:
        raise ConfigError("max_model_len", given, f"at most the model's context of {info.max_position_embeddings}")
    return given
