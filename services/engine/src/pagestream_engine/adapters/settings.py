"""`adapter_config.json` of PEFT: which ranks and scales an adapter has, and what of it is not supported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_engine.adapters.patterns import MAX_CHARACTERS, MAX_STEPS_OF_ADAPTER, NamePattern
from pagestream_engine.errors import AdapterFileError, UnsupportedAdapter

CONFIG_FILE = "adapter_config.json"
_IGNORED = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",  # the tensors say it
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",  # of training
        "megatron_core",
        "qalora_group_size",  # means something with use_qalora
        "ensure_weight_tying",  # of modules_to_save
        "runtime_config",
    }
)
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
_MOST = 2.0**32
"""Ranks and alphas are less: beyond it some have no value as a float."""
_MOST_PATTERNS = 4096
_ORDINARY_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` after which the base model's weights are what they were."""


@dataclass(frozen=True)
class AdapterSettings:
    """What the configuration says of each module's matrices."""

    rank: int
    alpha: float
    divides_by_root: bool
    """Whether the scale is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732), not alpha / rank."""
    rank_pattern: Mapping[NamePattern, int]
    alpha_pattern: Mapping[NamePattern, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return int(_value_of(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return what a module's product is multiplied with."""
        alpha, rank = _value_of(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.divides_by_root else rank)


def read_settings(folder: Path) -> AdapterSettings:
    """Read `adapter_config.json`.

    Raises:
        AdapterFileError: it is missing or malformed.
        UnsupportedAdapter: it asks for something that is not supported, which the message names.
    """
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise AdapterFileError(f"{path}: no such file, expected an adapter in PEFT's format") from error
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFileError(f"{path}: unreadable, expected a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterFileError(f"{path}: given a {type(fields).__name__}, expected a JSON object")
    _refuse_unsupported(path, fields)
    rank, alpha = fields.get("r", 0), fields.get("lora_alpha", 0)
    if not _is_whole(rank) or not _is_number(alpha):
        raise AdapterFileError(f"{path}: given r {rank!r} and lora_alpha {alpha!r}, expected two positive numbers")
    ranks = _pattern(path, fields, "rank_pattern", _is_whole, MAX_STEPS_OF_ADAPTER)
    room = MAX_STEPS_OF_ADAPTER - sum(pattern.num_steps for pattern in ranks)
    return AdapterSettings(
        rank=rank,
        alpha=float(alpha),
        divides_by_root=bool(fields.get("use_rslora", False)),
        rank_pattern=ranks,
        alpha_pattern=_pattern(path, fields, "alpha_pattern", _is_number, room),
    )


def _refuse_unsupported(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse all but plain LoRA, by the names of the fields, and what is set and not known here."""
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedAdapter(f"{path}: peft_type: given {kind!r}, expected LORA")
    if fields.get("bias", "none") != "none":
        raise UnsupportedAdapter(f"{path}: bias: given {fields['bias']!r}, expected none; train without biases")
    start = fields.get("init_lora_weights", True)
    if start not in _ORDINARY_STARTS:
        raise UnsupportedAdapter(
            f"{path}: init_lora_weights: given {start!r}, which changes the base model's weights; expected one of "
            f"{', '.join(map(str, _ORDINARY_STARTS))}; let PEFT convert it "
            "(path_initial_model_for_weight_conversion)"
        )
    for name in sorted(fields.keys() - _READ - _IGNORED):
        if fields[name]:
            raise UnsupportedAdapter(f"{path}: {name}: given {fields[name]!r:.80}, expected it not to be set")


def _pattern(path: Path, fields: Mapping[str, Any], name: str, is_valid: Any, room: int) -> Mapping[NamePattern, Any]:
    given = fields.get(name) or {}
    if not isinstance(given, dict) or not all(map(is_valid, given.values())):
        raise AdapterFileError(f"{path}: {name}: given {given!r:.80}, expected modules and a positive number for each")
    if len(given) > _MOST_PATTERNS:
        raise AdapterFileError(f"{path}: {name}: given {len(given)} patterns, expected at most {_MOST_PATTERNS}")
    patterns: dict[NamePattern, Any] = {}
    for pattern, value in given.items():
        try:
            found = NamePattern(pattern, room)
        except ValueError as error:
            raise AdapterFileError(
                f"{path}: {name}: given {pattern!r:.80}, expected a pattern of at most {MAX_CHARACTERS} characters: "
                f"{error}"
            ) from error
        room -= found.num_steps
        patterns[found] = value
    return patterns


def _value_of(patterns: Mapping[NamePattern, float], module: str, default: float) -> float:
    """Return the value of the first pattern that a module's name ends with, as PEFT finds it."""
    return next((value for pattern, value in patterns.items() if pattern.matches(module)), default)


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 < given < _MOST


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < _MOST
