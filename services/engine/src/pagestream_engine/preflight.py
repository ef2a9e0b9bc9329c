"""Refuse early what an engine would refuse once it has imported torch: by `config.json`, the options and this machine.

What these don't tell for certain is left to the engine, whose words are the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.scheduler.policies import make_policy

_CONTEXT = ("max_position_embeddings", "n_positions")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FIXED = ("default", "linear", "llama3", "longrope", "proportional")
"""Rope scalings by which a context is what the configuration says."""
_GPU_FILES = ("nvidia*", "kfd", "dxg", "nvhost*", "nvmap")
"""In /dev: NVIDIA's driver, AMD's, Windows', and NVIDIA's of small boards."""
_NO_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*None\s*$", re.M)


def check_options(model: str | Path, config: EngineConfig) -> None:
    """Check options against a model's configuration and this machine, in milliseconds and without torch.

    Args:
        model: a folder, or the name of a Hugging Face repository; one that is not in the cache is not looked at.

    Raises:
        ConfigError: an option that no engine could be started with.
    """
    if not config.extensions.plugins:  # which may bring policies of their own
        make_policy(config.scheduler.scheduling_policy)
    if config.model.device == "cuda" and not _may_have_gpu():
        raise ConfigError("device", "cuda", "cpu or auto", "torch finds no GPU on this machine")
    fields = _configuration(model)
    _check_context(config.model.max_model_len, fields)
    _check_ranks(config, fields)


def _check_context(asked: int | None, fields: Mapping[str, Any]) -> None:
    longest = _longest_context(fields)
    if asked is not None and longest is not None and asked > longest:
        raise ConfigError("max_model_len", asked, f"at most the model's context of {longest}")


def _longest_context(fields: Mapping[str, Any]) -> int | None:
    """Return the longest context that `max_model_len` may ask for; None where that isn't certain."""
    context = next((found for name in _CONTEXT if (found := _whole(fields, name)) is not None), None)
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if context is None or not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if any(isinstance(each, Mapping) for each in scaling.values()):
        return None
    if kind in _FIXED:
        return context
    factor, original = scaling.get("factor") or 1.0, scaling.get("original_max_position_embeddings") or context
    if kind not in ("yarn", "dynamic") or not all(isinstance(each, (int, float)) for each in (factor, original)):
        return None
    return max(context, int((original if kind == "yarn" else context) * factor))


def _check_ranks(config: EngineConfig, fields: Mapping[str, Any]) -> None:
    size, option = config.parallel.tensor_parallel_size, "tensor_parallel_size"
    heads = _whole(fields, "num_attention_heads")
    kv_heads = _whole(fields, "num_key_value_heads") or heads
    names = ["num_attention_heads"]
    if not any(fields.get(name) for name in _EXPERTS):
        names.append("intermediate_size")
    for name in names:
        number = _whole(fields, name)
        if number is not None and number % size:
            raise ConfigError(option, size, f"a divisor of {name}, {number}")
        if name == "num_attention_heads" and kv_heads is not None and kv_heads % size and size % kv_heads:
            raise ConfigError(option, size, f"a divisor or a multiple of num_key_value_heads, {kv_heads}")
    stages, layers = config.parallel.pipeline_parallel_size, _whole(fields, "num_hidden_layers")
    if layers is not None and stages > layers:
        raise ConfigError("pipeline_parallel_size", stages, f"at most the {layers} layers of the model")


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _configuration(model: str | Path) -> Mapping[str, Any]:
    """Return the fields of a model's text part; {} where they can't be read here."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _cached(str(model))
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def _cached(repository: str) -> Path:
    """Return where the Hub's client keeps a repository that it has fetched."""
    name, _, revision = repository.partition("@")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        commit = (kept / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    return kept / "snapshots" / commit


def _may_have_gpu() -> bool:
    """Whether torch is built for GPUs, and a driver of one is there."""
    found = find_spec("torch")
    if found is not None and found.origin is not None:
        try:
            built = (Path(found.origin).parent / "version.py").read_text()
        except OSError:
            built = ""
        if {match[1] for match in _NO_BUILD.finditer(built)} == {"cuda", "hip"}:
            return False
    return any(next(Path("/dev").glob(pattern), None) for pattern in _GPU_FILES)
