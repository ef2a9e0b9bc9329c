"""Steps in a process of their own, so that what the core does between them takes no time of theirs."""

from __future__ import annotations

import multiprocessing
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ExecutorDied, InvariantViolation, MessageError
from pagestream_engine.executor.base import RunnerFactory
from pagestream_engine.executor.child import bonding_parent, run_child
from pagestream_engine.plan import StepPlan, StepResult
from pagestream_engine.wire.executor import ANSWERS, PLANS, ExecutorFacts, Failure, Preparation, Prepared

_CLOSE_LIMIT_S = 5.0


class ProcessExecutor:
    """Starts a process by `spawn` that loads the runner, and exchanges frames with it over a pipe.

    A program that uses it must guard its entry point by `if __name__ == "__main__"`: the process imports that module.

    Args:
        make_runner: loads the model; it is pickled, so it is a function of a module.

    Raises:
        ExecutorDied: the process ended while it loaded.
        Exception: what loading raised.
    """

    def __init__(self, make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        # `spawn` pickles them with the target, over a pipe that this process alone writes: a child of its own runs what
        # it is told to anyway. All that follows, also from other machines, crosses by the codec.
        arguments = (far, make_runner, folder, config, bonding_parent(context))
        self._process = context.Process(target=run_child, args=arguments, name="pagestream-executor", daemon=True)
        self._process.start()
        far.close()
        self._in_flight: deque[int] = deque()
        self._early: deque[StepResult | Failure] = deque()
        """Answers that came while a preparation was waited for."""
        self._prepared: list[Prepared] = []
        try:
            facts = self._receive()
            if isinstance(facts, Failure):
                raise facts.error
            self.facts: ExecutorFacts = facts
        except BaseException:
            self.close()
            raise

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def submit(self, plan: StepPlan) -> None:
        message = PLANS.encode(plan)
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._died() from error
        except BaseException:
            # Interrupted, perhaps in the middle of a message: nothing that can be read may follow.
            self._connection.close()
            raise
        self._in_flight.append(plan.step_id)

    def collect(self) -> StepResult:
        try:
            answer = self._receive_answer(self._in_flight[0])
            if isinstance(answer, Failure):
                raise answer.error
        except BaseException:
            self._in_flight.clear()
            raise
        self._in_flight.popleft()
        return answer

    def prepare(self, wanted: Preparation) -> None:
        try:
            self._connection.send_bytes(PLANS.encode(wanted))
        except OSError as error:
            raise self._died() from error

    def prepared(self, timeout_s: float) -> list[Prepared]:
        while self._poll(0.0 if self._prepared else timeout_s):
            message = self._receive()
            if isinstance(message, Prepared):
                self._prepared.append(message)
            else:
                self._early.append(message)
        prepared, self._prepared = self._prepared, []
        return prepared

    def _poll(self, timeout_s: float) -> bool:
        try:
            return self._connection.poll(timeout_s)
        except OSError as error:
            raise self._died() from error

    def check_alive(self) -> None:
        if not self._process.is_alive():
            raise self._died()

    def close(self) -> None:
        """End the process: it gets the pipe's end, and is killed if that does not end it within 5 s."""
        self._in_flight.clear()
        self._connection.close()
        if self._process.pid is None:
            return
        self._process.join(_CLOSE_LIMIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _receive_answer(self, step_id: int) -> StepResult | Failure:
        """Wait for a step's answer; those of steps that an interrupted caller has dropped come before it."""
        while True:
            answer: StepResult | Failure | Prepared = self._early.popleft() if self._early else self._receive()
            if isinstance(answer, Prepared):
                self._prepared.append(answer)
                continue
            if answer.step_id == step_id:
                return answer
            if answer.step_id > step_id:
                raise InvariantViolation(f"the executor answered plan {answer.step_id}, expected plan {step_id}")

    def _receive(self) -> Any:
        """Wait for the process's next message, or for its death."""
        ready = wait([self._connection, self._process.sentinel])
        if self._connection not in ready:
            raise self._died()
        try:
            return ANSWERS.decode(self._connection.recv_bytes(ANSWERS.max_bytes))
        except MessageError as error:
            self._process.kill()
            raise self._died() from error
        except (EOFError, OSError) as error:
            raise self._died() from error
        except BaseException:
            # Interrupted, perhaps in the middle of a message: nothing after it can be read.
            self._connection.close()
            raise

    def _died(self) -> ExecutorDied:
        until = monotonic() + _CLOSE_LIMIT_S
        self._process.join(max(0.0, until - monotonic()))
        return ExecutorDied(self._process.exitcode)
