"""The worker's side of an engine, wherever it runs: commands in, reports out."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Protocol

from pagestream_engine.errors import RankLost
from pagestream_engine.kv_cache.inspection import BlockMap
from pagestream_engine.request import StepOutput

from pagestream_worker.logs.token_columns import NO_TOKENS, TokenColumns
from pagestream_worker.stepping.commands import AbortSequences, AddGroup, Command, ReadBlocks
from pagestream_worker.stepping.reports import (
    EngineFacts,
    Figures,
    OutputsEnded,
    ProfileAnswer,
    Refused,
    Report,
    StepBegun,
    StepDone,
)

TakeOutputs = Callable[[Sequence[StepOutput], TokenColumns], None]
PROFILE_LIMIT_S = 5.0
"""Seconds to wait for the answer to a request for a profile."""


class EngineCoreError(RuntimeError):
    """The engine ended by an error, or its process was ended.

    Args:
        message: what happened.
        is_link_lost: whether it is because another machine of its group fell silent.
    """

    def __init__(self, message: str, *, is_link_lost: bool = False) -> None:
        self.is_link_lost = is_link_lost
        super().__init__(message)


def is_link_lost(error: BaseException | None) -> bool:
    """Return whether an engine ended because another machine of its group fell silent."""
    return isinstance(error, EngineCoreError | RankLost) and error.is_link_lost


class EngineCore(Protocol):
    """An engine that runs on a thread of this process (`EngineThread`) or in another process (`EngineProcess`).

    Every report is handled on the event loop, in the order in which it was made; the end comes after all others.
    """

    loaded: Future[EngineFacts]
    """The facts, or the error of the load."""
    ended: Future[None]
    """Done after the last callback; with the error that ended the engine."""

    def load(self) -> None:
        """Begin to load the model, where the start has not. To be called once."""

    def listen(
        self,
        *,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the callbacks, on the event loop that they are called on, before the first command.

        Args:
            on_outputs: gets a step's outputs, and before them, in time, its plain tokens.
            on_begun: gets a change of the running step, before that runs.
            on_step: gets a step's duration in seconds and its number of sequences.
            on_outputs_ended: called where no outputs follow, because of `fall_asleep`.
        """

    def submit(self, command: Command) -> None:
        """Send a command, which is executed before the next step. For the event loop alone."""

    def fall_asleep(self) -> None:
        """Let the engine abort all sequences, and free its memory but for weights in host memory."""

    def request_profile(self, steps: int) -> str:
        """Profile the next `steps` steps, and return the path of the trace. Not for the event loop: it waits.

        Raises:
            RuntimeError: there can be none now; the message says why.
        """

    def read_blocks(self) -> Future[BlockMap]:
        """Return the next map of the blocks, made between two steps. For the event loop alone.

        While a map is awaited, all who ask get the same. Its error is an `EngineCoreError` where the engine ends.
        """

    @property
    def figures(self) -> Figures:
        """The latest figures, at most one step or one idle second old."""

    @property
    def last_prefill_step_s(self) -> float:
        """Seconds that the last step with prompt tokens took; infinite before the first one."""

    def step_age_s(self) -> float:
        """Return the seconds since the engine last reported while it has work; 0 while it has none."""

    def close(self) -> None:
        """Give up what is left of the engine."""


class ReportReader:
    """Keeps what an engine's reports say, and passes them on to the callbacks. For the event loop, but for reading."""

    def __init__(self) -> None:
        self._on_outputs: TakeOutputs = lambda _outputs, _tokens: None
        self._on_begun: Callable[[StepBegun], None] = lambda _: None
        self._on_step: Callable[[float, int], None] = lambda _duration_s, _sequences: None
        self._on_outputs_ended: Callable[[], None] = lambda: None
        self._profiles: deque[Future[str]] = deque()
        self._blocks: Future[BlockMap] | None = None
        self._num_commands = 0
        self._waits_since: float | None = None  # on time.monotonic(), while the engine has work
        self.figures: Figures | None = None
        self.last_prefill_step_s = inf

    def listen(
        self,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None],
    ) -> None:
        """Set the callbacks."""
        self._on_outputs, self._on_begun, self._on_step = on_outputs, on_begun, on_step
        self._on_outputs_ended = on_outputs_ended

    def note_command(self, command: Command) -> None:
        """Note a command that is sent: from now on a report is expected."""
        if isinstance(command, AddGroup | AbortSequences):
            self._num_commands += 1
            if self._waits_since is None:
                self._waits_since = time.monotonic()

    def expect_profile(self) -> Future[str]:
        """Return a future for the next answer to `StartProfile`."""
        future: Future[str] = Future()
        self._profiles.append(future)
        return future

    def expect_blocks(self, submit: Callable[[Command], None]) -> Future[BlockMap]:
        """Return a future for the next map of the blocks; submit the command unless one is awaited already."""
        if self._blocks is None:
            self._blocks = Future()
            submit(ReadBlocks())
        return self._blocks

    def step_age_s(self) -> float:
        """See EngineCore. Any thread may call this."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def take(self, report: Report) -> None:
        """Take a report of a loaded engine."""
        match report:
            case StepDone():
                self._note(report.figures)
                if report.has_prompts:
                    self.last_prefill_step_s = report.duration_s
                if report.num_sequences:
                    self._on_step(report.duration_s, report.num_sequences)
                if report.outputs or report.tokens.num_tokens:
                    self._on_outputs(report.outputs, report.tokens)
            case StepBegun():
                self._note(report.figures)
                self._on_begun(report)
            case Figures():
                self._note(report)
            case Refused():
                self._on_outputs(report.outputs, NO_TOKENS)
            case ProfileAnswer():
                self._answer(report)
            case BlockMap():
                if self._blocks is not None:
                    self._blocks.set_result(report)
                    self._blocks = None
            case OutputsEnded():
                self._waits_since = None
                self._on_outputs_ended()

    def end(self) -> None:
        """Expect no further report."""
        self._waits_since = None
        while self._profiles:
            self._answer(ProfileAnswer(error="the engine has ended"))
        if self._blocks is not None:
            self._blocks.set_exception(EngineCoreError("the engine has ended"))
            self._blocks = None

    def _note(self, figures: Figures) -> None:
        self.figures = figures
        has_work = figures.is_busy or figures.num_commands < self._num_commands
        self._waits_since = time.monotonic() if has_work else None

    def _answer(self, answer: ProfileAnswer) -> None:
        if not self._profiles:
            return
        future = self._profiles.popleft()
        if answer.error:
            future.set_exception(RuntimeError(answer.error))
        else:
            future.set_result(answer.path)
