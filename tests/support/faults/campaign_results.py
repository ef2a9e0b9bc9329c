"""The results of a campaign so far, kept in a file so that an interrupted campaign resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

KEPT_FAILURES = 50


@dataclass
class CampaignResults:
    """The results of one campaign."""

    seed: int
    hits: int = 0
    """Faults injected, each into one part or into several at once."""
    kills: int = 0
    """Processes that got a SIGKILL."""
    stops: int = 0
    """Processes that got a SIGSTOP for longer than a lease."""
    cuts: int = 0
    """Parts whose network was cut for longer than a lease."""
    fills: int = 0
    """Times that Redis was at its memory limit for longer than a disconnect grace."""
    requests: int = 0
    tokens: int = 0
    reconnects: int = 0
    lost: int = 0
    """Requests with fewer tokens than undisturbed, or without an end."""
    repeated: int = 0
    """Requests with more tokens, or whose stream contradicted itself."""
    different: int = 0
    """Requests with other tokens, text, log probabilities, usage or finish reason."""
    quarantined: int = 0
    seconds: float = 0.0
    """Seconds under load, over all legs."""
    killed: Counter[str] = field(default_factory=Counter)
    """Kills by part."""
    moments: Counter[str] = field(default_factory=Counter)
    """Faults by fault point; "no moment" where none was reached in time."""
    recovery_s: list[float] = field(default_factory=list)
    """Of each kill: until the last of the open streams continued."""
    failures: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int) -> Self:
        """Read the results in a file, or start without one. ValueError if the file belongs to another seed."""
        if not path.exists():
            return cls(seed)
        content: dict[str, Any] = json.loads(path.read_text())
        if content["seed"] != seed:
            raise ValueError(f"{path} belongs to seed {content['seed']}, not {seed}")
        for name in ("killed", "moments"):
            content[name] = Counter(content[name])
        return cls(**content)

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(vars(self), indent=1) + "\n")
        fresh.replace(path)

    def fail(self, kind: str, what: str) -> None:
        """Count a failed request; `kind` is "lost", "repeated" or "different"."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(f"{kind}: {what}")

    @property
    def is_clean(self) -> bool:
        """Whether no client noticed a fault."""
        return not (self.lost or self.repeated or self.different or self.quarantined)

    def table(self) -> Iterator[str]:
        """Yield the lines of a Markdown table."""
        yield "| what | count |"
        yield "|---|---|"
        for name in ("kills", "stops", "cuts", "fills", "requests", "tokens", "reconnects"):
            yield f"| {name} | {getattr(self, name):,} |"
        for name in ("lost", "repeated", "different", "quarantined"):
            yield f"| **{name}** | **{getattr(self, name)}** |"
        for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            yield f"| recovery time {name} | {percentile(self.recovery_s, share):.2f} s |"
        yield f"| time under load | {self.seconds / 60:.0f} min |"
        yield ""
        yield f"Seed {self.seed}. Kills: {_listed(self.killed)}."
        yield f"Faults by moment: {_listed(self.moments)}."


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0.0 without values."""
    return float(np.quantile(values, share, method="higher")) if values else 0.0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
