"""The worker: claims requests when there is room, feeds the engine, and appends each step's tokens to their logs.

Three tasks share the event loop: one claims, one appends, one watches the engine thread. Whatever step n+1 makes while
the append of step n is under way goes out together in the next: a slow Redis makes appends larger, not steps slower.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.outputs import StepOutput
from pagestream_engine.request.sibling import Sibling
from pagestream_streams import Append, AppendKind, AppendOutcome, Claim, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.claim_budget import Seats
from pagestream_worker.engine_thread import AbortSequences, AddGroup, EngineThread, Stop
from pagestream_worker.health import Health
from pagestream_worker.request import Choice, RunningRequest
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.step_set import StepChange
from pagestream_worker.telemetry import WorkerTelemetry, silent_worker_telemetry

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # the last of its kind waits so long for what others like it, ending at the same time, hand back
LOOK_S = 0.1  # between two looks at whether all is finished
EXIT_STALLED = 70  # EX_SOFTWARE: the engine made no progress.


def _request_id(seq_id: str) -> str:
    return seq_id.partition("/")[0]


def _ids(request: RunningRequest) -> dict[str, Any]:
    """Fields of a log record about a request."""
    trace = request.trace
    traced = {"trace_id": trace.trace_id, "span_id": trace.span_id} if trace else {}
    return {"request_id": request.request_id, **traced}


@dataclass(frozen=True)
class _Sent:
    """What came of sending appends."""

    torn: Sequence[str]
    """Requests that are this engine's and can't go on here."""
    is_taken: bool
    """Whether Redis answered for all of them."""


class EngineFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """The engine thread ended by an error of its own; the process must end, and its requests go on elsewhere."""


class Worker:
    """Runs one engine on one model's queue until told to stop.

    Args:
        thread: has loaded its engine; the worker ends it.
        settings: names and limits.
        health: is told of progress and of the end.
        telemetry: is told what happens to requests.
    """

    def __init__(
        self,
        thread: EngineThread,
        settings: WorkerSettings,
        health: Health | None = None,
        telemetry: WorkerTelemetry | None = None,
    ) -> None:
        engine = thread.loaded.result(timeout=0)
        self._settings = settings
        self._health = health or Health(settings.stall_timeout_s)
        self._telemetry = telemetry or silent_worker_telemetry()
        scheduler = engine.config.scheduler
        self._seats = Seats(
            block_size=engine.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            step_tokens=scheduler.max_num_batched_tokens,
        )
        self._requests: dict[str, RunningRequest] = {}
        self._is_ending = False
        self._is_retiring = False  # ends, and does not know yet whether anybody can go on
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._pending = asyncio.Event()
        self._untaken: Sequence[StepOutput] = ()  # of the last step, while its first tokens are being sent
        self._is_appending = False
        self._thread_ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = thread
        self._session: EngineSession | None = None
        self._is_wanted = False
        self._marks: set[asyncio.Task[None]] = set()
        thread.listen(
            on_outputs=self._post_outputs,
            on_end=self._post_end,
            on_change=self._post_change,
            on_step=self._telemetry.step,
            on_prefill=self._post_prefill,
        )

    # -- life --

    async def run(self, session: EngineSession, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then hand everything back. Raises EngineFailed if the engine ended by itself."""
        self._session = session
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._claim_forever(session), name="claim"),
            asyncio.create_task(self._append_forever(session), name="append"),
            asyncio.create_task(self._watch_engine(), name="watchdog"),
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        self._health.watch(self._thread.step_age_s)
        self._telemetry.ready()
        try:
            ends: list[asyncio.Future[Any]] = [stopping, self._thread_ended, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and self._settings.finish_timeout_s > 0:
                await self._finish(session, tasks)
        finally:
            self._health.end()
            stopping.cancel()
            results = await self._end(tasks)
            await self._drain(session)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if not stop.is_set() or (self._thread_ended.done() and self._thread_ended.exception() is not None):
            self._thread_ended.result()

    async def _finish(self, session: EngineSession, tasks: list[asyncio.Task[None]]) -> None:
        """Where nobody else computes as we do, go on with what has tokens, for a limited time; `tasks` are the loops,
        that which claims first."""
        self._health.end()
        try:
            async with asyncio.timeout(self._settings.finish_timeout_s):
                self._is_retiring = True
                self._room.set()
                await tasks[0]  # not cancelled: a claim that is on its way would belong to nobody for a while
                if await self._patiently(session.retire):
                    await self._finish_its_kind(session, tasks)
        except TimeoutError:
            logger.warning("the time to finish is over with %d requests left", len(self._requests))

    async def _patiently(self, ask: Callable[[], Awaitable[bool]]) -> bool:
        while True:
            try:
                return await ask()
            except Unavailable as error:
                logger.warning("Redis does not tell who else could go on: %s", error)
                await asyncio.sleep(self._settings.retry_delay_s)

    async def _finish_its_kind(self, session: EngineSession, tasks: list[asyncio.Task[None]]) -> None:
        others = [request_id for request_id, request in self._requests.items() if not request.num_output_tokens]
        logger.info("all others compute otherwise: finishes %d requests", len(self._requests) - len(others))
        self._telemetry.handed_back(others)
        self.drop(others)  # first: the running step must not give them a token that only we can go on from
        await self._hand_back(session, others)
        linger_until = self._loop.time() + LINGER_S
        ended: set[asyncio.Future[Any]] = set()
        while not ended:
            if self._is_retiring:
                self._is_retiring = False
                tasks[0] = asyncio.create_task(self._claim_forever(session), name="claim")
            ended, _ = await asyncio.wait(
                [self._thread_ended, *tasks], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ended or self._requests or self._loop.time() < linger_until:
                continue
            # A claim that is on its way has emptied the queue, and what it took is not here yet: its answer first.
            self._is_retiring = True
            self._room.set()
            await tasks[0]
            if not self._requests and not await self._patiently(session.has_queued_with_same_fingerprint):
                return

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        # A cancellation can get lost inside a Redis command, so the loops also look at a flag.
        self._is_ending = True
        self._pending.set()
        for task in (*tasks, *self._marks):
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, session: EngineSession) -> None:
        self._thread.submit(Stop())
        failed = self._thread_ended.done() and self._thread_ended.exception() is not None
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                if not failed:  # however this process ends now, it is no request's fault
                    await session.mark(waiting=list(self._requests))
                await asyncio.wait([self._thread_ended])
                while any(request.has_pending for request in self._requests.values()):
                    if not await self._append_pending(session):
                        await asyncio.sleep(self._settings.retry_delay_s)
                unfinished = list(self._requests)
                await session.hand_back(unfinished, failed=failed)
                self._telemetry.handed_back(unfinished)
                logger.info("handed back %d requests", len(unfinished))
        except (TimeoutError, Unavailable) as error:
            # Nothing is lost: the session hands back what it holds when it closes, or its lease lapses.
            unfinished = list(self._requests)
            logger.warning("ends before the last tokens of %d requests are in the log: %r", len(unfinished), error)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(self._settings.stall_timeout_s / 10)
            self._health.beat()
            age = self._thread.step_age_s()
            if age > self._settings.stall_timeout_s:
                logger.critical(
                    "a step has taken %.0f s without an end: exiting, so that its requests go on elsewhere", age
                )
                os._exit(EXIT_STALLED)

    # -- claiming --

    async def _claim_forever(self, session: EngineSession) -> None:
        while not (self._is_ending or self._is_retiring):
            if self._is_wanted:
                await self._hand_all_back(session)
            max_requests, max_prompt_tokens = self._seats.free(self._thread.stats().num_free_blocks)
            if max_requests < 1 or max_prompt_tokens < 1:
                await self._wait_for_room()
                continue
            try:
                reach(FaultPoint.QUEUED)
                claims = await session.claim(max_requests=max_requests, max_prompt_tokens=max_prompt_tokens)
                if claims:
                    reach(FaultPoint.CLAIMED)
                for claim in claims:
                    self._start(claim)
                if not claims:
                    await session.wait_for_work(self._settings.idle_poll_s)
            except Unavailable:
                await asyncio.sleep(self._settings.retry_delay_s)

    def want(self) -> None:
        """Have everything handed back: a request has to run alone, and this engine was chosen for it."""
        self._is_wanted = True
        self._room.set()

    async def _hand_all_back(self, session: EngineSession) -> None:
        self._is_wanted = False
        request_ids = list(self._requests)
        logger.warning("hands back %d requests, so that a suspected one can run alone", len(request_ids))
        await self._hand_back(session, request_ids)
        self._telemetry.handed_back(request_ids)
        self.drop(request_ids)

    async def _wait_for_room(self) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout(self._settings.idle_poll_s):
                await self._room.wait()
        except TimeoutError:
            pass

    def _start(self, claim: Claim) -> None:
        # It can come back before the answer that says it is lost was looked at.
        self.drop([claim.request_id])
        request = RunningRequest(claim)
        self._requests[request.request_id] = request
        self._telemetry.claimed(request)
        try:
            groups = list(request.open_groups())
        except InvalidRequest as error:
            self._refuse(request, "unsupported", str(error))
            return
        except Exception:
            # A request that no engine can read would end one engine after the other.
            logger.exception("failed: it could not be read", extra=_ids(request))
            self._refuse(request, "engine_error", "the engine could not read this request")
            return
        for choices in groups:
            self._submit(choices)
        request.end_if_complete()
        self._pending.set()
        logger.info(
            "claimed",
            extra=_ids(request)
            | {"attempt": claim.attempts, "next_index": claim.next_index, "isolated": claim.isolated},
        )

    def _refuse(self, request: RunningRequest, code: str, message: str) -> None:
        self._telemetry.failed(request.request_id, code)
        request.fail(code, message)
        self._pending.set()

    def _submit(self, choices: Sequence[Choice]) -> None:
        """Have the choices of one prompt run as a group."""
        prompt = list(choices[0].prompt.ids)
        self._seats.take(len(prompt), [(choice.seq_id, len(choice.output_token_ids)) for choice in choices])
        siblings = [Sibling(choice.seq_id, choice.params, choice.output_token_ids) for choice in choices]
        self._thread.submit(AddGroup(prompt, siblings))

    # -- outputs --

    def _post_outputs(self, outputs: Sequence[StepOutput]) -> None:
        self._loop.call_soon_threadsafe(self._take_outputs_or_end, outputs)

    def _post_prefill(self, lacking: Mapping[str, int]) -> None:
        """Have the next step's prompts claimed while this step runs, on the engine's thread.

        Not sooner before its expected end than others have to leave an own partition's requests to us: they could
        compute them before a step that begins later. What is expected is what the last such step took.
        """
        if self._session is not None and self._thread.last_prefill_step_s < inf:
            delay_s = max(0.0, self._thread.last_prefill_step_s - self._session.head_start_s)
            self._loop.call_soon_threadsafe(self._take_prefill_later, delay_s, lacking)

    def _take_prefill_later(self, delay_s: float, lacking: Mapping[str, int]) -> None:
        if delay_s > 0:
            self._loop.call_later(delay_s, self._take_prefill, lacking)
        else:
            self._take_prefill(lacking)

    def _take_prefill(self, lacking: Mapping[str, int]) -> None:
        self._seats.begin_step(lacking)
        self._room.set()

    def _post_end(self, error: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._take_end, error)

    def _take_end(self, error: BaseException | None) -> None:
        self._take_untaken()  # that may be what fails
        if self._thread_ended.done():
            return
        if error is None:
            self._thread_ended.set_result(None)
            return
        logger.critical("the engine failed", exc_info=error)
        self._telemetry.error("engine_failed")
        failure = EngineFailed(f"the engine ended by {error!r}")
        failure.__cause__ = error
        self._thread_ended.set_exception(failure)

    def _take_outputs_or_end(self, outputs: Sequence[StepOutput]) -> None:
        """Take a step's outputs. None may follow a step that was taken in part: logs would skip tokens."""
        if self._thread_ended.done():
            return
        try:
            self._take_outputs(self._first_tokens(outputs))
        except Exception as error:  # noqa: BLE001 - whatever it is, this process must not write on
            self._take_end(error)

    def _first_tokens(self, outputs: Sequence[StepOutput]) -> Sequence[StepOutput]:
        """The outputs to take now: where nothing is being sent, those of requests with first tokens alone, and the
        others once those are on their way (`_untaken`). Whole requests: the order of a log must not hang on it.
        """
        untaken, self._untaken = self._untaken, ()
        self._take_outputs(untaken)
        if self._is_appending or not self._seats.await_first_tokens:
            return outputs
        awaited = [output.request_id for output in outputs if self._seats.awaits_first_token(output.request_id)]
        begin = {_request_id(seq_id) for seq_id in awaited}
        if not begin:
            return outputs
        self._untaken = [output for output in outputs if _request_id(output.request_id) not in begin]
        return [output for output in outputs if _request_id(output.request_id) in begin]

    def _take_untaken(self) -> None:
        if self._untaken:
            self._take_outputs_or_end(())

    def _take_outputs(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            request_id, nonce, choice = output.request_id.split("/")
            request = self._requests.get(request_id)
            if request is None or request.claim.nonce != nonce:
                continue  # dropped while the step ran
            is_first = self._seats.made_token(output.request_id)
            request.add_output(int(choice), output)
            if is_first:
                self._room.set()
                self._telemetry.first_token(request, int(choice))
            if output.finish_reason is not None:
                self._telemetry.sequence_ended(request, int(choice))
                reach(FaultPoint.LAST_TOKEN)
                self._seats.give_up([output.request_id])
                self._room.set()
            if output.error is not None:
                logger.error("failed: %s", output.error, extra=_ids(request))
                self._telemetry.failed(request_id, "engine_error")
                self._abort(request)
        self._pending.set()

    # -- who is in the step --

    def _post_change(self, change: StepChange) -> Future[None] | None:
        """Have Redis told which requests come into the step, on the engine's thread. A future says: wait for that.

        A request that is claimed for the first time needs no wait: at worst it is suspected one death later.
        """
        entered = {_request_id(seq_id) for seq_id in change.entered}
        left = {_request_id(seq_id) for seq_id in change.left} - {_request_id(seq_id) for seq_id in change.members}
        told = asyncio.run_coroutine_threadsafe(self._mark(entered, left), self._loop)
        claimed_before = any(
            request.claim.attempts > 1 for request_id in entered if (request := self._requests.get(request_id))
        )
        return told if claimed_before else None

    async def _mark(self, running: Collection[str], waiting: Collection[str]) -> None:
        task = asyncio.current_task()
        if self._session is None or self._is_ending or task is None:
            return
        self._marks.add(task)
        try:
            await self._session.mark(running=running, waiting=waiting)
        except Unavailable as error:
            logger.info("Redis was not told who is in the step: %s", error)
        finally:
            self._marks.discard(task)

    # -- appending --

    async def _append_forever(self, session: EngineSession) -> None:
        while not self._is_ending:
            await self._pending.wait()
            self._pending.clear()
            if not await self._append_pending(session):
                await asyncio.sleep(self._settings.retry_delay_s)
                self._pending.set()

    async def _append_pending(self, session: EngineSession) -> bool:
        """Send what the logs don't have yet, once. Returns whether Redis took it.

        In parts beside each other, and whoever waits for a first token before the others: a script answers for all in
        it.
        """
        appends = self._pending_appends(())
        first = [each for each in appends if each.first_index == 0]
        rest = [each for each in appends if each.first_index > 0]
        sending = [self._send(session, part) for part in (first, rest) if part]
        if self._untaken:
            sending.append(self._send_untaken(session, {each.request_id for each in appends}))
        self._is_appending = True
        try:
            answers = await asyncio.gather(*sending, return_exceptions=True)
        finally:
            self._is_appending = False
        torn: list[str] = []
        is_taken = True
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            torn += answer.torn
            is_taken = is_taken and answer.is_taken
        if torn:
            await self._hand_back(session, torn)
        return is_taken

    def _pending_appends(self, being_sent: Collection[str]) -> list[Append]:
        limit = self._settings.append_limit
        waiting = [each for each in self._requests.values() if each.has_pending and each.request_id not in being_sent]
        return [request.pending(limit) for request in waiting]

    async def _send(self, session: EngineSession, appends: Sequence[Append]) -> _Sent:
        """Append and settle."""
        try:
            outcomes = await session.append(appends)
        except Unavailable as error:
            logger.warning("append of %d requests put off: %s", len(appends), error)
            self._telemetry.error("redis_unavailable")
            return _Sent((), is_taken=False)
        answered = [pair for pair in zip(appends, outcomes, strict=True) if pair[1].kind is not AppendKind.AWAY]
        if len(answered) < len(appends):
            logger.warning("append of %d requests put off: their node is away", len(appends) - len(answered))
            self._telemetry.error("redis_unavailable")
        torn = [each.request_id for each, outcome in answered if self._settle(each, outcome)]
        return _Sent(torn, is_taken=len(answered) == len(appends))

    async def _send_untaken(self, session: EngineSession, being_sent: Collection[str]) -> _Sent:
        self._take_untaken()
        appends = self._pending_appends(being_sent)
        return await self._send(session, appends) if appends else _Sent((), is_taken=True)

    async def _hand_back(self, session: EngineSession, request_ids: Sequence[str]) -> None:
        try:
            await session.hand_back(request_ids)
        except Unavailable as error:
            logger.warning("could not hand back %d requests: %s", len(request_ids), error)

    def _settle(self, append: Append, outcome: AppendOutcome) -> bool:
        """Take note of an outcome. Returns whether the request is still this engine's, but can't go on here."""
        request = self._requests.get(append.request_id)
        if request is None or request.claim.nonce != append.nonce:
            return False
        if outcome.kind is AppendKind.OK or (
            outcome.kind is AppendKind.GAP and request.can_send_from(outcome.next_index)
        ):
            request.acknowledge(outcome.next_index)
            if request.is_complete:
                del self._requests[append.request_id]
                self._telemetry.completed(request)
            elif request.has_pending:
                self._pending.set()
            return False
        logger.warning("the log refused an append: %s", outcome.kind.name, extra=_ids(request))
        if outcome.kind is AppendKind.ENDED:
            self._telemetry.cancelled(append.request_id)
        else:
            self._telemetry.lost(append.request_id, outcome.kind.name.lower())
        self.drop([append.request_id])
        return not outcome.lost

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget requests that are no longer this engine's: ended, cancelled, or taken over by another."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                logger.warning("dropped: no longer this engine's", extra=_ids(request))
                self._telemetry.dropped(request_id)
                self._abort(request)

    def _abort(self, request: RunningRequest) -> None:
        running = request.running_seq_ids()
        self._seats.give_up(running)
        self._room.set()
        self._thread.submit(AbortSequences(running))

    # -- what others see --

    def load(self) -> Mapping[str, str | int | float]:
        """Return what placement and people want to know; never the truth about ownership."""
        stats = self._thread.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_utilization": round(stats.kv_utilization, 4),
            "free_blocks": stats.num_free_blocks,
            "preemptions": stats.num_preemptions,
        }
