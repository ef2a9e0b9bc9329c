"""A part: a program that the supervisor keeps running."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pagestream_cli.supervisor.restart import RestartPolicy

Probe = Callable[[], Awaitable[bool]]
"""Returns whether a part is ready. It must limit its own duration; a slow one delays this part alone."""


@dataclass(frozen=True)
class Standby:
    """How a part waits as a warm spare of its peers, which run the same program."""

    arguments: tuple[str, ...]
    """Added to the command line of a spare. It must wait for a line on standard input before it takes any work."""
    probe: Probe
    """Returns whether it waits."""


@dataclass(frozen=True)
class PartSpec:
    """What to run, and how to probe that it is ready."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    """File of its output, across restarts."""
    drain_stage: int = 0
    """Parts of a lower stage are stopped, and have ended, before those of the next stage are stopped."""
    drain_limit_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the supervisor's own environment."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports by protocol."""
    probe: Probe | None = None
    """Readiness probe; None: it is ready once started."""
    policy: RestartPolicy | None = None
    """When it is restarted; None: as the supervisor's other parts."""
    standby: Standby | None = None
    """Of a part that takes turns with its peers in being a spare; None: it never is one."""


class PartState(Enum):
    """State of a part."""

    STARTING = "starting"
    STANDBY = "standing by"
    READY = "ready"
    WAITING = "waiting for its restart"
    ENDED = "ended"


@dataclass(frozen=True)
class PartView:
    """Snapshot of a part."""

    spec: PartSpec
    state: PartState
    pid: int | None
    restarts: int
    is_spare: bool = False
