"""The executor's process from inside, without a process."""

from __future__ import annotations

import pickle
import threading
from typing import Any, cast

from pagestream_engine.executor.base import Runner
from pagestream_engine.executor.child import Failure, _Steps
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.plan_builder import PlanBuilder
from pagestream_engine.step.records import StepPlan
from support.engines.arithmetic_model import as_result
from support.engines.given_plans import LAYOUT

LIMIT_S = 30.0


class Pipe:
    """Gives its plans, then sets `ended`; collects the answers until there are `expected`."""

    def __init__(self, plans: list[StepPlan], expected: int) -> None:
        self.ended, self.complete = threading.Event(), threading.Event()
        self.answers: list[Any] = []
        self._plans = [pickle.dumps(plan) for plan in plans]
        self._expected = expected

    def recv_bytes(self) -> bytes:
        if not self._plans:
            self.ended.set()
            raise EOFError
        return self._plans.pop(0)

    def send_bytes(self, message: bytes) -> None:
        self.answers.append(pickle.loads(message))  # noqa: S301 - made in this test
        if len(self.answers) == self._expected:
            self.complete.set()


def test_nothing_is_launched_behind_a_step_that_could_not_be() -> None:
    builder = PlanBuilder(1, LAYOUT)
    plans = [builder.build(ScheduledStep()) for _ in range(3)]
    pipe = Pipe(plans, expected=2)
    launched: list[int] = []

    class SecondFails:
        def execute(self, plan: StepPlan) -> PendingResult:
            launched.append(plan.step_id)
            if plan.step_id == 1:
                raise MemoryError

            def result() -> Any:
                assert pipe.ended.wait(LIMIT_S)  # the first step runs until all plans have come
                return as_result(plan, [])

            return result

    _Steps(cast(Any, pipe), cast(Runner, SecondFails())).run()
    assert pipe.complete.wait(LIMIT_S)
    assert launched == [0, 1]
    first, second = pipe.answers
    assert first.step_id == 0
    assert isinstance(second, Failure)
    assert isinstance(second.error, MemoryError)
