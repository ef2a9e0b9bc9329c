"""From a folder to a draft model on the target's blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pagestream_engine.attention import CacheShape, KVStore
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import ModelSource, Target
from pagestream_engine.parallel.ranks import ONE_RANK
from pagestream_engine.parallel.stages import UndividedStage
from pagestream_engine.plan import KVLayout
from pagestream_engine.runner.backends import backend_for
from pagestream_engine.runner.speculation.draft_model import LoadedDraft

_OPTION = "speculative_model"


class TargetBlocks(NamedTuple):
    """The target's blocks, not allocated yet."""

    layout: KVLayout
    store: KVStore


class OpenedDraft(NamedTuple):
    """A draft model whose weights are not loaded."""

    folder: Path
    source: ModelSource
    weight_bytes: int


def open_draft(name: str | None, info: ModelInfo, target: Target) -> OpenedDraft | None:
    """Open a draft model. None without a name, and in the stages that don't have it, which refuse a wrong one as well.

    Args:
        name: of its folder or repository.
        target: what the target is loaded for.

    Raises:
        ModelError: there is none, the folder is incomplete, or holds a model that is not supported.
        ConfigError: its vocabulary is not the target's.
    """
    if name is None:
        return None
    folder = resolve_model(name)
    source = open_model(folder)
    if source.info.vocab_size != info.vocab_size:
        expected = f"a model with the target's vocabulary of {info.vocab_size} tokens"
        raise ConfigError(_OPTION, str(folder), expected, f"its own has {source.info.vocab_size}")
    return OpenedDraft(folder, source, source.weight_bytes(whole(target))) if target.stage.is_last else None


def load_draft(opened: OpenedDraft, config: EngineConfig, target: Target, blocks: TargetBlocks) -> LoadedDraft:
    """Load a draft model, and attach its pages to the target's blocks.

    Args:
        target: what the target was loaded for: the draft model computes in its dtype.

    Raises:
        ModelError: its weights are incomplete.
        ConfigError: the two models can't work together.
    """
    folder, source, _ = opened
    group = _full_group(blocks.layout, folder)
    max_model_len = min(target.max_model_len, source.info.max_position_embeddings)
    own_target = replace(whole(target), max_model_len=max_model_len)
    specs = source.attention_specs(own_target)
    if len({(spec.num_kv_heads, spec.head_dim) for spec in specs}) != 1:
        raise ConfigError(_OPTION, str(folder), "a model whose layers have caches of one shape")
    first = specs[0]
    block_size = blocks.layout.groups[group].block_size
    shape = CacheShape(tuple(range(len(specs))), first.num_kv_heads, first.head_dim, block_size, target.dtype)
    is_wanted = config.model.deterministic is True
    own = backend_for(config.model.attention_backend, specs, [shape], target.device, deterministic=is_wanted)
    blocks.store.attach(own.store)
    return LoadedDraft(source.load(own_target, own), own, group, max_model_len)


def whole(target: Target) -> Target:
    """Return what a draft model is loaded for: it is small, and runs more often, so that each rank has all of it."""
    return replace(target, offload=None, ranks=ONE_RANK, stage=UndividedStage(target.stage))


def _full_group(layout: KVLayout, folder: Path) -> int:
    """Return the first KV group of the target whose tables have a block for every token."""
    for index, group in enumerate(layout.groups):
        if group.spec.window is None:
            return index
    hint = "blocks behind a window are given back, and with them a draft model's keys and values"
    raise ConfigError(_OPTION, str(folder), "None for a model without a layer of full attention", hint)
