"""What an engine has done, and how long it took: a snapshot, and the counts that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from pagestream_engine.plan import ScheduledStep, StepResult


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters count from the engine's start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence references; some can still be found by the prefix cache."""
    num_cached_blocks: int
    """Free blocks that the prefix cache can still find."""
    num_claimable_blocks: int
    """Free blocks beyond what preempted sequences need again, and what admission keeps for the growth of others."""
    kv_utilization: float
    """Referenced blocks / all blocks, in [0, 1]."""
    kv_demand: float
    """(Referenced blocks + blocks that preempted sequences need again) / all blocks; above 1 the pool does not hold
    what was admitted."""
    prefix_query_tokens: int
    """Prompt tokens of new requests that were looked up in the prefix cache: not again after a preemption, nor of
    requests that another engine has begun, and once for all choices of a prompt."""
    prefix_hit_tokens: int
    """Tokens that were found there."""
    host_hit_tokens: int
    """Tokens whose blocks came from host memory, of new requests and of preempted ones."""
    num_host_pages: int
    """Pages of host memory, each for one block; 0 without `swap_space`."""
    num_used_host_pages: int
    """Those that hold a block which can be found."""
    saved_bytes: int
    """Copied from blocks to host memory."""
    loaded_bytes: int
    """Copied from host memory to blocks."""
    num_preemptions: int
    """Running sequences that lost their blocks for want of free ones; the beams of a search count once."""
    num_displaced: int
    """Running sequences that lost their places to others, by the policy; the beams of a search count once."""
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens computed, those of a recomputation included."""
    num_generated_tokens: int
    num_draft_tokens: int
    """Tokens that speculation has drafted and steps have checked."""
    accepted_by_position: tuple[int, ...]
    """Those of them that held, by their place among the drafts of a step: the first, the second, and so on."""
    last_step_sequences: int
    """Sequences that the last collected step computed."""
    last_step_prompt_tokens: int
    """Prompt tokens that it computed."""
    last_step_s: float
    """Seconds that the last step took."""
    last_schedule_s: float
    """Seconds of it that the scheduler took."""
    total_step_s: float
    total_schedule_s: float
    num_drafts: int = 0
    """Steps of a sequence that checked drafts."""
    num_late_masks: int = 0
    """Rows that got no token in a step, since the mask of their grammar was not there in time."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that held."""
        return sum(self.accepted_by_position)


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
