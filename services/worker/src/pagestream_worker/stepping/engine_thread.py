"""The thread that steps the engine, apart from the event loop that talks to Redis.

The engine is created and used by this thread alone: OpenMP gives each computing thread its own team of threads, and
two teams compete for the cores (measured on two cores: 1,230 tokens a second, and 1,050 where another thread had loaded
the model). Commands reach the thread through a queue, read between two steps; outputs leave it through a callback, one
call for each step.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf

from pagestream_engine.engine import REPLAY_TOKENS, Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.outputs import EngineStats, StepOutput
from pagestream_engine.request.sequence import Sibling
from pagestream_engine.scheduler.base import ScheduledStep
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.stepping.profiler import StepProfiler
from pagestream_worker.stepping.step_members import MembershipChange, StepMembers

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # longest wait for a command; a command ends it at once
FRAGMENTATION_PERIOD_S = 0.5  # between two readings of the fragmentation, which walks over all sequences
ADD_LIMIT_S = 0.005  # of replaying outputs before a step; 524,288 tokens with stop strings take 7 s in all
MARK_LIMIT_S = 0.25  # longest wait of a step for the future of `on_membership`


@dataclass(frozen=True)
class AddGroup:
    """Run the choices of one prompt, or go on with those that have output tokens already."""

    prompt_token_ids: Sequence[int]
    siblings: Sequence[Sibling]
    cache_salt: bytes = b""


@dataclass(frozen=True)
class AbortSequences:
    """Abort sequences; unknown ones are no error."""

    seq_ids: Sequence[str]


@dataclass(frozen=True)
class Stop:
    """End the thread after the current step."""


Command = AddGroup | AbortSequences | Stop


def _no_outputs(_: Sequence[StepOutput]) -> None: ...


def _no_step(_duration_s: float, _sequences: int) -> None: ...


def _no_membership(_: MembershipChange) -> None: ...


def _no_prefill(_: Mapping[str, int]) -> None: ...


class EngineThread(threading.Thread):
    """Creates an engine, and steps it while it has work.

    Args:
        make_engine: loads the model; `loaded` gets its result or its error.
        profiler: for profiles on demand; None: there are none.
    """

    def __init__(self, make_engine: Callable[[], Engine], profiler: StepProfiler | None = None) -> None:
        super().__init__(name="engine", daemon=True)
        self.loaded: Future[Engine] = Future()
        self.ended: Future[None] = Future()
        """Done after the last call of `on_outputs`; with the error that ended the thread."""
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_outputs: Callable[[Sequence[StepOutput]], None] = _no_outputs
        self._on_membership: Callable[[MembershipChange], Future[None] | None] = _no_membership
        self._on_step: Callable[[float, int], None] = _no_step
        self._on_prefill: Callable[[Mapping[str, int]], None] = _no_prefill
        self._is_prefilling = False
        self._adding: deque[tuple[AddGroup, Iterator[None]]] = deque()  # begun, with outputs that are being replayed
        self._members = StepMembers()
        self._step_started: float | None = None
        self._num_scheduled = 0
        self._profiler = profiler
        self._fragmentation_due = 0.0
        self.fragmentation = 0.0
        """The engine's; at most FRAGMENTATION_PERIOD_S old while there is work."""
        self.last_prefill_step_s = inf
        """Seconds that the last step with prompt tokens took; infinite before the first one."""

    def listen(
        self,
        *,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        on_membership: Callable[[MembershipChange], Future[None] | None] = _no_membership,
        on_step: Callable[[float, int], None] = _no_step,
        on_prefill: Callable[[Mapping[str, int]], None] = _no_prefill,
    ) -> None:
        """Set the callbacks, before the first command. All are called on this thread.

        Args:
            on_outputs: gets a step's outputs.
            on_membership: gets the sequences that enter or leave a step, before it runs. The step waits for the future
                that it returns, for at most MARK_LIMIT_S.
            on_step: gets a step's duration in seconds and its number of sequences.
            on_prefill: gets, before a step with prompt tokens runs, the tokens that each of its sequences needs after
                it.
        """
        self._on_outputs, self._on_membership = on_outputs, on_membership
        self._on_step, self._on_prefill = on_step, on_prefill

    def submit(self, command: Command) -> None:
        """Queue a command for execution before the next step."""
        self._commands.put(command)

    def stats(self) -> EngineStats:
        """Return a snapshot, at most one step old."""
        return self.loaded.result(timeout=0).stats()

    def step_age_s(self) -> float:
        """Return the seconds that the current step has run; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def run(self) -> None:
        """Load, then step until `Stop`."""
        try:
            engine = self._make_engine()
        except BaseException as error:  # noqa: BLE001 - raised by `loaded`
            self.loaded.set_exception(_as_exception(error))
            self.ended.set_exception(_as_exception(error))
            return
        self.loaded.set_result(engine)
        engine.on_schedule = lambda step: self._note_step(step, engine.num_preemptions)
        try:
            while self._execute_commands(engine):
                self._add_on(engine)
                self._step(engine)
                self._read_fragmentation(engine)
        except BaseException as error:  # noqa: BLE001 - raised by `ended`
            self.ended.set_exception(_as_exception(error))
        else:
            self.ended.set_result(None)

    def _step(self, engine: Engine) -> None:
        if not engine.has_unfinished_requests():
            return
        started = self._step_started = time.monotonic()
        self._is_prefilling = False
        outputs = self._run_step(engine)
        self._step_started = None
        duration = time.monotonic() - started
        if self._is_prefilling:
            self.last_prefill_step_s = duration
        self._on_step(duration, self._num_scheduled)
        for output in outputs:
            if output.finish_reason is not None:
                self._members.discard(output.request_id)
        if outputs:
            self._on_outputs(outputs)

    def _run_step(self, engine: Engine) -> list[StepOutput]:
        profiler = self._profiler
        if profiler is None or not profiler.is_wanted:
            return engine.step()
        profiler.before_step()
        try:
            return engine.step()
        finally:
            profiler.after_step()

    def _read_fragmentation(self, engine: Engine) -> None:
        now = time.monotonic()
        if now >= self._fragmentation_due:
            self._fragmentation_due = now + FRAGMENTATION_PERIOD_S
            self.fragmentation = engine.fragmentation()

    def _note_step(self, step: ScheduledStep, num_preemptions: int) -> None:
        self._num_scheduled = len(step.decodes) + sum(1 + len(chunk.siblings) for chunk in step.prefills)
        self._is_prefilling = bool(step.prefills)
        if self._is_prefilling:
            self._on_prefill(_remaining_after(step))
        change = self._members.update(step, num_preemptions)
        if change is not None:
            self._report_membership(change)

    def _report_membership(self, change: MembershipChange) -> None:
        marked = self._on_membership(change)
        if marked is not None:
            wait([marked], MARK_LIMIT_S)
        reach(FaultPoint.PREFILL)

    def _execute_commands(self, engine: Engine) -> bool:
        blocks = not (self._adding or engine.has_unfinished_requests())
        try:
            while True:
                command = self._commands.get(block=blocks, timeout=IDLE_WAIT_S)
                blocks = False
                if isinstance(command, Stop):
                    return False
                self._execute(engine, command)
        except queue.Empty:
            return True

    def _execute(self, engine: Engine, command: AddGroup | AbortSequences) -> None:
        if isinstance(command, AbortSequences):
            aborted = set(command.seq_ids)
            for seq_id in aborted:
                engine.abort_request(seq_id)
                self._members.discard(seq_id)
            # A group is claimed and aborted as a whole.
            self._adding = deque(each for each in self._adding if not aborted & _seq_ids(each[0]))
            return
        adding = engine.adding_group(command.prompt_token_ids, command.siblings, cache_salt=command.cache_salt)
        if sum(len(sibling.output_token_ids) for sibling in command.siblings) > REPLAY_TOKENS:
            self._adding.append((command, adding))
        else:
            self._add(command, adding, inf)

    def _add_on(self, engine: Engine) -> None:
        """Go on with the groups that are being added, for at most ADD_LIMIT_S before the next step."""
        until = time.monotonic() + ADD_LIMIT_S
        while self._adding and self._add(*self._adding[0], until):
            self._adding.popleft()

    def _add(self, command: AddGroup, adding: Iterator[None], until: float) -> bool:
        """Add a group until a time on time.monotonic(); return whether it is done, or refused."""
        try:
            for _ in adding:
                if time.monotonic() >= until:
                    return False
        except InvalidRequest as error:
            self._on_outputs([_refused(sibling, error) for sibling in command.siblings])
        return True


def _seq_ids(command: AddGroup) -> set[str]:
    return {sibling.request_id for sibling in command.siblings}


def _remaining_after(step: ScheduledStep) -> dict[str, int]:
    """Return the tokens that each prefilling sequence needs computed after the step."""
    remaining = {sibling.seq_id: 0 for chunk in step.prefills for sibling in chunk.siblings}
    for chunk in step.prefills:
        seq = chunk.seq
        remaining[seq.seq_id] = len(seq.token_ids) - seq.num_computed_tokens - chunk.num_new_tokens
    return remaining


def _refused(sibling: Sibling, error: InvalidRequest) -> StepOutput:
    return StepOutput(sibling.request_id, token_id=None, text="", finish_reason="error", error=str(error))


def _as_exception(error: BaseException) -> Exception:
    """Wrap what is no Exception, such as the panic of a library in Rust: it must end the worker, not pass it by."""
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"the engine's thread was ended by {type(error).__name__}: {error}")
    ended.__cause__ = error
    return ended
