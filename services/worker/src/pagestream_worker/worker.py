"""The worker: claims requests while there is room, feeds the engine, and appends each step's tokens to their logs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any
from weakref import ref

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine.request import StepOutput
from pagestream_streams import Append, AppendKind, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.protocol.records import LENGTHS_FIELD

from pagestream_worker.claim_budget import ClaimBudget
from pagestream_worker.engine_core import EngineCore, is_link_lost
from pagestream_worker.load_shedding import Degradation, DegradationSettings, HostShare, host_share
from pagestream_worker.logs.token_logs import TokenBatch, open_logs
from pagestream_worker.messages import NO_TOKENS, StepBegun, StepMarked, Stop, TokenColumns, request_id_of
from pagestream_worker.requests import ActiveRequests, hand_back
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.telemetry import Health, WorkerTelemetry, block_maps, watchdog

logger = logging.getLogger(__name__)

_MOST_ENDED = 256  # requests that have ended among those that entered steps, before they are forgotten
_MOST_LENGTHS = 64  # medians of answers' lengths that are published: about 2 kB at each heartbeat


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
        self._settings = settings
        self._health = health
        self._telemetry = telemetry
        self._budget = ClaimBudget(
            kv_layout=facts.kv_layout,
            max_num_seqs=facts.max_num_seqs,
            step_tokens=facts.max_num_batched_tokens,
        )
        self._poison: set[asyncio.Task[None]] = set()
        pending = asyncio.Event()
        self._requests = ActiveRequests(
            core.submit, self._budget, telemetry, pending.set, open_logs(settings.kept_log_bytes)
        )
        self._outputs = StepOutputs(self._requests, self._budget, telemetry)
        self._claiming = ClaimLoop(
            self._requests,
            self._budget,
            lambda: core.figures.stats.num_claimable_blocks,
            settings,
            interrupts=facts.interrupts,
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
        self._appending = AppendLoop(self._requests, self._outputs, settings, telemetry, pending)

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
        marks = StepMarks(session, self._core.submit)
        self._requests.on_poison = partial(self._note_poison, session)
        self._listen(session, marks)
        self._claiming.start(session)
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._appending.run(session), name="append"),
            asyncio.create_task(watchdog(self._health, partial(self._name_suspects, session, marks)), name="watchdog"),
        ]
        leave = leave or asyncio.Event()
        stopping = asyncio.create_task(stop.wait(), name="stop")
        leaving = asyncio.create_task(leave.wait(), name="leave")
        watch = self.degradation.watch(session)
        watch.start()
        maps = block_maps(self._core, session, self._block_size)
        maps.start()
        self._health.serve(self._core.step_age_s)
        self._telemetry.ready()
        shutdown = Shutdown(
            session=session,
            requests=self._requests,
            claiming=self._claiming,
            appending=self._appending,
            outputs=self._outputs,
            core=self._core,
            settings=self._settings,
            telemetry=self._telemetry,
        )
        failures: list[asyncio.Future[Any]] = [self._outputs.ended, *tasks]
        try:
            ends = [stopping, leaving, self._claiming.task, *failures]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if leave.is_set() and not stop.is_set():
                self._health.change()
                await shutdown.settle([stopping, *failures])
            if stop.is_set() and self._settings.finish_timeout_s > 0:
                self._health.drain()
                await shutdown.finish(failures)
        finally:
            if stop.is_set() or not leave.is_set():
                self._health.drain()
            stopping.cancel()
            leaving.cancel()
            await watch.stop()
            await maps.stop()
            results = await self._stop([self._claiming.task, *tasks], marks)
            await shutdown.drain(keeps_weights=leave.is_set() and not stop.is_set() and keeps_weights())
        for result in results:
            if isinstance(result, Exception):
                raise result
        if not (stop.is_set() or leave.is_set()) or self._outputs.has_failed:
            self._outputs.ended.result()

    def _listen(self, session: EngineSession, marks: StepMarks) -> None:
        """Connect the engine, before it gets its first command."""
        loop = asyncio.get_running_loop()
        lookahead = PrefillLookahead(session, self._core, self._budget)

        def begin(begun: StepBegun) -> None:
            if begun.remaining:
                lookahead.on_prefill(begun.remaining)
            marks.on_begun(begun)
            if len(marks.members) > 2 * len(self._requests) + _MOST_ENDED:
                marks.forget_ended(self._requests.ids())

        self._core.listen(
            on_outputs=self._outputs.take,
            on_begun=begin,
            on_step=self._telemetry.step,
            on_outputs_ended=lambda: self._outputs.end(None),
        )
        self._core.ended.add_done_callback(partial(_end, loop, ref(self._outputs)))

    def _note_poison(self, session: EngineSession, spec: RequestSpec) -> None:
        async def note() -> None:
            try:
                await session.note_poison(spec)
            except Unavailable as error:
                logger.warning("%s: its equals are not refused: %s", spec.request_id, error)

        task = asyncio.create_task(note(), name="poison")
        self._poison.add(task)
        task.add_done_callback(self._poison.discard)

    async def _name_suspects(self, session: EngineSession, marks: StepMarks) -> None:
        """Mark the requests that are new in the running step, which does not end: the likeliest cause.

        Where all have a token of this engine already, each is as likely, and is suspected after another death.
        """
        marks.forget_ended(self._requests.ids())
        new = marks.members & set(map(request_id_of, self._budget.prefilling))
        named = {"requests": sorted(marks.members), "new": sorted(new)}
        logger.critical("the step that has stalled computed %d requests", len(marks.members), extra=named)
        await session.mark(running=marks.members - new, stalled=new)

    async def _stop(self, tasks: Sequence[asyncio.Task[None]], marks: StepMarks) -> list[BaseException | None]:
        # A cancellation can get lost inside a Redis command, so the loops have a flag as well.
        self._claiming.stop()
        self._appending.stop()
        for task in tasks:
            task.cancel()
        if self._outputs.has_failed:
            await marks.settle()
        else:
            marks.stop()
        return await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_requests(self) -> int:
        """Requests that are claimed and not complete."""
        return len(self._requests)

    @property
    def prefilling(self) -> Collection[str]:
        """Ids of the claimed sequences that have no token of this engine yet."""
        return self._budget.prefilling

    # -- for the session --

    def drop(self, request_ids: Collection[str]) -> None:
        """Abort requests that are no longer this engine's: ended, cancelled, or reclaimed."""
        self._requests.drop(request_ids)

    def hand_all_back(self) -> None:
        """Hand back every request, so that a suspect can run alone on this engine."""
        self._claiming.hand_all_back()

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


def _end(loop: asyncio.AbstractEventLoop, outputs: ref[StepOutputs], ended: Future[None]) -> None:
    """End a worker's outputs with its engine. An engine that has slept and woken has had workers that are gone.

    Not asyncio.wrap_future: in Python 3.11 an asyncio future refuses StopIteration, and the end would be lost.
    """
    living = outputs()
    if living is not None:
        loop.call_soon_threadsafe(living.end, ended.exception())


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


SETTLE_LIMIT_S = 1.0


class StepMarks:
    """Writes a mark for each request that enters or leaves the running step.

    Args:
        submit: hands a command to the engine: its step may wait for the mark.
    """

    def __init__(self, session: EngineSession, submit: Callable[[StepMarked], None]) -> None:
        self._session = session
        self._submit = submit
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._members: set[str] = set()

    @property
    def members(self) -> AbstractSet[str]:
        """Requests that have entered the running step and not left it unfinished; those that have ended included."""
        return self._members

    def on_begun(self, begun: StepBegun) -> None:
        """Write the marks of a step that is about to run."""
        self._members.difference_update(begun.left)
        self._members.update(begun.entered)
        if self._is_stopped or not (begun.entered or begun.left):
            return
        task = asyncio.create_task(self._mark(begun), name="mark")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget_ended(self, active: Collection[str]) -> None:
        """Keep those members alone that are active."""
        self._members.intersection_update(active)

    def stop(self) -> None:
        """Cancel the marks under way, and write no more."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def settle(self) -> None:
        """Write no more, but wait for the marks under way: the engine is dead, and they say who was in its step."""
        self._is_stopped = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_LIMIT_S)
        self.stop()

    async def _mark(self, begun: StepBegun) -> None:
        try:
            await self._session.mark(running=begun.entered, waiting=begun.left)
        except Unavailable as error:
            logger.info("could not mark the requests of the running step: %s", error)
        if begun.waits:
            self._submit(StepMarked(begun.number))


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
