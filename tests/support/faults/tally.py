"""What a campaign has counted so far: kept in a file, so that a campaign that was interrupted goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

KEPT_FAILURES = 50


@dataclass
class Tally:
    """Counts of one campaign."""

    seed: int
    hits: int = 0
    """Disturbances: of one part, or of two at once."""
    kills: int = 0
    """Processes that got a SIGKILL."""
    stops: int = 0
    """Processes that got a SIGSTOP for longer than a lease."""
    cuts: int = 0
    """Parts whose network was cut for longer than a lease."""
    requests: int = 0
    tokens: int = 0
    reconnects: int = 0
    lost: int = 0
    """Requests that had fewer tokens than undisturbed, or no end."""
    repeated: int = 0
    """Requests that had more, or whose stream contradicted itself."""
    different: int = 0
    """Requests that had others, or another text, log probability, usage or finish reason."""
    quarantined: int = 0
    seconds: float = 0.0
    """With load on, over all legs."""
    killed: Counter[str] = field(default_factory=Counter)
    """Kills by part."""
    moments: Counter[str] = field(default_factory=Counter)
    """Hits by fault point; "no moment" where none was reached in time."""
    recovery_s: list[float] = field(default_factory=list)
    """Of each kill: until the last of the streams that were open had gone on."""
    failures: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int) -> Self:
        """Go on with what a file says; start where there is none. ValueError for another seed's."""
        if not path.exists():
            return cls(seed)
        content: dict[str, Any] = json.loads(path.read_text())
        if content["seed"] != seed:
            raise ValueError(f"{path} belongs to seed {content['seed']}, not {seed}")
        for name in ("killed", "moments"):
            content[name] = Counter(content[name])
        return cls(**content)

    def save(self, path: Path) -> None:
        """Replace the file at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(vars(self), indent=1) + "\n")
        fresh.replace(path)

    def fail(self, kind: str, what: str) -> None:
        """Count a request that went wrong: "lost", "repeated" or "different"."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(f"{kind}: {what}")

    @property
    def is_clean(self) -> bool:
        """Whether nobody could tell."""
        return not (self.lost or self.repeated or self.different or self.quarantined)

    def table(self) -> Iterator[str]:
        """Lines of Markdown."""
        yield "| what | count |"
        yield "|---|---|"
        for name in ("kills", "stops", "cuts", "requests", "tokens", "reconnects"):
            yield f"| {name} | {getattr(self, name):,} |"
        for name in ("lost", "repeated", "different", "quarantined"):
            yield f"| **{name}** | **{getattr(self, name)}** |"
        for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            yield f"| recovery time {name} | {percentile(self.recovery_s, share):.2f} s |"
        yield f"| time under load | {self.seconds / 60:.0f} min |"
        yield ""
        yield f"Seed {self.seed}. Kills: {_listed(self.killed)}."
        yield f"Hits by moment: {_listed(self.moments)}."


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by so great a share; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
