"""Steps in flight: scheduled, sent to the executor, and collected in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pagestream_engine.errors import InvariantViolation, OutOfMemory
from pagestream_engine.executor.base import Executor
from pagestream_engine.plan import StepResult
from pagestream_engine.request import TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.step.plan_builder import PlanBuilder
from pagestream_engine.step.step_limit import StepLimit

_log = logging.getLogger(__name__)


class StepPipeline:
    """Keeps up to `1 + num_ahead` steps in flight.

    With one ahead, a step is scheduled while the one before it runs, from placeholders for the tokens that this one
    samples: the runner has them on its device. What raises in a step rolls back all steps in flight: the scheduler
    begins anew from what was collected, and the next plan resets the runner. After a step that ran out of memory,
    smaller ones are launched.

    One sequence with a prompt of 5 tokens and an end at 7, tokens a and b, when each step is sent
    (`Scheduler.update_after_schedule`) and when it is collected (`Scheduler.update_from_output`):

        after        token_ids   num_computed_tokens  num_in_flight_tokens  num_output_placeholders  len  computes
        added        prompt                        0                     0                        0    5
        1 sent       prompt                        0                     5                        1    6  the prompt
        2 sent       prompt                        0                     6                        2    7  a
        1 collected  prompt a                      5                     1                        1    7
        2 collected  prompt a b                    6                     0                        0    7

    `len` is what the sequence has when the steps in flight are collected. With step 2 sent that is the limit, so that
    no step 3 has the sequence. Were a its end token, b would be dropped.

    Args:
        num_ahead: 0 or 1.
    """

    def __init__(self, scheduler: Scheduler, plans: PlanBuilder, executor: Executor, num_ahead: int) -> None:
        self.executor = executor
        self.unfit: list[TokenSequence] = []
        """Those of one request that the step which ran out of memory last held alone: they must end."""
        self._limit = StepLimit()
        self._scheduler = scheduler
        self._plans = plans
        self._num_ahead = num_ahead
        self._in_flight: deque[tuple[int, ScheduledStep]] = deque()
        """With the number of each step's plan."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def launch_next(self, on_schedule: Callable[[ScheduledStep], None] | None) -> bool:
        """Schedule a step and give it to the executor. Return whether there was one.

        Args:
            on_schedule: gets the step before it is sent.
        """
        step = self._scheduler.schedule()
        try:
            for load in self._scheduler.residency.take_loads():
                self.executor.prepare(load)
        except BaseException:
            self.roll_back()
            raise
        if step.is_empty:
            return False
        self._limit.trim(step)
        if on_schedule is not None:
            on_schedule(step)
        plan = self._plans.build(step)
        self._scheduler.update_after_schedule(step)
        self._in_flight.append((plan.step_id, step))
        try:
            self.executor.submit(plan)
        except BaseException:
            self.roll_back()
            raise
        return True

    def should_collect(self, launched: bool) -> bool:
        """Whether to wait for the oldest step: as many are in flight as allowed, or nothing new was `launched`."""
        return len(self._in_flight) > self._num_ahead or not (launched or self.is_empty)

    def collect(self) -> tuple[ScheduledStep, StepResult]:
        """Wait for the oldest step in flight; `Scheduler.update_from_output` is due then.

        Raises:
            InvariantViolation: the runner answered another plan.
            OutOfMemory: the step needs more memory than there is; see `unfit`.
            Exception: what the step raised.
        """
        try:
            result = self.executor.collect()
            step_id, step = self._in_flight[0]
            if result.step_id != step_id:
                raise InvariantViolation(f"the runner answered plan {result.step_id}, expected plan {step_id}")
            _check_counts(step, result)
        except OutOfMemory:
            self.unfit = self._limit.shrink(self._in_flight[0][1])
            self.roll_back()
            raise
        except BaseException:
            self.roll_back()
            raise
        self._in_flight.popleft()
        return step, result

    def settle(self) -> None:
        """Collect steps whose sequences have all ended: what they raise is nobody's failure, and rolls them back."""
        while self._in_flight:
            try:
                step, result = self.collect()
            except Exception:  # noqa: BLE001 - no request waits for it, and the next step meets what lasts
                _log.exception("a step that nothing waited for failed")
            else:
                self._scheduler.update_from_output(step, result.tokens())

    def roll_back(self) -> None:
        """Forget the steps in flight."""
        self._in_flight.clear()
        self._plans.reset()
        self._scheduler.roll_back()


def _check_counts(step: ScheduledStep, result: StepResult) -> None:
    """Raise InvariantViolation where a result has other samples than its step, or more tokens than they may have."""
    num_first = sum(1 + len(chunk.siblings) for chunk in step.prefills if chunk.needs_sample)
    expected = num_first + len(step.decodes)
    if len(result.counts) != expected:
        raise InvariantViolation(f"the runner gave {len(result.counts)} samples for {expected} sequences")
    if result.has_one_each:
        return
    first = [(int(seq.params.structured_outputs is None), 1) for seq in step.sampled()[:num_first]]
    bounds = first + [(0, entry.num_scheduled_tokens) for entry in step.decodes]
    for place, (count, (least, most)) in enumerate(zip(result.counts.tolist(), bounds, strict=True)):
        if place not in result.errors and not least <= count <= most:
            raise InvariantViolation(f"the runner gave sample {place} {count} tokens, expected {least} to {most}")
