"""A part, a program that the supervisor keeps running: when one that died is restarted, who is told of changes, and its
output, which is written to a log file and passed on line by line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Protocol, Self


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


READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 14
"""A longer line is passed on in pieces; the file has it whole."""
MAX_FILE_BYTES = 64 << 20
"""Size at which the file is renamed to `<name>.1`, replacing an older one: a part uses at most twice this on disk."""
TAIL_LINES = 12


@contextlib.asynccontextmanager
async def pipe_reader() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Open a pipe; yield its reader and the descriptor to write to, which the caller closes.

    asyncio's own pipe (`stdout=PIPE`) would report a process's end only after all its children, which hold the pipe
    too, have ended.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )
    try:
        yield reader, write_end
    finally:
        transport.close()


class PartOutput:
    """The output of one part over all its processes.

    It reads a pipe instead of giving the file to the part, so that the size of the file is bounded. Reading continues
    where the file cannot be written: a part whose pipe is full would block in its next write.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._file: FileIO | None = None
        self._lost_bytes = 0
        self._why_lost = ""
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines, for the error message of a part that cannot start."""

    def __enter__(self) -> Self:
        self._rotate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def follow(self, pipe: asyncio.StreamReader) -> None:
        """Read the output of one process until its end."""
        while data := await pipe.read(READ_BYTES):
            self._keep(data)
            self._pass_on(data)
        if self._rest:
            self._pass_on(b"\n")

    def _rotate(self) -> FileIO:
        self._close()
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = FileIO(self._path, "w")  # unbuffered: output that a full disk refused must not be written later
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # all was written before; the descriptor is closed all the same
                file.close()

    def _keep(self, data: bytes) -> None:
        """Write to the file. What the disk does not accept is lost; the loss is marked in the file once that works."""
        written = 0
        try:
            file = self._file
            if file is None or file.tell() > MAX_FILE_BYTES:
                file = self._rotate()
            if self._lost_bytes:
                self._mark_loss(file)
            while written < len(data):
                written += file.write(data[written:])
        except OSError as error:
            self._lost_bytes += len(data) - written
            self._why_lost = str(error)

    def _mark_loss(self, file: FileIO) -> None:
        mark = f"[{self._lost_bytes} bytes of output were lost here: error in writing this file: {self._why_lost}]"
        file.write(f"\n{mark}\n".encode())
        self._lost_bytes = 0
        notify(self._on_line, mark)

    def _pass_on(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self.tail.append(text)
                notify(self._on_line, text)
