"""How a worker ends on SIGTERM: it may finish what only it can go on with, appends its last tokens, hands back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from pagestream_streams import EngineSession
from pagestream_streams.errors import Unavailable

from pagestream_worker.serving.active_requests import ActiveRequests, hand_back
from pagestream_worker.serving.appending import AppendLoop
from pagestream_worker.serving.claiming import ClaimLoop
from pagestream_worker.serving.outputs import StepOutputs
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.stepping.commands import Stop
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.telemetry import WorkerTelemetry

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # wait for what engines of the same fingerprint, ending at the same time, hand back
POLL_S = 0.1  # between two looks at whether all requests are finished


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Ends the serving of a session, in two steps: `finish`, where settings allow it, then `drain`."""

    session: EngineSession
    requests: ActiveRequests
    claiming: ClaimLoop
    appending: AppendLoop
    outputs: StepOutputs
    core: EngineCore
    settings: WorkerSettings
    telemetry: WorkerTelemetry

    async def finish(self, failures: Collection[asyncio.Future[Any]]) -> None:
        """Finish the requests with tokens, for at most settings.finish_timeout_s.

        Only where all other engines have another fingerprint (a rollout to other numerics): they could not go on with
        these requests. Otherwise this returns at once.

        Args:
            failures: futures of what has to go on meanwhile (appends, engine, watchdog); it ends when one is done.
        """
        try:
            async with asyncio.timeout(self.settings.finish_timeout_s):
                await self.claiming.pause()
                if await self._retried(self.session.retire):
                    await self._finish_own_fingerprint(failures)
        except TimeoutError:
            logger.warning("finish_timeout_s is over with %d requests left", len(self.requests))

    async def settle(self, ends: Collection[asyncio.Future[Any]]) -> None:
        """Claim no more, and let running requests end, for at most settings.switch_finish_s.

        Args:
            ends: futures of what has to go on meanwhile, and of the process' end; it returns when one is done.
        """
        try:
            async with asyncio.timeout(self.settings.switch_finish_s):
                await self.claiming.pause()
                while self.requests and not any(each.done() for each in ends):
                    await asyncio.wait(ends, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            logger.info("switch_finish_s is over: %d requests are handed back", len(self.requests))

    async def drain(self, *, keeps_weights: bool = False) -> None:
        """End the engine, append the last tokens, and hand back what is unfinished, for at most
        settings.drain_timeout_s. Claims and appends have been stopped.

        Args:
            keeps_weights: whether the engine falls asleep in place of its end.
        """
        if keeps_weights:
            self.core.fall_asleep()
        else:
            self.core.submit(Stop())
        is_death = self.outputs.counts_as_death
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                if not is_death:  # however this process ends now, no request is the cause
                    await self.session.mark(waiting=self.requests.ids())
                await asyncio.wait([self.outputs.ended])
                while self.requests.has_pending:
                    if not await self.appending.append_pending(self.session):
                        await asyncio.sleep(self.settings.retry_delay_s)
                unfinished = self.requests.ids()
                await self.session.hand_back(unfinished, failed=is_death)
                self.telemetry.handed_back(unfinished)
                logger.info("handed back %d requests", len(unfinished))
        except (TimeoutError, Unavailable) as error:
            # Nothing is lost: the session hands back what it holds when it closes, or its lease lapses.
            logger.warning("ending before the last tokens of %d requests are in the log: %r", len(self.requests), error)

    async def _retried(self, query: Callable[[], Awaitable[bool]]) -> bool:
        while True:
            try:
                return await query()
            except Unavailable as error:
                logger.warning("could not read the other engines' fingerprints: %s", error)
                await asyncio.sleep(self.settings.retry_delay_s)

    async def _finish_own_fingerprint(self, failures: Collection[asyncio.Future[Any]]) -> None:
        without_tokens = self.requests.ids_without_tokens()
        logger.info(
            "all other engines have another fingerprint: finishing %d requests here",
            len(self.requests) - len(without_tokens),
        )
        # Dropped before they are handed back: the running step must not give them a token of this fingerprint.
        self.requests.drop_handed_back(without_tokens)
        await hand_back(self.session, without_tokens)
        loop = asyncio.get_running_loop()
        linger_until = loop.time() + LINGER_S
        self.claiming.start(self.session)
        while True:
            ended, _ = await asyncio.wait(
                [self.claiming.task, *failures], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ended:
                return
            if self.requests or loop.time() < linger_until:
                continue
            # A claim under way may have emptied the queue without its requests being here yet: wait for its answer.
            await self.claiming.pause()
            if not self.requests and not await self._retried(self.session.has_queued_with_same_fingerprint):
                return
            self.claiming.start(self.session)
