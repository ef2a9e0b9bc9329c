"""The thread that steps the engine, apart from the event loop that talks to Redis.

The engine is touched by this thread alone. Commands reach it through a queue between two steps; outputs leave it
through a callback, one call for each step.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.outputs import EngineStats, StepOutput
from pagestream_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # Upper limit of a wait for commands; a command ends it at once.


@dataclass(frozen=True)
class AddSequence:
    """Run a sequence, or go on with one that has output tokens already."""

    seq_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class AbortSequences:
    """Forget sequences; unknown ones are no error."""

    seq_ids: Sequence[str]


@dataclass(frozen=True)
class Stop:
    """End the thread after the current step."""


Command = AddSequence | AbortSequences | Stop


class EngineThread(threading.Thread):
    """Owns an engine and steps it while it has work.

    Args:
        engine: ready to run.
        on_outputs: called on this thread with each step's outputs.
        on_end: called on this thread when it ends, with the error if one ended it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._step_started: float | None = None

    def submit(self, command: Command) -> None:
        """Hand over a command; it is carried out before the next step."""
        self._commands.put(command)

    def stats(self) -> EngineStats:
        """Return a snapshot; may be one step old."""
        return self._engine.stats()

    def step_age_s(self) -> float:
        """Return the seconds since the current step began; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def run(self) -> None:
        """Step until told to stop."""
        error: BaseException | None = None
        try:
            while self._carry_out_commands():
                self._step()
        except Exception as failure:  # noqa: BLE001 - handed to the owner, who ends the process
            error = failure
        self._on_end(error)

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests():
            return
        self._step_started = time.monotonic()
        outputs = self._engine.step()
        self._step_started = None
        if outputs:
            self._on_outputs(outputs)

    def _carry_out_commands(self) -> bool:
        wait = not self._engine.has_unfinished_requests()
        try:
            while True:
                command = self._commands.get(block=wait, timeout=IDLE_WAIT_S)
                wait = False
                if isinstance(command, Stop):
                    return False
                self._carry_out(command)
        except queue.Empty:
            return True

    def _carry_out(self, command: AddSequence | AbortSequences) -> None:
        if isinstance(command, AbortSequences):
            for seq_id in command.seq_ids:
                self._engine.abort_request(seq_id)
            return
        try:
            self._engine.add_request(
                command.seq_id,
                command.prompt_token_ids,
                command.params,
                output_token_ids=command.output_token_ids,
            )
        except InvalidRequest as error:
            refused = StepOutput(command.seq_id, token_id=None, text="", finish_reason="error", error=str(error))
            self._on_outputs([refused])
