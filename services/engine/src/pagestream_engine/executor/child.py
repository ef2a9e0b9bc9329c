"""The executor's process: receives plans, launches their steps, and sends results in order."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from pagestream_engine.config import EngineConfig, import_plugins
from pagestream_engine.executor.base import DeviceRunner, Runner, RunnerFactory, load_runner
from pagestream_engine.executor.preparations import prepare
from pagestream_engine.plan import PendingResult, StepPlan, raising
from pagestream_engine.wire.executor import ANSWERS, LOADING, PLANS, Failure, Preparation, Prepared

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Pipe(Protocol):
    """An end of a pipe of frames."""

    def recv_bytes(self) -> bytes:
        """Wait for the next message; raises EOFError where the other end has closed."""
        ...

    def send_bytes(self, message: bytes | bytearray, /) -> None:
        """Send a message; raises OSError where the other end has closed."""
        ...


def bonding_parent(context: BaseContext) -> int | None:
    """Return the id of the process that a child of this thread should die with; None: the child is not bound.

    The kernel binds a child to the thread that starts it, and only the process' first thread is sure to live as long.
    A child that a server forks is the server's.
    """
    is_first = sys.platform != "linux" or threading.get_native_id() == os.getpid()
    return os.getpid() if is_first and context.get_start_method() == "spawn" else None


def die_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)), however that is and whatever this one does.

    Elsewhere than on Linux, and where the parent is None, the end of the connection alone says so: not to a process
    that is stopped.
    """
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the setting took effect
        os._exit(1)


def run_rank(
    connection: Connection, make_runner: RunnerFactory, folder: Path, config: EngineConfig, parent: int | None
) -> None:
    """Do `run_child` as the rank that `config.rank` names, whose process exits at once when the pipe from its parent
    ends."""
    run_child(_RankPipe(connection), make_runner, folder, config, parent)


def run_child(
    connection: Pipe, make_runner: RunnerFactory, folder: Path, config: EngineConfig, parent: int | None
) -> None:
    """Load a runner, send its facts, and run plans until the other end closes the pipe. Exits the process.

    `parent`: see die_with_parent.
    """
    try:
        die_with_parent(parent)
        _run(connection, make_runner, folder, config)
    except BaseException:  # noqa: BLE001 - written, as the interpreter would
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(code: int) -> None:
    """Exit without the interpreter's finalization.

    That ends the thread which waits for a step by unwinding its stack (pthread_exit), and C++ code that permits no
    unwinding then aborts the process: "terminate called without an active exception".
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(connection: Pipe, make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> None:
    # A terminal's interrupt is for the process that holds the requests: it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import_plugins(config.extensions.plugins)
        runner, facts = load_runner(make_runner, folder, config)
    except BaseException as error:  # noqa: BLE001 - raised on the other side
        _send(connection, _failure(error, LOADING))
        return
    if _send(connection, ANSWERS.encode(facts)):
        _Steps(connection, runner).run()


class _RankPipe:
    """The rank's end of its pipe, read by a thread of its own.

    A step waits for other ranks, which may be dead or stopped: so the end of the pipe is noticed within steps, too, and
    ends the process. The parent has died then, or has given the group up.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._receive, name="plans", daemon=True).start()

    def recv_bytes(self) -> bytes:
        """Wait for the next message."""
        return self._received.get()

    def send_bytes(self, message: bytes | bytearray) -> None:
        """Send a message; OSError where the other end has closed."""
        self._connection.send_bytes(message)

    def _receive(self) -> None:
        try:
            while True:
                self._received.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


class _Steps:
    """Launches steps on the main thread, while another waits for their results: a device always has its next step.

    After a failure, the steps of its run are dropped; a plan that resets begins a new run.
    """

    def __init__(self, connection: Pipe, runner: Runner) -> None:
        self._connection = connection
        self._runner = runner
        self._launched: SimpleQueue[tuple[int, int, PendingResult] | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._failed_launch = -1
        """Last run with a step that could not be launched: what follows must not be computed on what that one left."""
        self._failed_run = -1
        """Last run of which a failure was sent."""

    def run(self) -> None:
        """Run plans until the pipe ends."""
        sender = threading.Thread(target=self._send_results, name="results", daemon=True)
        sender.start()
        run = 0
        while True:
            try:
                plan = self._next_plan()
            except (EOFError, OSError):
                break
            run += plan.reset
            if run not in (self._failed_launch, self._failed_run):
                self._launched.put((run, plan.step_id, self._launch(run, plan)))
        self._launched.put(None)

    def _next_plan(self) -> StepPlan:
        """Wait for a plan; what is to be prepared beside the steps is begun before."""
        while True:
            message = PLANS.decode(self._connection.recv_bytes())
            if not isinstance(message, Preparation):
                plan: StepPlan = message
                return plan
            prepare(self._runner, message, self._send_prepared)

    def _send_prepared(self, prepared: Prepared) -> None:
        self._send(ANSWERS.encode(prepared))

    def _send(self, frame: bytearray) -> bool:
        with self._sending:
            return _send(self._connection, frame)

    def _launch(self, run: int, plan: StepPlan) -> PendingResult:
        try:
            return self._runner.execute(plan)
        except BaseException as error:  # noqa: BLE001 - raised on the other side, in its turn
            self._failed_launch = run
            return raising(error)

    def _send_results(self) -> None:
        if isinstance(self._runner, DeviceRunner):
            self._runner.select_device()
        while (launched := self._launched.get()) is not None:
            run, step_id, pending = launched
            if run == self._failed_run:
                continue
            try:
                answer = ANSWERS.encode(pending())
            except BaseException as error:  # noqa: BLE001 - raised on the other side
                self._failed_run = run
                answer = _failure(error, step_id)
            if not self._send(answer):
                return


def _send(connection: Pipe, frame: bytearray) -> bool:
    """Send a frame; return False where the other end has closed."""
    try:
        connection.send_bytes(frame)
    except OSError:
        return False
    return True


def _failure(error: BaseException, step_id: int) -> bytearray:
    """Return the frame of what raises `error` on the other side."""
    error.add_note("in the executor's process:\n" + "".join(traceback.format_exception(error)))
    return ANSWERS.encode(Failure.of(error, step_id))
