"""The worker: claims requests while there is room, feeds the engine, and appends each step's tokens to their logs."""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import ref

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import EngineSession, Unavailable
from pagestream_streams.protocol.records import LENGTHS_FIELD

from pagestream_worker.health import Health, watchdog
from pagestream_worker.ladder.host_memory import host_share
from pagestream_worker.ladder.settings import DegradationSettings
from pagestream_worker.logs.opening import open_logs
from pagestream_worker.requests.claim_budget import ClaimBudget
from pagestream_worker.serving.active_requests import ActiveRequests
from pagestream_worker.serving.appending import AppendLoop
from pagestream_worker.serving.block_maps import block_maps
from pagestream_worker.serving.claiming import ClaimLoop, PrefillLookahead
from pagestream_worker.serving.degradation import Degradation, HostShare
from pagestream_worker.serving.outputs import StepOutputs
from pagestream_worker.serving.shutdown import Shutdown
from pagestream_worker.serving.step_marks import StepMarks
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.stepping.reports import StepBegun
from pagestream_worker.stepping.step_members import request_id_of
from pagestream_worker.telemetry import WorkerTelemetry

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
