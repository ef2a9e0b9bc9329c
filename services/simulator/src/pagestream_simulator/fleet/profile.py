"""What one engine is: how long a step takes, and what it can hold. Measured from the real one, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pagestream_simulator.errors import WorkloadInvalidError


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a linear model of what is in it. All are 0 or more."""

    fixed_s: float
    """Of any step."""
    prefill_token_s: float
    """For each token of a prefill chunk: the matrix products."""
    prefill_pair_s: float
    """For each pair of a chunk's token and a token that it attends to."""
    decode_s: float
    """For each sequence that decodes."""
    decode_context_s: float
    """For each token that a decoding sequence attends to."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine."""

    cost: StepCost
    kv_blocks: int = 512
    """Blocks of its KV pool."""
    block_size: int = 16
    """Tokens in a block."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of a step."""
    claim_tokens: int = 2**53
    """With so many uncomputed tokens at hand an engine claims nothing more."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, where, and how well the model fits it."""


def read_profile(path: Path) -> EngineProfile:
    """The profile that `write_profile` wrote.

    Raises:
        WorkloadInvalidError: it can't be read or isn't one.
    """
    try:
        content = json.loads(path.read_text())
        cost = StepCost(**{name: float(value) for name, value in content.pop("cost").items()})
        profile = EngineProfile(cost=cost, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadInvalidError(f"{path} is no engine profile: {error}") from error
    _check(profile, path)
    return profile


def write_profile(profile: EngineProfile, path: Path) -> None:
    """As JSON, for people too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n")


def packaged_profile() -> Path:
    """The profile that comes with this package: the reference model on one core."""
    return Path(__file__).resolve().parents[1] / "data" / "engine_profile.json"


def _check(profile: EngineProfile, path: Path) -> None:
    for name in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        value = getattr(profile, name)
        if not isinstance(value, int) or value < 1:
            raise WorkloadInvalidError(f"{path}: {name} is {value!r}, a whole number of at least 1 is expected")
    costs = {entry.name: getattr(profile.cost, entry.name) for entry in fields(StepCost)}
    negative = [name for name, value in costs.items() if not value >= 0]
    if negative or not any(costs.values()):
        raise WorkloadInvalidError(
            f"{path}: {', '.join(negative) or 'every cost'} must be above 0 seconds, or 0 for some"
        )
