"""When and how much an engine claims."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf

from pagestream_streams import EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.requests.claim_budget import ClaimBudget
from pagestream_worker.serving.active_requests import ActiveRequests, hand_back
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.stepping.engine_core import EngineCore

logger = logging.getLogger(__name__)


class ClaimLoop:
    """Claims requests while the budget has room for them.

    Args:
        requests: runs what was claimed.
        budget: says how much may be claimed.
        num_free_blocks: free KV blocks of the engine that a claimed request would get.
        interrupts: whether the engine makes room for class 0 by interrupting lower ones.
        settings: for the poll interval and the retry delay.
    """

    def __init__(
        self,
        requests: ActiveRequests,
        budget: ClaimBudget,
        num_free_blocks: Callable[[], int],
        settings: WorkerSettings,
        *,
        interrupts: bool = False,
    ) -> None:
        self._interrupts = interrupts
        self._requests = requests
        self._budget = budget
        self._num_free_blocks = num_free_blocks
        self._settings = settings
        self._is_paused = self._is_stopped = False
        self._must_hand_back = False
        self.task: asyncio.Task[None]
        """Claims; set by `start`, done after `pause`."""

    def start(self, session: EngineSession) -> None:
        """Start claiming, at first and after a pause."""
        self._is_paused = False
        self.task = asyncio.create_task(self._run(session), name="claim")

    async def pause(self) -> None:
        """Stop after the claim that is under way.

        That claim is not cancelled: what it takes in Redis would be run by no engine until a heartbeat hands it back.
        """
        self._is_paused = True
        self._budget.changed.set()
        await self.task

    def stop(self) -> None:
        """Stop at the next look, even where a cancellation of the task gets lost inside a Redis command."""
        self._is_stopped = True

    def hand_all_back(self) -> None:
        """Hand back every active request before the next claim: a suspect has to run alone on this engine."""
        self._must_hand_back = True
        self._budget.changed.set()

    async def _run(self, session: EngineSession) -> None:
        while not (self._is_stopped or self._is_paused):
            if self._must_hand_back:
                await self._hand_all_back(session)
            max_requests, max_prompt_tokens = self._budget.available(self._num_free_blocks())
            has_room = max_requests > 0 and max_prompt_tokens > 0
            may_interrupt = self._interrupts and self._budget.may_interrupt()
            if not (has_room or may_interrupt):
                await self._wait_for_room()
                continue
            try:
                reach(FaultPoint.QUEUED)
                claims = []
                if has_room:
                    claims = await session.claim(max_requests=max_requests, max_prompt_tokens=max_prompt_tokens)
                if not claims and may_interrupt:
                    claims = await session.claim_first_class(max_requests=1)
                if claims:
                    reach(FaultPoint.CLAIMED)
                for claim in claims:
                    self._requests.start(claim)
                if not claims and has_room:
                    await session.wait_for_work(self._settings.idle_poll_s)
                elif not claims:
                    await self._wait_for_room()
            except Unavailable:
                await asyncio.sleep(self._settings.retry_delay_s)

    async def _hand_all_back(self, session: EngineSession) -> None:
        self._must_hand_back = False
        request_ids = self._requests.ids()
        logger.warning("handing back %d requests, so that a suspect can run alone", len(request_ids))
        await hand_back(session, request_ids)
        self._requests.drop_handed_back(request_ids)

    async def _wait_for_room(self) -> None:
        self._budget.changed.clear()
        try:
            async with asyncio.timeout(self._settings.idle_poll_s):
                await self._budget.changed.wait()
        except TimeoutError:
            pass


class PrefillLookahead:
    """Has the next step's prompts claimed while the running step still computes its own.

    Not earlier before the step's expected end than an own partition's entries are reserved for this engine
    (`EngineSession.head_start_s`): an engine whose step ends sooner could compute them sooner. A step is expected to
    take as long as the last one with prompts.
    """

    def __init__(self, session: EngineSession, core: EngineCore, budget: ClaimBudget) -> None:
        self._session = session
        self._core = core
        self._budget = budget
        self._loop = asyncio.get_running_loop()

    def on_prefill(self, remaining: Mapping[str, int]) -> None:
        """Plan the release of the step's tokens in the budget, as the step begins.

        Args:
            remaining: prompt tokens that each sequence of the step needs after it.
        """
        expected_s = self._core.last_prefill_step_s
        if expected_s == inf:
            return
        delay_s = expected_s - self._session.head_start_s
        if delay_s > 0:
            self._loop.call_later(delay_s, self._budget.note_prefill_step, remaining)
        else:
            self._budget.note_prefill_step(remaining)
