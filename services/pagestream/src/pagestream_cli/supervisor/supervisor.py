"""The supervisor of a deployment's parts: each one's process is started, probed, and restarted when it dies.

Of several equal parts some work and others stand by for them (`Spares`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from pagestream_cli.errors import PartFailedError, PartOptionsError
from pagestream_cli.supervisor.part import (
    Death,
    Listener,
    PartOutput,
    PartSpec,
    PartState,
    PartView,
    Probe,
    RestartPolicy,
    RestartRecord,
    notify,
    pipe_reader,
)


class Supervisor:
    """Run parts until `stop`. The parts die with the supervisor's process, even where that is killed.

    Args:
        parts: what to run.
        listener: notified of each change.
        policy: delays of restarts.
        num_spares: how many of the parts with a `standby` wait as spares; the last ones at first.
    """

    def __init__(
        self,
        parts: Sequence[PartSpec],
        listener: Listener,
        policy: RestartPolicy | None = None,
        *,
        num_spares: int = 0,
    ) -> None:
        self._listener = listener
        self._spares = Spares(sum(spec.standby is not None for spec in parts) - num_spares)
        chosen = policy or RestartPolicy()
        self._runners = [self._runner(spec, chosen) for spec in parts]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Start all parts at once, keep them running, and after `stop` drain them stage by stage.

        Raises:
            PartFailedError: a part cannot be started; the others have been drained.
        """
        running = [asyncio.create_task(runner.run(), name=runner.spec.name) for runner in self._runners]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopping.cancel()
            self._kill()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def stop(self) -> None:
        """Drain the parts; a second call kills them."""
        if self._stop.is_set():
            self._kill()
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    async def wait_ready(self, name: str) -> None:
        """Wait until a part is ready. Without a limit: the caller sets one, or ends with `run`."""
        await next(runner for runner in self._runners if runner.spec.name == name).ready.wait()

    @property
    def views(self) -> list[PartView]:
        """The current state of all parts, in the given order."""
        return [runner.view for runner in self._runners]

    async def _drain(self) -> None:
        by_stage = sorted(self._runners, key=lambda runner: runner.spec.drain_stage)
        for _, stage in groupby(by_stage, key=lambda runner: runner.spec.drain_stage):
            await asyncio.gather(*(runner.drain() for runner in stage))

    def _kill(self) -> None:
        for runner in self._runners:
            runner.kill()

    def _runner(self, spec: PartSpec, policy: RestartPolicy) -> PartRunner:
        def on_change(runner: PartRunner, death: Death | None) -> None:
            if death is not None:
                notify(self._listener.died, runner.view, death, runner.last_delay_s)
            self._spares.note_change()
            notify(self._listener.changed, self.views)

        return PartRunner(
            spec,
            policy=spec.policy or policy,
            on_change=on_change,
            on_line=lambda text: self._listener.line(spec, text),
            spares=None if spec.standby is None else self._spares,
        )


PROBE_INTERVAL_S = 0.1
"""Seconds between two readiness probes; they add to the time to the first token."""
OUTPUT_LIMIT_S = 1.0
"""Seconds to wait for the rest of a dead process's output: its children may hold the pipe open."""
_log = logging.getLogger(__name__)
GUARD = Path(__file__).with_name("guard.py")
PROMOTION = b"join\n"
"""Line on a spare's standard input that ends its waiting."""


class PartRunner:
    """Own the processes of one part, one after the other.

    Args:
        spec: what to run.
        policy: delays of restarts.
        on_change: called after each change of state, with the death that caused it where it was unexpected.
        on_line: called with each line of output.
        spares: of the group that the part belongs to; None: it always works.
    """

    def __init__(
        self,
        spec: PartSpec,
        *,
        policy: RestartPolicy,
        on_change: Callable[[PartRunner, Death | None], None],
        on_line: Callable[[str], None],
        spares: Spares | None = None,
    ) -> None:
        self.spec = spec
        self.is_spare = False
        self._spares = spares
        self._on_change = on_change
        self._record = RestartRecord(policy)
        self._output = PartOutput(spec.log_path, on_line)
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._state = PartState.STARTING
        self._starts = 0
        self.ready = asyncio.Event()
        """Set while the part is ready."""
        self.last_delay_s = 0.0
        """Delay of the restart after its last death."""
        if spares is not None:
            spares.add(self)

    @property
    def view(self) -> PartView:
        """The current state of the part."""
        pid = self._process.pid if self._process is not None else None
        return PartView(self.spec, self._state, pid, max(self._starts - 1, 0), self.is_spare)

    @property
    def is_alive(self) -> bool:
        """Whether it has a process."""
        return self._process is not None

    @property
    def is_ready(self) -> bool:
        """Whether it works."""
        return self.ready.is_set()

    @property
    def is_waiting(self) -> bool:
        """Whether it has died and waits for its restart."""
        return self._state is PartState.WAITING

    async def run(self) -> None:
        """Start the part, and restart it whenever it dies, until `drain` or `kill`.

        Raises:
            PartFailedError: it cannot be started; PartOptionsError where its exit code says that its options are wrong.
        """
        with self._output:
            try:
                while await self._may_start():
                    await self._pause(self._after(await self._live_once()))
            finally:
                self._state = PartState.ENDED
        self._on_change(self, None)

    async def drain(self) -> None:
        """Send SIGTERM and wait for the end; kill the process after its limit. The part is not restarted."""
        self._ending.set()
        process = self._process
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.drain_limit_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def promote(self) -> None:
        """Have its process, which was started as a spare, take up work as soon as it can."""
        if self._process is not None and self._process.stdin is not None:
            self._state = PartState.STARTING
            self._process.stdin.write(PROMOTION)  # a pipe keeps it; where the process has died, that is noted as ever

    def kill(self) -> None:
        """Kill it. The part is not restarted."""
        self._ending.set()
        if self._process is not None:
            _kill_group(self._process.pid)

    async def _may_start(self) -> bool:
        """Wait for its turn. Returns whether it is to be started; False once it is to end."""
        if self._spares is not None:
            turn = asyncio.ensure_future(self._spares.wait_turn(self))
            ending = asyncio.ensure_future(self._ending.wait())
            await asyncio.wait([turn, ending], return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            ending.cancel()
        return not self._ending.is_set()

    async def _live_once(self) -> Death:
        started = time.monotonic()
        self._state = PartState.STARTING
        async with pipe_reader() as (reader, write_end):
            process = await self._start(write_end)
            os.close(write_end)
            output = asyncio.create_task(self._output.follow(reader))
            probing = asyncio.create_task(self._probe())
            for task in (output, probing):
                task.add_done_callback(lambda ended: self._check_task(ended, process))
            try:
                exit_code = await process.wait()
            finally:
                _kill_group(process.pid)  # with its children
                probing.cancel()
                await asyncio.wait([output, probing], timeout=OUTPUT_LIMIT_S)
                output.cancel()
                self._process = None
        was_ready = self.ready.is_set() or self._state is PartState.STANDBY
        self.ready.clear()
        return Death(time.monotonic() - started, was_ready, exit_code)

    def _check_task(self, ended: asyncio.Task[None], process: asyncio.subprocess.Process) -> None:
        """Kill the process where the task that reads or probes it failed: unread it would block on a full pipe,
        unprobed it would never be ready.
        """
        if ended.cancelled() or (error := ended.exception()) is None:
            return
        _log.error("the output or readiness of %s cannot be read; it is restarted", self.spec.name, exc_info=error)
        if process.returncode is None:
            _kill_group(process.pid)

    async def _start(self, output: int) -> asyncio.subprocess.Process:
        standby = self.spec.standby if self.is_spare else None
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid())),
            *self.spec.argv,
            *(standby.arguments if standby else ()),
            stdin=asyncio.subprocess.PIPE if standby else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **self.spec.env},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone
        )
        self._process, self._starts = process, self._starts + 1
        if self._ending.is_set():  # stopped while it was being started
            _kill_group(process.pid)
        self._on_change(self, None)
        return process

    def _after(self, death: Death) -> float:
        if self._ending.is_set():
            return 0.0
        was_spare = self.is_spare
        if self._spares is not None:
            self._spares.replace(self)
        self.last_delay_s = self._record.add(death)
        self._state = PartState.WAITING
        is_hopeless = self._record.hopeless and not was_spare  # without a spare the others work on
        self._on_change(self, None if is_hopeless else death)
        if is_hopeless:
            raise self._failure(death.exit_code)
        return self.last_delay_s

    def _failure(self, exit_code: int) -> PartFailedError:
        """Return the error of a part that cannot start: with its last words where they say what it refuses."""
        what, hint = f"{self.spec.name} cannot start (exit code {exit_code}):", f"its output is in {self.spec.log_path}"
        said = [line for line in self._output.tail if line.strip() and not line.startswith("{")]  # not its log
        if self._record.refused and said:
            return PartOptionsError(f"{what} {said[-1].strip()}", hint=hint)
        failure = PartOptionsError if self._record.refused else PartFailedError
        return failure("\n    ".join([what, *self._output.tail]), hint=hint)

    async def _probe(self) -> None:
        if self.is_spare and self.spec.standby is not None:
            await self._probe_standby(self.spec.standby.probe)
        probe = self.spec.probe
        while probe is not None and not await probe():  # noqa: ASYNC110 - no event crosses processes
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._state = PartState.READY
        self.ready.set()
        self._on_change(self, None)

    async def _probe_standby(self, probe: Probe) -> None:
        """Note when the spare waits; return once it is promoted."""
        while self.is_spare:
            if self._state is PartState.STARTING and await probe() and self.is_spare:
                self._state = PartState.STANDBY
                self._on_change(self, None)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ending.wait()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _kill_group(pid: int) -> None:
    """Kill a part's process group: its process and all children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Peer(Protocol):
    """A part that works or is a spare."""

    is_spare: bool
    """Whether it stands by, or will once it is started."""

    @property
    def is_alive(self) -> bool:
        """Whether it has a process."""

    @property
    def is_ready(self) -> bool:
        """Whether it works."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has died and waits for its restart."""

    def promote(self) -> None:
        """Have its process, which was started as a spare, take up work as soon as it can."""


class Spares:
    """Assign roles within a group of equal parts: always the same number work, the others are spares.

    A role is no property of a part: one that dies gives it to a spare, and comes back as a spare itself.

    Args:
        num_working: parts that work.
    """

    def __init__(self, num_working: int) -> None:
        self._num_working = num_working
        self._peers: list[Peer] = []
        self._changed = asyncio.Event()

    def add(self, peer: Peer) -> None:
        """Add a part, before any is started. The first `num_working` begin with work."""
        peer.is_spare = len(self._peers) >= self._num_working
        self._peers.append(peer)

    async def wait_turn(self, peer: Peer) -> None:
        """Wait before the start of a spare until those that work are ready, since they need the processor. Where one of
        them waits for its restart, this part works in its place.
        """
        while peer.is_spare:
            working = [each for each in self._peers if not each.is_spare]
            for other in working:
                if other.is_waiting:
                    other.is_spare, peer.is_spare = True, False
                    return
            if all(other.is_ready for other in working):
                return
            self._changed.clear()
            await self._changed.wait()

    def note_change(self) -> None:
        """Note that a part became ready or died."""
        self._changed.set()

    def replace(self, dead: Peer) -> None:
        """Promote a spare in place of a part that has died; where none has a process, the part keeps its role."""
        if dead.is_spare:
            return
        spare = next((each for each in self._peers if each.is_spare and each.is_alive), None)
        if spare is not None:
            dead.is_spare, spare.is_spare = True, False
            spare.promote()
