"""The worker: claims requests while there is room, feeds the engine, and appends each step's tokens to their logs.

`Worker.run` starts two loops, `_claim` and `_append`; between them the engine's callbacks give outputs to the requests
(`ActiveRequests.take_outputs`) and write marks for the requests that enter or leave the running step. At its end it
finishes or hands back what runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, NamedTuple
from weakref import ref

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine.wire.worker import StepBegun, StepMarked, Stop, request_id_of
from pagestream_streams import Append, AppendKind, EngineSession, fault_points
from pagestream_streams.errors import Unavailable
from pagestream_streams.fault_points import FaultPoint
from pagestream_streams.protocol.records import LENGTHS_FIELD

from pagestream_worker.claim_budget import ClaimBudget
from pagestream_worker.engine_core import EngineCore, is_link_lost
from pagestream_worker.load_shedding import Degradation, DegradationSettings, HostShare, host_share
from pagestream_worker.logs.token_logs import TokenBatch, open_logs
from pagestream_worker.requests import ActiveRequests
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.telemetry import WorkerTelemetry, block_maps
from pagestream_worker.watchdog import Health, watchdog

logger = logging.getLogger(__name__)

_MOST_ENDED = 256  # requests that have ended among those that entered steps, before they are forgotten
_MOST_LENGTHS = 64  # medians of answers' lengths that are published: about 2 kB at each heartbeat
MARKS_LIMIT_S = 1.0  # wait for the marks under way, where the engine is dead
LINGER_S = 1.0  # wait for what engines of the same fingerprint, ending at the same time, hand back
POLL_S = 0.1  # between two looks at whether all requests are finished


class _Sent(NamedTuple):
    """The outcome of one part of an append."""

    to_hand_back: Sequence[str]
    """Requests that are this engine's in Redis and can't go on here."""
    is_answered: bool
    """Whether Redis answered for every request."""


class Worker:
    """Runs one engine on one model's queue until stopped.

    Args:
        core: has loaded its engine; the worker ends it.
        health: gets heartbeats of the event loop, and the begin and end of serving.
        telemetry: gets the phases of requests.
        degradation: of the ladder; None for its defaults.
        host: reads the share of the host's memory that is in use.
    """

    def __init__(
        self,
        core: EngineCore,
        settings: WorkerSettings,
        health: Health,
        telemetry: WorkerTelemetry,
        *,
        degradation: DegradationSettings | None = None,
        host: HostShare = host_share,
    ) -> None:
        facts = core.loaded.result(timeout=0)
        self._core = core
        self._block_size = facts.kv_layout.block_size
        self._interrupts = facts.interrupts
        self._settings = settings
        self._health = health
        self._telemetry = telemetry
        self._session: EngineSession
        self._budget = ClaimBudget(
            kv_layout=facts.kv_layout,
            max_num_seqs=facts.max_num_seqs,
            step_tokens=facts.max_num_batched_tokens,
        )
        self._pending = asyncio.Event()  # requests have entries that their logs lack
        self._requests = ActiveRequests(
            core.submit, self._budget, telemetry, self._pending.set, open_logs(settings.kept_log_bytes)
        )
        self.degradation = Degradation(
            degradation or DegradationSettings(),
            core=core,
            max_num_seqs=facts.max_num_seqs,
            budget=self._budget,
            requests=self._requests,
            kept_log_bytes=settings.kept_log_bytes,
            telemetry=telemetry,
            host=host,
        )
        self._claiming: asyncio.Task[None]
        self._is_paused = self._must_hand_back = False
        self._is_stopped = False  # beside cancellations: those get lost inside a Redis command at times
        self._in_step: set[str] = set()  # requests that entered steps and did not leave unfinished; ended ones too
        self._marking: set[asyncio.Task[None]] = set()
        self._writes_marks = True
        self._poison: set[asyncio.Task[None]] = set()

    async def run(
        self,
        session: EngineSession,
        stop: asyncio.Event,
        leave: asyncio.Event | None = None,
        keeps_weights: Callable[[], bool] = lambda: False,
    ) -> None:
        """Serve until `stop` or `leave` is set, then hand everything back.

        Args:
            leave: the process goes on with another model; what runs has settings.switch_finish_s to end.
            keeps_weights: once `leave` is set: whether the engine falls asleep in place of its end.

        Raises:
            EngineFailed: the engine ended by an error.
        """
        self._session = session
        self._requests.on_poison = self._note_poison
        self._listen()
        self._start_claiming()
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._append(), name="append"),
            asyncio.create_task(watchdog(self._health, self._name_suspects), name="watchdog"),
        ]
        leave = leave or asyncio.Event()
        engine = asyncio.create_task(self._requests.ended.wait(), name="engine")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        leaving = asyncio.create_task(leave.wait(), name="leave")
        watch = self.degradation.watch(session)
        watch.start()
        maps = block_maps(self._core, session, self._block_size)
        maps.start()
        self._health.serve(self._core.step_age_s)
        self._telemetry.ready()
        failures: list[asyncio.Task[Any]] = [engine, *tasks]
        try:
            ends = [stopping, leaving, self._claiming, *failures]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if leave.is_set() and not stop.is_set():
                self._health.change()
                await self._let_all_end([stopping, *failures])
            if stop.is_set() and self._settings.finish_timeout_s > 0:
                self._health.drain()
                await self._finish(failures)
        finally:
            if stop.is_set() or not leave.is_set():
                self._health.drain()
            for waiting in (stopping, leaving, engine):
                waiting.cancel()
            await watch.stop()
            await maps.stop()
            results = await self._stop([self._claiming, *tasks])
            await self._drain(keeps_weights=leave.is_set() and not stop.is_set() and keeps_weights())
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._requests.failure is not None:
            raise self._requests.failure

    async def _stop(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        """End the loops; where the engine is dead, the marks under way say who was in its step."""
        self._is_stopped = True
        self._pending.set()
        for task in tasks:
            task.cancel()
        self._writes_marks = False
        if self._requests.failure is not None and self._marking:
            await asyncio.wait(self._marking, timeout=MARKS_LIMIT_S)
        for mark in self._marking:
            mark.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    # -- for the session and the process --

    @property
    def num_requests(self) -> int:
        """Requests that are claimed and not complete."""
        return len(self._requests)

    @property
    def prefilling(self) -> Collection[str]:
        """Ids of the claimed sequences that have no token of this engine yet."""
        return self._budget.prefilling

    def drop(self, request_ids: Collection[str]) -> None:
        """Abort requests that are no longer this engine's: ended, cancelled, or reclaimed."""
        self._requests.drop(request_ids)

    def hand_all_back(self) -> None:
        """Hand back every request before the next claim: a suspect has to run alone on this engine."""
        self._must_hand_back = True
        self._budget.changed.set()

    def load(self) -> Mapping[str, str | int | float]:
        """Return what placement and operators read about this engine; it says nothing about ownership."""
        stats = self._core.figures.stats
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_utilization": round(stats.kv_utilization, 4),
            "free_blocks": stats.num_free_blocks,
            "preemptions": stats.num_preemptions,
            "displaced": stats.num_displaced,
            "loaded_bytes": stats.loaded_bytes,
            "degradation_rung": int(self.degradation.rung),
            LENGTHS_FIELD: json.dumps(self._requests.lengths.table(_MOST_LENGTHS), separators=(",", ":")),
        }

    # -- claims --

    def _start_claiming(self) -> None:
        """Start claiming, at first and after a pause."""
        self._is_paused = False
        self._claiming = asyncio.create_task(self._claim(), name="claim")

    async def _pause_claiming(self) -> None:
        """Stop after the claim that is under way.

        That claim is not cancelled: what it takes in Redis would be run by no engine until a heartbeat hands it back.
        """
        self._is_paused = True
        self._budget.changed.set()
        await self._claiming

    async def _claim(self) -> None:
        """Claim requests while the budget has room for them."""
        session, budget, requests = self._session, self._budget, self._requests
        while not (self._is_stopped or self._is_paused):
            if self._must_hand_back:
                await self._hand_all_back()
            max_requests, max_prompt_tokens = budget.available(self._core.figures.stats.num_claimable_blocks)
            has_room = max_requests > 0 and max_prompt_tokens > 0
            may_interrupt = self._interrupts and budget.may_interrupt()
            if not (has_room or may_interrupt):
                await self._wait_for_room()
                continue
            try:
                if fault_points.IS_ON:
                    fault_points.reach(FaultPoint.QUEUED)
                claims = []
                if has_room:
                    claims = await session.claim(max_requests=max_requests, max_prompt_tokens=max_prompt_tokens)
                if not claims and may_interrupt:
                    claims = await session.claim_first_class(max_requests=1)
                if claims and fault_points.IS_ON:
                    fault_points.reach(FaultPoint.CLAIMED)
                for claim in claims:
                    requests.start(claim)
                if not claims and has_room:
                    await session.wait_for_work(self._settings.idle_poll_s)
                elif not claims:
                    await self._wait_for_room()
            except Unavailable:
                await asyncio.sleep(self._settings.retry_delay_s)

    async def _wait_for_room(self) -> None:
        self._budget.changed.clear()
        try:
            async with asyncio.timeout(self._settings.idle_poll_s):
                await self._budget.changed.wait()
        except TimeoutError:
            pass

    async def _hand_all_back(self) -> None:
        self._must_hand_back = False
        request_ids = self._requests.ids()
        logger.warning("handing back %d requests, so that a suspect can run alone", len(request_ids))
        await self._hand_back(request_ids)
        self._requests.drop_handed_back(request_ids)

    async def _hand_back(self, request_ids: Sequence[str]) -> None:
        """Hand requests back to their queues. Where Redis is away, a heartbeat after the outage hands them back."""
        try:
            await self._session.hand_back(request_ids)
        except Unavailable as error:
            logger.warning("could not hand back %d requests: %s", len(request_ids), error)

    # -- what the engine reports --

    def _listen(self) -> None:
        """Connect the engine, before it gets its first command."""
        requests = self._requests
        self._core.listen(
            on_outputs=requests.take_outputs,
            on_begun=self._begin_step,
            on_step=self._telemetry.step,
            on_outputs_ended=lambda: requests.end_outputs(None),
        )
        self._core.ended.add_done_callback(partial(_end, asyncio.get_running_loop(), ref(requests)))

    def _begin_step(self, begun: StepBegun) -> None:
        """Note who is in the step that is about to run, and write the marks of those that enter or leave."""
        if begun.remaining:
            self._claim_during_prefill(begun.remaining)
        in_step = self._in_step
        in_step.difference_update(begun.left)
        in_step.update(begun.entered)
        if self._writes_marks and (begun.entered or begun.left):
            task = asyncio.create_task(self._write_marks(begun), name="mark")
            self._marking.add(task)
            task.add_done_callback(self._marking.discard)
        if len(in_step) > 2 * len(self._requests) + _MOST_ENDED:
            in_step.intersection_update(self._requests.ids())

    def _claim_during_prefill(self, remaining: Mapping[str, int]) -> None:
        """Have the next step's prompts claimed while the running step still computes its own.

        Not earlier before the step's expected end than an own partition's entries are reserved for this engine
        (`EngineSession.head_start_s`): an engine whose step ends sooner could compute them sooner. A step is expected
        to take as long as the last one with prompts.

        Args:
            remaining: prompt tokens that each sequence of the step needs after it.
        """
        expected_s = self._core.last_prefill_step_s
        if expected_s == inf:
            return
        delay_s = expected_s - self._session.head_start_s
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._budget.begin_prefills, remaining)
        else:
            self._budget.begin_prefills(remaining)

    async def _write_marks(self, begun: StepBegun) -> None:
        """Write the marks of a step; one with requests that were claimed before waits for them."""
        try:
            await self._session.mark(running=begun.entered, waiting=begun.left)
        except Unavailable as error:
            logger.info("could not mark the requests of the running step: %s", error)
        if begun.waits:
            self._core.submit(StepMarked(begun.number))

    async def _name_suspects(self) -> None:
        """Mark the requests that are new in the running step, which does not end: the likeliest cause.

        Where all have a token of this engine already, each is as likely, and is suspected after another death.
        """
        self._in_step.intersection_update(self._requests.ids())
        new = self._in_step & set(map(request_id_of, self._budget.prefilling))
        named = {"requests": sorted(self._in_step), "new": sorted(new)}
        logger.critical("the step that has stalled computed %d requests", len(self._in_step), extra=named)
        await self._session.mark(running=self._in_step - new, stalled=new)

    def _note_poison(self, spec: RequestSpec) -> None:
        async def note() -> None:
            try:
                await self._session.note_poison(spec)
            except Unavailable as error:
                logger.warning("%s: its equals are not refused: %s", spec.request_id, error)

        task = asyncio.create_task(note(), name="poison")
        self._poison.add(task)
        task.add_done_callback(self._poison.discard)

    # -- appends --

    async def _append(self) -> None:
        """Append pending entries, one round at a time; what Redis did not answer is tried again.

        What the engine makes while a round is under way goes out in the next: a slow Redis makes appends larger, not
        steps slower.
        """
        while not self._is_stopped:
            await self._pending.wait()
            self._pending.clear()
            if not await self._append_pending():
                await asyncio.sleep(self._settings.retry_delay_s)
                self._pending.set()

    async def _append_pending(self) -> bool:
        """Append what the logs lack, once. Returns whether Redis answered for all of it.

        First tokens, other entries and deferred outputs are three concurrent appends, since a script answers only when
        it has done all of its requests.
        """
        requests = self._requests
        pending = requests.pending(self._settings.append_limit)
        first = [each for each in pending.appends if each.first_index == 0]
        others = [each for each in pending.appends if each.first_index > 0]
        sending = [self._send(part) for part in (first, others) if part]
        if pending.logs.batches:
            sending.append(self._send_tokens(pending.logs.batches))
        if requests.deferred is not None:
            sending.append(self._send_deferred(pending.handles))
        requests.is_appending = True
        try:
            if len(sending) == 1:  # as most steps have it: without a task of its own
                results: list[_Sent | BaseException] = [await sending[0]]
            else:
                results = await asyncio.gather(*sending, return_exceptions=True)
        finally:
            requests.is_appending = False
        to_hand_back: list[str] = []
        is_answered = True
        for result in results:
            if isinstance(result, BaseException):
                raise result
            to_hand_back += result.to_hand_back
            is_answered = is_answered and result.is_answered
        if to_hand_back:
            await self._hand_back(to_hand_back)
        return is_answered

    async def _send(self, appends: Sequence[Append]) -> _Sent:
        try:
            outcomes = await self._session.append(appends)
        except Unavailable as error:
            logger.warning("append of %d requests postponed: %s", len(appends), error)
            self._telemetry.error("redis_unavailable")
            return _Sent((), is_answered=False)
        answered = [pair for pair in zip(appends, outcomes, strict=True) if pair[1].kind is not AppendKind.AWAY]
        if len(answered) < len(appends):
            logger.warning("append of %d requests postponed: their node is away", len(appends) - len(answered))
            self._telemetry.error("redis_unavailable")
        to_hand_back = [each.request_id for each, outcome in answered if self._requests.apply_outcome(each, outcome)]
        return _Sent(to_hand_back, is_answered=len(answered) == len(appends))

    async def _send_tokens(self, batches: Sequence[TokenBatch]) -> _Sent:
        try:
            outcomes = await self._session.append_tokens([batch.appends for batch in batches])
        except Unavailable as error:
            logger.warning("append of tokens to %d logs postponed: %s", sum(len(each.logs) for each in batches), error)
            self._telemetry.error("redis_unavailable")
            return _Sent((), is_answered=False)
        to_hand_back: list[str] = []
        for batch, found in zip(batches, outcomes, strict=True):
            if found is not None:
                to_hand_back += self._requests.apply_token_outcomes(batch, found)
                continue
            logger.warning("append of tokens to %d logs postponed: their node is away", len(batch.logs))
            self._telemetry.error("redis_unavailable")
        return _Sent(to_hand_back, is_answered=None not in outcomes)

    async def _send_deferred(self, being_sent: Collection[int]) -> _Sent:
        self._requests.take_deferred()
        pending = self._requests.pending(self._settings.append_limit, without=being_sent)
        sending = [self._send(pending.appends)] if pending.appends else []
        if pending.logs.batches:
            sending.append(self._send_tokens(pending.logs.batches))
        sent = await asyncio.gather(*sending)
        to_hand_back = [request_id for each in sent for request_id in each.to_hand_back]
        return _Sent(to_hand_back, is_answered=all(each.is_answered for each in sent))

    # -- the end --

    async def _let_all_end(self, ends: Collection[asyncio.Task[Any]]) -> None:
        """Claim no more, and let running requests end, for at most settings.switch_finish_s.

        Args:
            ends: tasks of what has to go on meanwhile, and of the process' end; it returns when one is done.
        """
        try:
            async with asyncio.timeout(self._settings.switch_finish_s):
                await self._pause_claiming()
                while self._requests and not any(each.done() for each in ends):
                    await asyncio.wait(ends, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            logger.info("switch_finish_s is over: %d requests are handed back", len(self._requests))

    async def _finish(self, failures: Collection[asyncio.Task[Any]]) -> None:
        """Finish the requests with tokens, for at most settings.finish_timeout_s.

        Only where all other engines have another fingerprint (a rollout to other numerics): they could not go on with
        these requests. Otherwise this returns at once.

        Args:
            failures: tasks of what has to go on meanwhile (appends, engine, watchdog); it ends when one is done.
        """
        try:
            async with asyncio.timeout(self._settings.finish_timeout_s):
                await self._pause_claiming()
                if await self._retried(self._session.retire):
                    await self._finish_own_fingerprint(failures)
        except TimeoutError:
            logger.warning("finish_timeout_s is over with %d requests left", len(self._requests))

    async def _finish_own_fingerprint(self, failures: Collection[asyncio.Task[Any]]) -> None:
        requests = self._requests
        without_tokens = requests.ids_without_tokens()
        logger.info(
            "all other engines have another fingerprint: finishing %d requests here",
            len(requests) - len(without_tokens),
        )
        # Dropped before they are handed back: the running step must not give them a token of this fingerprint.
        requests.drop_handed_back(without_tokens)
        await self._hand_back(without_tokens)
        loop = asyncio.get_running_loop()
        linger_until = loop.time() + LINGER_S
        self._start_claiming()
        while True:
            ended, _ = await asyncio.wait(
                [self._claiming, *failures], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ended:
                return
            if requests or loop.time() < linger_until:
                continue
            # A claim under way may have emptied the queue without its requests being here yet: wait for its answer.
            await self._pause_claiming()
            if not requests and not await self._retried(self._session.has_queued_with_same_fingerprint):
                return
            self._start_claiming()

    async def _retried(self, query: Callable[[], Awaitable[bool]]) -> bool:
        while True:
            try:
                return await query()
            except Unavailable as error:
                logger.warning("could not read the other engines' fingerprints: %s", error)
                await asyncio.sleep(self._settings.retry_delay_s)

    async def _drain(self, *, keeps_weights: bool) -> None:
        """End the engine, append the last tokens, and hand back what is unfinished, for at most
        settings.drain_timeout_s. Claims and appends have been stopped.

        Args:
            keeps_weights: whether the engine falls asleep in place of its end.
        """
        if keeps_weights:
            self._core.fall_asleep()
        else:
            self._core.submit(Stop())
        requests, failure = self._requests, self._requests.failure
        # Where a step failed, a request in it may be the cause. Otherwise none is, however this process ends now.
        is_death = failure is not None and not is_link_lost(failure.__cause__)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                if not is_death:
                    await self._session.mark(waiting=requests.ids())
                await requests.ended.wait()
                while requests.has_pending:
                    if not await self._append_pending():
                        await asyncio.sleep(self._settings.retry_delay_s)
                unfinished = requests.ids()
                await self._session.hand_back(unfinished, failed=is_death)
                self._telemetry.handed_back(unfinished)
                logger.info("handed back %d requests", len(unfinished))
        except (TimeoutError, Unavailable) as error:
            # Nothing is lost: the session hands back what it holds when it closes, or its lease lapses.
            logger.warning("ending before the last tokens of %d requests are in the log: %r", len(requests), error)


def _end(loop: asyncio.AbstractEventLoop, requests: ref[ActiveRequests], ended: Future[None]) -> None:
    """End a worker's outputs with its engine. An engine that has slept and woken has had workers that are gone.

    Not asyncio.wrap_future: in Python 3.11 an asyncio future refuses StopIteration, and the end would be lost.
    """
    living = requests()
    if living is not None:
        loop.call_soon_threadsafe(living.end_outputs, ended.exception())
