"""A part, a program that the supervisor keeps running; when one that died is restarted; who is told of changes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ParamSpec, Protocol


@dataclass(frozen=True)
class RestartPolicy:
    """Delays between a death and the next start."""

    first_delay_s: float = 0.5
    """Before the second restart in a row; the first one is immediate, since most deaths are single."""
    max_delay_s: float = 30.0
    """The delay doubles up to this, so that a broken part does not use up the machine."""
    max_proven_delay_s: float = 30.0
    """The limit of a part that has run for `proven_s` once: nothing is wrong with its files and options."""
    proven_s: float = 10.0
    """Seconds for which it was ready, in whatever life."""
    stable_s: float = 20.0
    """Seconds of running after which earlier deaths no longer count."""
    hopeless_starts: int = 3
    """Number of exits in a row, before it was ever ready, that mean that it cannot start."""
    refusal_code: int = 2
    """One exit with this code before it was ever ready means the same: the parts, and argparse, exit with it where an
    option, or what it names, is wrong.
    """


@dataclass(frozen=True)
class Death:
    """How a part's process ended."""

    lived_s: float
    was_ready: bool
    """Whether it had been ready since this start."""
    exit_code: int
    """Negative: the number of the signal that killed it."""

    @property
    def is_exit(self) -> bool:
        """Whether it exited without being killed by a signal."""
        return self.exit_code >= 0


class RestartRecord:
    """The deaths of one part, from which its restarts follow."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths_in_row = 0
        self._failed_starts = 0
        self._ever_ready = False
        self._is_proven = False
        self._refused = False

    def add(self, death: Death) -> float:
        """Record a death. Returns the seconds until the next start."""
        if death.lived_s >= self._policy.stable_s:
            self._deaths_in_row = 0
        self._ever_ready = self._ever_ready or death.was_ready
        self._is_proven = self._is_proven or (death.was_ready and death.lived_s >= self._policy.proven_s)
        self._failed_starts = self._failed_starts + 1 if death.is_exit and not death.was_ready else 0
        self._refused = not self._ever_ready and death.exit_code == self._policy.refusal_code
        self._deaths_in_row += 1
        return self._delay()

    @property
    def refused(self) -> bool:
        """Whether it was never ready, and its exit code says that its options are wrong."""
        return self._refused

    @property
    def hopeless(self) -> bool:
        """Whether it cannot start: it was never ready, and refused its options or exited several times in a row."""
        failed = not self._ever_ready and self._failed_starts >= self._policy.hopeless_starts
        return failed or self._refused

    def _delay(self) -> float:
        if self._deaths_in_row == 1:
            return 0.0
        doublings = min(self._deaths_in_row - 2, 32)
        longest = self._policy.max_proven_delay_s if self._is_proven else self._policy.max_delay_s
        return float(min(self._policy.first_delay_s * 2**doublings, longest))


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


P = ParamSpec("P")

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives notifications, in the event loop, so it must not block. What it raises is logged and ignored."""

    def changed(self, views: Sequence[PartView]) -> None:
        """Called when a process was started, became ready, died or ended."""

    def died(self, view: PartView, death: Death, restart_delay_s: float) -> None:
        """Called when a part exited or was killed from outside; it is restarted after the delay."""

    def line(self, spec: PartSpec, text: str) -> None:
        """Called with each line that a part wrote."""


def notify(callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a listener. What it raises is logged and not passed on: a part must not end because of its listener."""
    try:
        callback(*args, **kwargs)
    except Exception:  # noqa: BLE001 - any defect of a listener
        _log.exception("a listener failed; the parts run on")
