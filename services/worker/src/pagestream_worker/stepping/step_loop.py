"""The loop that executes commands and steps the engine, on a thread of the worker or in a process of its own.

Commands are executed between two steps. Each step is reported once, when it has run, and before it runs where its
requests or prompts change.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from math import inf

from pagestream_engine.engine import Engine
from pagestream_engine.errors import AdapterError, InvalidRequest, RequestFault, SleepFailed
from pagestream_engine.output import REPLAY_TOKENS
from pagestream_engine.plan import ScheduledStep
from pagestream_engine.request import Request, Sibling, StepOutput

from pagestream_worker.logs.token_columns import PlainSequences
from pagestream_worker.stepping.commands import (
    AbortSequences,
    AddGroup,
    FallAsleep,
    ReadBlocks,
    SetLimits,
    StepMarked,
    Stop,
    WakeUp,
)
from pagestream_worker.stepping.gpu import GpuMonitor, gpus_of
from pagestream_worker.stepping.profiler import StepProfiler
from pagestream_worker.stepping.reports import (
    Awoken,
    FellAsleep,
    Figures,
    OutputsEnded,
    Refused,
    Report,
    StepBegun,
    StepDone,
)
from pagestream_worker.stepping.scheduled_ids import decoding, prefill_remaining
from pagestream_worker.stepping.step_members import StepMembers, request_id_of

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # longest wait for a command, and between two heartbeats of an idle engine; a command ends it at once
FRAGMENTATION_PERIOD_S = 0.5  # between two readings of the fragmentation, which walks over all sequences
ADD_LIMIT_S = 0.005  # of replaying outputs before a step; 524,288 tokens with stop strings take 7 s in all
MARK_LIMIT_S = 0.25  # longest wait of a step for `StepMarked`

QueuedCommand = AddGroup | AbortSequences | SetLimits | ReadBlocks | FallAsleep | WakeUp | Stop
LoopCommand = QueuedCommand | StepMarked


class CommandQueue:
    """Commands on their way to the loop. `put` may be called on any thread, the rest is the loop's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        self._marks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, command: LoopCommand) -> None:
        """Queue a command. A `StepMarked` passes the others: the running step waits for it."""
        if isinstance(command, StepMarked):
            self._marks.put(command.number)
        else:
            self._commands.put(command)

    def get(self, timeout_s: float) -> QueuedCommand | None:
        """Return the next command; None where none comes within the time."""
        try:
            return self._commands.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_marked(self, number: int) -> None:
        """Wait for the `StepMarked` of a number, at most MARK_LIMIT_S."""
        until = time.monotonic() + MARK_LIMIT_S
        try:
            while self._marks.get(timeout=max(0.0, until - time.monotonic())) < number:
                pass
        except queue.Empty:
            logger.info("the requests of a step are not marked after %g s: it runs", MARK_LIMIT_S)


class StepLoop:
    """Steps one engine while it has work, on the thread that calls `run`.

    Args:
        engine: was created on the same thread.
        report: gets each report, on this thread.
        profiler: for profiles on demand; None: there are none.
        before_marked_step: called before a step that requests enter or leave, after their mark.
    """

    def __init__(
        self,
        engine: Engine,
        commands: CommandQueue,
        report: Callable[[Report], None],
        *,
        profiler: StepProfiler | None = None,
        before_marked_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._report = report
        self._profiler = profiler
        self._before_marked_step = before_marked_step
        self._adding: deque[tuple[AddGroup, Iterator[None]]] = deque()  # begun, with outputs that are being replayed
        self._members = StepMembers()
        self._plain = PlainSequences()
        self._unfinished: set[str] = set()  # ids of sequences
        self._waits_for_mark: set[str] = set()  # sequences of groups that asked for it
        self._gpu = GpuMonitor(gpus_of(engine.config))
        self._num_begun = self._num_commands = self._num_collected = 0
        self._is_changed = False
        self._fragmentation = self._fragmentation_due = 0.0

    def run(self) -> None:
        """Step until `Stop`. What the engine raises comes through."""
        self._engine.on_schedule = self._note_step
        self._gpu.start()
        try:
            while self._execute_commands():
                self._add_on()
                self._step()
        finally:
            self._gpu.stop()

    # -- steps --

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests():
            if self._is_changed:
                self._report_figures()
            return
        started = time.monotonic()
        outputs = self._run_step()
        duration_s = time.monotonic() - started
        tokens, others = self._plain.split(outputs)
        for output in others:
            if output.finish_reason is not None:
                self._forget(output.seq_id)
        self._is_changed = False
        figures = self._figures()
        stats = figures.stats
        came = stats.num_steps > self._num_collected
        self._num_collected = stats.num_steps
        num_sequences = stats.last_step_sequences if came else 0
        has_prompts = came and stats.last_step_prompt_tokens > 0
        self._report(StepDone(others, duration_s, num_sequences, has_prompts, figures, tokens))

    def _run_step(self) -> list[StepOutput]:
        profiler = self._profiler
        if profiler is None or not profiler.is_wanted:
            return self._engine.step()
        profiler.before_step()
        try:
            return self._engine.step()
        finally:
            profiler.after_step()

    def _note_step(self, step: ScheduledStep) -> None:
        remaining = prefill_remaining(step) if step.prefills else {}
        change = self._members.update(remaining, lambda: decoding(step), self._engine.num_requeues)
        if change is None and not remaining:
            return
        self._num_begun += 1
        entered = change.entered if change is not None else frozenset[str]()
        left = change.left_requests if change is not None else frozenset[str]()
        waits = not self._waits_for_mark.isdisjoint(entered)
        requests = frozenset(map(request_id_of, entered))
        self._report(StepBegun(self._num_begun, requests, left, remaining, waits, self._figures()))
        if waits:
            self._commands.wait_marked(self._num_begun)
        if change is not None:
            self._before_marked_step()

    def _forget(self, seq_id: str) -> None:
        self._unfinished.discard(seq_id)
        self._members.discard(seq_id)
        self._waits_for_mark.discard(seq_id)
        self._plain.discard(seq_id)

    # -- figures --

    def _report_figures(self) -> None:
        self._is_changed = False
        self._report(self._figures())

    def _figures(self) -> Figures:
        engine, now = self._engine, time.monotonic()
        is_busy = bool(self._adding) or engine.has_unfinished_requests()
        if now >= self._fragmentation_due or not is_busy:
            self._fragmentation_due = now + FRAGMENTATION_PERIOD_S
            self._fragmentation = engine.fragmentation()
        return Figures(engine.stats(), self._fragmentation, self._gpu.latest, self._num_commands, is_busy)

    # -- commands --

    def _execute_commands(self) -> bool:
        """Execute what is queued; return False for `Stop`. An idle engine waits for a command here."""
        is_idle = not (self._adding or self._engine.has_unfinished_requests())
        command = self._commands.get(IDLE_WAIT_S if is_idle else 0.0)
        if command is None and is_idle:
            self._is_changed = True  # a heartbeat
            self._engine.check_executor()
        while command is not None:
            if isinstance(command, Stop):
                return False
            self._execute(command)
            command = self._commands.get(0.0)
        return True

    def _execute(self, command: AddGroup | AbortSequences | SetLimits | ReadBlocks | FallAsleep | WakeUp) -> None:
        if isinstance(command, SetLimits):
            self._engine.set_limits(command.max_num_seqs, saves_blocks=command.saves_blocks)
            return
        if isinstance(command, ReadBlocks):
            self._report(self._engine.block_map())
            return
        if isinstance(command, FallAsleep):
            self._abort(set(self._unfinished))
            self._report(OutputsEnded())
            self._report(FellAsleep(self._fall_asleep()))
            return
        if isinstance(command, WakeUp):
            started = time.monotonic()
            error = self._wake_up()
            self._report(Awoken(error, time.monotonic() - started))
            return
        self._is_changed = True
        self._num_commands += 1
        if isinstance(command, AddGroup):
            self._begin_adding(command)
        else:
            self._abort(set(command.seq_ids))

    def _abort(self, seq_ids: set[str]) -> None:
        for seq_id in seq_ids:
            self._engine.abort_request(seq_id)
            self._forget(seq_id)
        # A group is claimed and aborted as a whole.
        self._adding = deque(each for each in self._adding if not seq_ids & _seq_ids(each[0]))

    def _fall_asleep(self) -> str:
        """Return why the engine can't go on; "" where it sleeps."""
        try:
            self._engine.sleep.begin()
        except (SleepFailed, InvalidRequest) as error:
            return str(error)
        return ""

    def _wake_up(self) -> str:
        """Return why the engine can't go on; "" where it is awake."""
        try:
            self._engine.sleep.end()
        except SleepFailed as error:
            return str(error)
        return ""

    def _begin_adding(self, command: AddGroup) -> None:
        self._unfinished |= _seq_ids(command)
        if command.waits_for_mark:
            self._waits_for_mark |= _seq_ids(command)
        if command.log:
            self._plain.add(command.siblings[0].seq_id, command.log)
        adding = self._adding_group(command)
        if sum(len(sibling.output_token_ids) for sibling in command.siblings) > REPLAY_TOKENS:
            self._adding.append((command, adding))
        else:
            self._add(command, adding, inf)

    def _adding_group(self, command: AddGroup) -> Iterator[None]:
        """Add a group in parts."""
        adapter, given = None, command.adapter
        if given is not None:
            adapter = self._engine.adapters.pinned(given.name, given.path, given.revision)
        request = Request(
            command.prompt_token_ids,
            command.siblings,
            priority=command.priority,
            aged_classes=command.aged_classes,
            tenant=command.tenant,
            weight=command.weight,
            cache_salt=command.cache_salt,
            adapter=adapter,
        )
        yield from self._engine.adding(request)

    def _add_on(self) -> None:
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
        except (InvalidRequest, AdapterError) as error:
            for seq_id in _seq_ids(command):
                self._forget(seq_id)
            self._report(Refused([_refused(sibling, error) for sibling in command.siblings]))
        return True


def _seq_ids(command: AddGroup) -> set[str]:
    return {sibling.seq_id for sibling in command.siblings}


def _refused(sibling: Sibling, error: InvalidRequest | AdapterError) -> StepOutput:
    reason = RequestFault(error) if isinstance(error, InvalidRequest) else str(error)
    return StepOutput(sibling.seq_id, token_id=None, text="", finish_reason="error", error=reason)
