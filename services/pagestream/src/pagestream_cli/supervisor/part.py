"""A part: a program that the supervisor keeps running."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

Probe = Callable[[], Awaitable[bool]]
"""Tells whether a part is ready. It has to come back by itself; an answer that takes long delays only this part."""


@dataclass(frozen=True)
class PartSpec:
    """What to run, and how to know that it runs."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    """Its output, also across restarts."""
    drain_stage: int = 0
    """Parts of a lower stage are asked to end, and have ended, before the next stage is asked."""
    drain_limit_s: float = 10.0
    """From the SIGTERM to the SIGKILL."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the supervisor's own environment."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """By what they speak."""
    probe: Probe | None = None
    """None: it is ready once started."""


class PartState(Enum):
    """Where a part stands."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting for its restart"
    ENDED = "ended"


@dataclass(frozen=True)
class PartView:
    """A part at one moment."""

    spec: PartSpec
    state: PartState
    pid: int | None
    restarts: int
