"""The thread that steps the engine, apart from the event loop that talks to Redis.

The engine is made and touched by this thread alone: OpenMP gives each thread that computes a team of its own, and two
teams on one machine's cores slow each other down (measured on two cores: 1,230 tokens a second against 1,050 where
another thread had loaded the model). Commands reach it through a queue between two steps; outputs leave it
through a callback, one call for each step.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf

from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.outputs import EngineStats, StepOutput
from pagestream_engine.request.sequence import Sibling
from pagestream_engine.scheduler.base import ScheduledStep
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.profiler import StepProfiler
from pagestream_worker.step_set import StepChange, StepSet

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # Upper limit of a wait for commands; a command ends it at once.
LOOK_PERIOD_S = 0.5  # Between two looks at what takes a walk over all sequences.
TOLD_LIMIT_S = 0.25  # Upper limit of a step's wait until somebody knows who is in it.


@dataclass(frozen=True)
class AddGroup:
    """Run the choices of one prompt, or go on with those that have output tokens already."""

    prompt_token_ids: Sequence[int]
    siblings: Sequence[Sibling]


@dataclass(frozen=True)
class AbortSequences:
    """Forget sequences; unknown ones are no error."""

    seq_ids: Sequence[str]


@dataclass(frozen=True)
class Stop:
    """End the thread after the current step."""


Command = AddGroup | AbortSequences | Stop


def _ignore(_: object) -> None:
    """Nobody listens yet."""


def _ignore_step(_duration_s: float, _sequences: int) -> None:
    """Nobody measures."""


def _ignore_change(_: StepChange) -> None:
    """Nobody wants to know who is in the step."""


def _ignore_prefill(_: Mapping[str, int]) -> None:
    """Nobody waits for room."""


class EngineThread(threading.Thread):
    """Makes an engine, and steps it while it has work.

    Args:
        make_engine: loads the model; `loaded` has its result or its error.
        profiler: for profiles on demand; None: there are none.
    """

    def __init__(self, make_engine: Callable[[], Engine], profiler: StepProfiler | None = None) -> None:
        super().__init__(name="engine", daemon=True)
        self.loaded: Future[Engine] = Future()
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_outputs: Callable[[Sequence[StepOutput]], None] = _ignore
        self._on_end: Callable[[BaseException | None], None] = _ignore
        self._on_change: Callable[[StepChange], Future[None] | None] = _ignore_change
        self._on_step: Callable[[float, int], None] = _ignore_step
        self._on_prefill: Callable[[Mapping[str, int]], None] = _ignore_prefill
        self._is_prefilling = False
        self._step_set = StepSet()
        self._step_started: float | None = None
        self._num_scheduled = 0
        self._profiler = profiler
        self._look_at = 0.0
        self.fragmentation = 0.0
        """As the engine tells it; at most LOOK_PERIOD_S old while there is work."""
        self.last_prefill_step_s = inf
        """Seconds that the last step took which computed prompt tokens; before the first one, longer than anything."""

    def listen(
        self,
        *,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        on_end: Callable[[BaseException | None], None],
        on_change: Callable[[StepChange], Future[None] | None] = _ignore_change,
        on_step: Callable[[float, int], None] = _ignore_step,
        on_prefill: Callable[[Mapping[str, int]], None] = _ignore_prefill,
    ) -> None:
        """Say, before the first command, who gets each step's outputs, who hears of the end and its error, who hears
        which sequences come into a step before it runs, who gets each step's seconds and number of sequences, and who
        hears, before a step computes prompt tokens, how many each of these sequences lacks after it.

        All are called on this thread. A step waits for the future that `on_change` returns, for a limited time.
        """
        self._on_outputs, self._on_end, self._on_change, self._on_step = on_outputs, on_end, on_change, on_step
        self._on_prefill = on_prefill

    def submit(self, command: Command) -> None:
        """Hand over a command; it is carried out before the next step."""
        self._commands.put(command)

    def stats(self) -> EngineStats:
        """Return a snapshot; may be one step old."""
        return self.loaded.result(timeout=0).stats()

    def step_age_s(self) -> float:
        """Return the seconds since the current step began; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def run(self) -> None:
        """Load, then step until told to stop."""
        try:
            engine = self._make_engine()
        except Exception as failure:  # noqa: BLE001 - handed to whoever waits for the engine
            self.loaded.set_exception(failure)
            return
        self.loaded.set_result(engine)
        engine.on_schedule = lambda step: self._note_step(step, engine.num_preemptions)
        error: BaseException | None = None
        try:
            while self._carry_out_commands(engine):
                self._step(engine)
                self._look(engine)
        except Exception as failure:  # noqa: BLE001 - handed to the owner, who ends the process
            error = failure
        self._on_end(error)

    def _step(self, engine: Engine) -> None:
        if not engine.has_unfinished_requests():
            return
        started = self._step_started = time.monotonic()
        self._is_prefilling = False
        outputs = self._profiled_step(engine) if self._is_profiling else engine.step()
        self._step_started = None
        duration = time.monotonic() - started
        if self._is_prefilling:
            self.last_prefill_step_s = duration
        self._on_step(duration, self._num_scheduled)
        for output in outputs:
            if output.finish_reason is not None:
                self._step_set.discard(output.request_id)
        if outputs:
            self._on_outputs(outputs)

    @property
    def _is_profiling(self) -> bool:
        return self._profiler is not None and self._profiler.is_wanted

    def _profiled_step(self, engine: Engine) -> list[StepOutput]:
        if self._profiler is None:
            return engine.step()
        self._profiler.before_step()
        try:
            return engine.step()
        finally:
            self._profiler.after_step()

    def _look(self, engine: Engine) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_PERIOD_S
            self.fragmentation = engine.fragmentation()

    def _note_step(self, step: ScheduledStep, num_preemptions: int) -> None:
        self._num_scheduled = len(step.decodes) + sum(1 + len(chunk.siblings) for chunk in step.prefills)
        self._is_prefilling = bool(step.prefills)
        if self._is_prefilling:
            self._on_prefill(_lacking(step))
        self._tell_change(self._step_set.update(step, num_preemptions))

    def _tell_change(self, change: StepChange | None) -> None:
        if change is None:
            return
        told = self._on_change(change)
        if told is not None:
            wait([told], TOLD_LIMIT_S)
        reach(FaultPoint.PREFILL)

    def _carry_out_commands(self, engine: Engine) -> bool:
        blocks = not engine.has_unfinished_requests()
        try:
            while True:
                command = self._commands.get(block=blocks, timeout=IDLE_WAIT_S)
                blocks = False
                if isinstance(command, Stop):
                    return False
                self._carry_out(engine, command)
        except queue.Empty:
            return True

    def _carry_out(self, engine: Engine, command: AddGroup | AbortSequences) -> None:
        if isinstance(command, AbortSequences):
            for seq_id in command.seq_ids:
                engine.abort_request(seq_id)
                self._step_set.discard(seq_id)
            return
        try:
            engine.add_group(command.prompt_token_ids, command.siblings)
        except InvalidRequest as error:
            self._on_outputs([_refused(sibling, error) for sibling in command.siblings])


def _lacking(step: ScheduledStep) -> dict[str, int]:
    """Tokens that each prefilling sequence has still to compute after the step."""
    lacking = {sibling.seq_id: 0 for chunk in step.prefills for sibling in chunk.siblings}
    for chunk in step.prefills:
        seq = chunk.seq
        lacking[seq.seq_id] = len(seq.token_ids) - seq.num_computed_tokens - chunk.num_new_tokens
    return lacking


def _refused(sibling: Sibling, error: InvalidRequest) -> StepOutput:
    return StepOutput(sibling.request_id, token_id=None, text="", finish_reason="error", error=str(error))
