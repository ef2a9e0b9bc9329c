"""The appends of new entries to the token logs."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagestream_streams import Append, AppendKind, EngineSession
from pagestream_streams.errors import Unavailable

from pagestream_worker.logs.base import TokenBatch
from pagestream_worker.serving.active_requests import ActiveRequests, hand_back
from pagestream_worker.serving.outputs import StepOutputs
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.telemetry import WorkerTelemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sent:
    """The outcome of one part of an append."""

    to_hand_back: Sequence[str]
    """Requests that are this engine's in Redis and can't go on here."""
    is_answered: bool
    """Whether Redis answered for every request."""


class AppendLoop:
    """Appends pending entries, one round at a time.

    What the engine makes while a round is under way goes out in the next: a slow Redis makes appends larger, not steps
    slower.

    Args:
        requests: their pending entries are appended.
        outputs: its deferred outputs are taken once first tokens are on their way.
        settings: for the size of an append and the retry delay.
        telemetry: counts appends that Redis did not answer.
        pending: set when a request has got new entries.
    """

    def __init__(
        self,
        requests: ActiveRequests,
        outputs: StepOutputs,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry,
        pending: asyncio.Event,
    ) -> None:
        self._requests = requests
        self._outputs = outputs
        self._settings = settings
        self._telemetry = telemetry
        self._pending = pending
        self._is_stopped = False

    async def run(self, session: EngineSession) -> None:
        """Append until stopped; what Redis did not answer is tried again."""
        while not self._is_stopped:
            await self._pending.wait()
            self._pending.clear()
            if not await self.append_pending(session):
                await asyncio.sleep(self._settings.retry_delay_s)
                self._pending.set()

    def stop(self) -> None:
        """Stop after the round under way, even where a cancellation gets lost inside a Redis command."""
        self._is_stopped = True
        self._pending.set()

    async def append_pending(self, session: EngineSession) -> bool:
        """Append what the logs lack, once. Returns whether Redis answered for all of it.

        First tokens, other entries and deferred outputs are three concurrent appends, since a script answers only when
        it has done all of its requests.
        """
        pending = self._requests.pending(self._settings.append_limit)
        first = [each for each in pending.appends if each.first_index == 0]
        others = [each for each in pending.appends if each.first_index > 0]
        sending = [self._send(session, part) for part in (first, others) if part]
        if pending.logs.batches:
            sending.append(self._send_tokens(session, pending.logs.batches))
        if self._outputs.has_deferred:
            sending.append(self._send_deferred(session, pending.handles))
        with self._outputs.appending():
            results = await asyncio.gather(*sending, return_exceptions=True)
        to_hand_back: list[str] = []
        is_answered = True
        for result in results:
            if isinstance(result, BaseException):
                raise result
            to_hand_back += result.to_hand_back
            is_answered = is_answered and result.is_answered
        if to_hand_back:
            await hand_back(session, to_hand_back)
        return is_answered

    async def _send(self, session: EngineSession, appends: Sequence[Append]) -> _Sent:
        try:
            outcomes = await session.append(appends)
        except Unavailable as error:
            logger.warning("append of %d requests postponed: %s", len(appends), error)
            self._telemetry.error("redis_unavailable")
            return _Sent((), is_answered=False)
        answered = [pair for pair in zip(appends, outcomes, strict=True) if pair[1].kind is not AppendKind.AWAY]
        if len(answered) < len(appends):
            logger.warning("append of %d requests postponed: their node is away", len(appends) - len(answered))
            self._telemetry.error("redis_unavailable")
        to_hand_back = [each.request_id for each, outcome in answered if self._requests.settle(each, outcome)]
        return _Sent(to_hand_back, is_answered=len(answered) == len(appends))

    async def _send_tokens(self, session: EngineSession, batches: Sequence[TokenBatch]) -> _Sent:
        try:
            outcomes = await session.append_tokens([batch.appends for batch in batches])
        except Unavailable as error:
            logger.warning("append of tokens to %d logs postponed: %s", sum(len(each.logs) for each in batches), error)
            self._telemetry.error("redis_unavailable")
            return _Sent((), is_answered=False)
        to_hand_back: list[str] = []
        for batch, found in zip(batches, outcomes, strict=True):
            if found is not None:
                to_hand_back += self._requests.settle_tokens(batch, found)
                continue
            logger.warning("append of tokens to %d logs postponed: their node is away", len(batch.logs))
            self._telemetry.error("redis_unavailable")
        return _Sent(to_hand_back, is_answered=None not in outcomes)

    async def _send_deferred(self, session: EngineSession, being_sent: Collection[int]) -> _Sent:
        self._outputs.take_deferred()
        pending = self._requests.pending(self._settings.append_limit, without=being_sent)
        sending = [self._send(session, pending.appends)] if pending.appends else []
        if pending.logs.batches:
            sending.append(self._send_tokens(session, pending.logs.batches))
        sent = await asyncio.gather(*sending)
        to_hand_back = [request_id for each in sent for request_id in each.to_hand_back]
        return _Sent(to_hand_back, is_answered=all(each.is_answered for each in sent))
