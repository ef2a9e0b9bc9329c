"""The executor's process: receives plans, launches their steps, and sends results in order."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ExecutorError
from pagestream_engine.executor.base import DeviceRunner, Runner, RunnerFactory, load_runner
from pagestream_engine.executor.preparations import Preparation, Prepared, prepare
from pagestream_engine.plan import PendingResult, StepPlan, raising
from pagestream_engine.plugins import import_plugins


@dataclass(frozen=True, slots=True)
class Failure:
    """What the process sends in place of an answer."""

    error: BaseException
    step_id: int
    """Of the plan that failed; LOADING before the first."""


LOADING = -1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Pipe(Protocol):
    """An end of a pipe of pickled messages."""

    def recv_bytes(self) -> bytes:
        """Wait for the next message; raises EOFError where the other end has closed."""
        ...

    def send_bytes(self, message: bytes, /) -> None:
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
    if _send(connection, facts):
        _Steps(connection, runner).run()


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
            message = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from the process that began us
            if not isinstance(message, Preparation):
                plan: StepPlan = message
                return plan
            prepare(self._runner, message, self._send_prepared)

    def _send_prepared(self, prepared: Prepared) -> None:
        self._send(prepared)

    def _send(self, message: object) -> bool:
        with self._sending:
            return _send(self._connection, message)

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
                answer: object = pending()
            except BaseException as error:  # noqa: BLE001 - raised on the other side
                self._failed_run = run
                answer = _failure(error, step_id)
            if not self._send(answer):
                return


def _send(connection: Pipe, message: object) -> bool:
    """Send a message; return False where the other end has closed."""
    try:
        connection.send_bytes(pickle.dumps(message, protocol=5))
    except OSError:
        return False
    return True


def _failure(error: BaseException, step_id: int) -> Failure:
    """Return what raises `error` on the other side, or an ExecutorError that describes it where it can't be pickled."""
    error.add_note("in the executor's process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    except Exception:  # noqa: BLE001 - an error's own pickling may raise anything
        described = ExecutorError(f"{type(error).__name__}: {error}")
        described.add_note("\n".join(error.__notes__))
        return Failure(described, step_id)
    return Failure(error, step_id)
