"""The longest sequence that an engine takes: by its model, its settings, and the memory of the machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.executor.base import RunnerFactory, facts_of, make_model_runner
from pagestream_engine.executor.select import make_executor
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.plugins import import_plugins
from pagestream_engine.wire.executor import ExecutorFacts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """What an engine would take on this machine now."""

    max_model_len: int
    """Tokens of the longest sequence, prompt and output together."""
    model_context: int
    """Tokens of the longest sequence that the model allows."""
    num_sequences: int
    """Sequences of `max_model_len` tokens that the KV pool would hold at once."""


def measure_capacity(
    model: str | Path, config: EngineConfig, *, make_runner: RunnerFactory = make_model_runner
) -> Capacity:
    """Load a model and run what sizes its KV pool, without allocating that, where it is not divided among ranks.

    Args:
        model: a model folder, or the name of a Hugging Face repository.

    Raises:
        EngineError: an engine with these settings would not start, for this reason.
    """
    import_plugins(config.extensions.plugins)
    facts = _measure(resolve_model(model), config, make_runner)
    num_blocks = facts.num_blocks
    longest = fit_model_len(config, facts)
    held = facts.kv_layout.num_blocks_for(longest, config.scheduler.max_num_batched_tokens)
    return Capacity(longest, facts.max_position_embeddings, max(1, num_blocks // held))


def _measure(folder: Path, config: EngineConfig, make_runner: RunnerFactory) -> ExecutorFacts:
    if config.parallel.num_ranks > 1:
        executor = make_executor(make_runner, folder, config)
        executor.close()
        return executor.facts
    runner = make_runner(folder, config)
    return facts_of(runner, config.cache.num_gpu_blocks_override or runner.profile_num_blocks())


def fit_model_len(config: EngineConfig, facts: ExecutorFacts) -> int:
    """Return the tokens of the longest sequence: what was asked for, or what model and pool allow. One sequence alone
    must always fit.

    Raises:
        ConfigError: what was asked for does not fit, or nothing does.
    """
    num_blocks = facts.num_blocks
    asked, of_model = config.model.max_model_len, facts.max_position_embeddings
    of_pool = facts.kv_layout.max_tokens(num_blocks, max(of_model, asked or 0))
    if asked is None:
        if of_pool < of_model:
            _log.warning("the KV pool holds %d tokens: max_model_len is that, not the model's %d", of_pool, of_model)
        asked = min(of_model, of_pool)
    if asked > of_model:
        raise ConfigError("max_model_len", asked, f"at most {of_model}", "the model's positions end there")
    if asked > of_pool:
        hint = "lower it, or give the pool more (num_gpu_blocks_override, gpu_memory_utilization)"
        raise ConfigError("max_model_len", asked, f"at most {of_pool}, what {num_blocks} KV blocks hold", hint)
    if asked < 2:
        raise ConfigError("num_gpu_blocks_override", num_blocks, "room for at least 2 tokens", "raise it or block_size")
    return asked
