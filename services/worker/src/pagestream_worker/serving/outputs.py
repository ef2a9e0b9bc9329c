"""The outputs of the engine's steps, taken on the event loop."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagestream_engine.request import StepOutput

from pagestream_worker.logs.token_columns import NO_TOKENS, TokenColumns
from pagestream_worker.requests.claim_budget import ClaimBudget
from pagestream_worker.serving.active_requests import ActiveRequests
from pagestream_worker.stepping.engine_core import is_link_lost
from pagestream_worker.stepping.step_members import request_id_of
from pagestream_worker.telemetry import WorkerTelemetry

logger = logging.getLogger(__name__)

_Outputs = tuple[Sequence[StepOutput], TokenColumns]
_NOTHING: _Outputs = ((), NO_TOKENS)


class EngineFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """The engine ended by an error; the process has to end, so that other engines go on with its requests."""


class StepOutputs:
    """Adds outputs to their requests, first tokens before others, until the engine ends.

    Where no append is under way, the outputs of requests with a first token are taken at once, and the others of the
    step are deferred until the append of those first tokens has been sent. Whole requests are deferred: the order of
    entries in a log must not depend on timing.

    Args:
        requests: get their outputs.
        budget: knows which sequences have no token yet.
        telemetry: counts an engine that failed.
    """

    def __init__(self, requests: ActiveRequests, budget: ClaimBudget, telemetry: WorkerTelemetry) -> None:
        self._requests = requests
        self._budget = budget
        self._telemetry = telemetry
        self._deferred = _NOTHING
        self._is_appending = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when no more outputs are taken; with EngineFailed where the engine or the taking of an output failed."""

    @property
    def has_failed(self) -> bool:
        """Whether the end was a failure."""
        return self.ended.done() and self.ended.exception() is not None

    @property
    def counts_as_death(self) -> bool:
        """Whether the end was a failure that a request of the running step may have caused."""
        failure = self.ended.exception() if self.ended.done() else None
        return failure is not None and not is_link_lost(failure.__cause__)

    @property
    def has_deferred(self) -> bool:
        """Whether outputs wait for `take_deferred`."""
        return self._deferred is not _NOTHING

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Defer nothing in this block: what it sends is chosen, and the next append takes all there is."""
        self._is_appending = True
        try:
            yield
        finally:
            self._is_appending = False

    def take(self, outputs: Sequence[StepOutput], tokens: TokenColumns = NO_TOKENS) -> None:
        """Take a step's plain tokens and outputs. After one that failed no more are taken: a log would skip tokens."""
        if self.ended.done():
            return
        try:
            deferred, self._deferred = self._deferred, _NOTHING
            if deferred is not _NOTHING:
                self._requests.add_outputs(*deferred)
            self._requests.add_outputs(*self._without_deferred(outputs, tokens))
        except Exception as error:  # noqa: BLE001 - whatever it is, this process must not write on
            self.end(error)

    def take_deferred(self) -> None:
        """Take the outputs that were deferred."""
        if self.has_deferred:
            self.take(())

    def end(self, error: BaseException | None) -> None:
        """Take what was deferred, then end, with the error of the engine's thread if it had one."""
        self.take_deferred()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
            return
        logger.critical("the engine failed", exc_info=error)
        self._telemetry.error("engine_failed")
        failure = EngineFailed(f"the engine ended by {error!r}")
        failure.__cause__ = error
        self.ended.set_exception(failure)

    def _without_deferred(self, outputs: Sequence[StepOutput], tokens: TokenColumns) -> _Outputs:
        """Return what to take now, and defer the rest. A plain token is no first one."""
        if self._is_appending or not self._budget.has_prefilling:
            return outputs, tokens
        begun = {request_id_of(each.seq_id) for each in outputs if self._budget.is_prefilling(each.seq_id)}
        if not begun:
            return outputs, tokens
        others = [output for output in outputs if request_id_of(output.seq_id) not in begun]
        if others or tokens.num_tokens:
            self._deferred = others, tokens
        return [output for output in outputs if request_id_of(output.seq_id) in begun], NO_TOKENS
