"""An engine's profile: the cost of its steps and its limits. Measured from the real engine, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pagestream_engine.config import DEFAULT_BLOCK_SIZE, SchedulerConfig

from pagestream_simulator.errors import InputFileInvalidError


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, as a linear model of its contents. All coefficients are 0 or more."""

    fixed_s: float
    """Per step."""
    prefill_token_s: float
    """Per token of a prefill chunk: the matrix products."""
    prefill_pair_s: float
    """Per pair of a chunk's token and a token that it attends to."""
    decode_s: float
    """Per sequence that decodes."""
    decode_context_s: float
    """Per token that a decoding sequence attends to."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine. Defaults are the real engine's, except for the size of the pool."""

    cost: StepCost
    kv_blocks: int = 512
    """Blocks of its KV pool."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens in a block."""
    max_num_seqs: int = SchedulerConfig().max_num_seqs
    """Sequences that run at once."""
    max_num_batched_tokens: int = SchedulerConfig().max_num_batched_tokens
    """Tokens of a step."""
    claim_tokens: int = 2**53
    """An engine that holds this many uncomputed tokens claims no more; the default is no limit."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, on which machine, and the fit's residuals."""


def read_profile(path: Path) -> EngineProfile:
    """Read a profile that `write_profile` wrote.

    Raises:
        InputFileInvalidError: the file can't be read or isn't a profile.
    """
    try:
        content = json.loads(path.read_text())
        cost = StepCost(**{name: float(value) for name, value in content.pop("cost").items()})
        profile = EngineProfile(cost=cost, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputFileInvalidError(
            f"{path} is not an engine profile: {error}",
            hint="measure one with research/autoscaling/measure.py of the source repository",
        ) from error
    _check(profile, path)
    return profile


def write_profile(profile: EngineProfile, path: Path) -> None:
    """Write a profile as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n")


def packaged_profile() -> Path:
    """Return the path of this package's profile: the reference model on one core."""
    return Path(__file__).resolve().parent / "data" / "engine_profile.json"


def _check(profile: EngineProfile, path: Path) -> None:
    for name in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        value = getattr(profile, name)
        if not isinstance(value, int) or value < 1:
            raise InputFileInvalidError(f"{path}: {name} is {value!r}, a whole number of at least 1 is expected")
    costs = {entry.name: getattr(profile.cost, entry.name) for entry in fields(StepCost)}
    negative = [name for name, value in costs.items() if not value >= 0]
    if negative or not any(costs.values()):
        raise InputFileInvalidError(
            f"{path}: {', '.join(negative) or 'every cost'} must be above 0 seconds, or 0 for some"
        )
