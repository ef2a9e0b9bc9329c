"""What an engine's steps have done, and how long they took."""

from __future__ import annotations

from time import perf_counter

from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.step.records import StepResult


class Stopwatch:
    """Adds up the seconds inside `with` blocks."""

    __slots__ = ("_entered", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._entered


class StepCounts:
    """Counts from the engine's start, and times of the last collected step, in seconds.

    A step is timed from `begin_step` to `end_step`; one that is begun and not ended counts for nothing.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_by_position: list[int] = []
        self.num_late_masks = 0
        self.last_step_sequences = 0
        self.last_step_prompt_tokens = 0
        self.last_step_s = 0.0
        self.last_schedule_s = 0.0
        self.total_step_s = 0.0
        self.total_schedule_s = 0.0
        self.scheduling = Stopwatch()
        """The scheduler's share of the step that was begun last."""
        self._started = 0.0

    def begin_step(self) -> None:
        """Start the clock."""
        self._started = perf_counter()
        self.scheduling.seconds = 0.0

    def note_result(self, result: StepResult) -> None:
        """Count what a step has drafted, what of it held, and the rows that sat the step out."""
        if not result.has_one_each:
            has_none = result.counts == 0
            self.num_late_masks += int(has_none.sum()) - int(has_none[list(result.errors)].sum())
        if result.num_drafts is None:
            return
        self.num_drafts += int((result.num_drafts > 0).sum())
        self.num_draft_tokens += int(result.num_drafts.sum())
        num_accepted = result.counts[result.num_drafts > 0] - 1
        most = int(result.num_drafts.max())
        self.accepted_by_position += [0] * (most - len(self.accepted_by_position))
        for position in range(most):
            self.accepted_by_position[position] += int((num_accepted > position).sum())

    def end_step(self, step: ScheduledStep, num_generated_tokens: int) -> None:
        """Stop the clock, and count a step that was collected.

        Args:
            step: what it has computed.
            num_generated_tokens: tokens that went out.
        """
        self.num_steps += 1
        self.last_step_sequences = len(step.decodes) + sum(1 + len(chunk.siblings) for chunk in step.prefills)
        self.last_step_prompt_tokens = sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        self.num_prompt_tokens += self.last_step_prompt_tokens
        self.num_generated_tokens += num_generated_tokens
        self.last_step_s = perf_counter() - self._started
        self.last_schedule_s = self.scheduling.seconds
        self.total_step_s += self.last_step_s
        self.total_schedule_s += self.last_schedule_s
