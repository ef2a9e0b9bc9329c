"""What an engine process shows of itself: counters, histograms and spans (`WorkerTelemetry`), gauges read from the
engine's latest figures (`EngineGauges`), and the map of its KV blocks.

A request has one span for each phase and none for a token: queue (until this claim), prefill (until its first token
here), decode. All are children of the span that accepted the request, so that an engine that is killed leaves no broken
tree: its last phase is missing, and the next engine's phases follow with the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagestream.v1.records_pb2 import BlockHolders, RunningSequence
from pagestream.v1.records_pb2 import BlockMap as Record
from pagestream_engine.request import choice_id
from pagestream_engine.stats import BlockMap, EngineStats
from pagestream_engine.wire.worker import Figures, request_id_of
from pagestream_streams import EngineSession
from pagestream_streams.tasks import Periodic, within
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.process import Telemetry, process_age_s
from pagestream_telemetry.tracing import NO_TRACE, Span, SpanKind, TraceContext

from pagestream_worker.engine_core import EngineCore, EngineCoreError
from pagestream_worker.load_shedding import Rung, Shares
from pagestream_worker.watchdog import Health

if TYPE_CHECKING:
    from pagestream_worker.requests import RunningRequest

logger = logging.getLogger(__name__)

SERVICE = "pagestream-engine"


@dataclass
class _Phases:
    """The span of a request's current phase, and what its next spans and its end need."""

    span: Span | None = None
    """None where nothing is traced."""
    context: TraceContext = NO_TRACE
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    first_token_at: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By choice: seconds of `time.perf_counter`, and the number of tokens with that first one."""


class WorkerTelemetry:
    """Records what happens to requests. `step` is called on the engine's thread, the rest on the event loop.

    Args:
        engine_id: as in leases, for spans.
        began_s: age of the process when the loading of the model began, in seconds.
    """

    def __init__(self, telemetry: Telemetry, model: str, engine_id: str, *, began_s: float = 0.0) -> None:
        registry = telemetry.registry
        self._tracer = telemetry.tracer
        self._model = model
        self._engine_id = engine_id
        self._phases: dict[str, _Phases] = {}
        self._step_duration = registry.distribution(catalog.STEP_DURATION).series(model)
        self._batch_size = registry.distribution(catalog.BATCH_SIZE).series(model)
        self._queue_wait = registry.distribution(catalog.QUEUE_WAIT).series(model)
        self._per_token = registry.distribution(catalog.ENGINE_TIME_PER_OUTPUT_TOKEN).series(model)
        self._startup = registry.number(catalog.STARTUP_DURATION).series(model)
        self._startup_parts = registry.number(catalog.STARTUP_PART_DURATION)
        self._began_s = self._loaded_s = began_s
        self._stood_by_s = 0.0
        self._resumes = registry.number(catalog.RESUMES).series(model)
        self._cancellations = registry.number(catalog.CANCELLATIONS).series(model)
        self._errors = registry.number(catalog.ERRORS)
        self._transitions = registry.number(catalog.DEGRADATION_TRANSITIONS)

    def loaded(self, age_s: float, load_s: Mapping[str, float], *, stood_by_s: float = 0.0) -> None:
        """Record the startup's parts so far.

        Args:
            age_s: of the process, when its engine was loaded, less what it had stood by until then.
            load_s: seconds by part of the load.
            stood_by_s: of the process as a standby, which are no part of its startup.
        """
        self._loaded_s, self._stood_by_s = age_s, stood_by_s
        parts = {"process": max(0.0, age_s - self._began_s - sum(load_s.values())), **load_s}
        for part, seconds in parts.items():
            self._startup_parts.series(self._model, part).set(seconds)
        logger.info("loaded", extra={"model": self._model, **{f"{part}_s": round(parts[part], 3) for part in parts}})

    def ready(self) -> None:
        """Record the startup's duration: the engine claims from now on."""
        age_s = process_age_s() - self._stood_by_s
        self._startup_parts.series(self._model, "join").set(age_s - self._loaded_s)
        self._startup.set(age_s - self._began_s)

    def step(self, duration_s: float, sequences: int) -> None:
        """Record a step."""
        self._step_duration.record(duration_s)
        self._batch_size.record(sequences)

    def error(self, error_type: str) -> None:
        """Count an error that belongs to no single request."""
        self._errors.series(self._model, error_type).add()

    def moved(self, rung: str, direction: str) -> None:
        """Count a rung of the ladder that was climbed ("up"), or left again ("down")."""
        self._transitions.series(self._model, rung, direction).add()

    # -- a request's phases --

    def claimed(self, request: RunningRequest) -> None:
        """Write the queue span and start the prefill span."""
        claim = request.claim
        if claim.attempts > 1:
            self._resumes.add()
        else:
            self._queue_wait.record(claim.waited_s)
        phases = self._phases[request.request_id] = _Phases()
        if self._tracer is None:
            return
        phases.context = request.trace
        phases.attributes = {
            "gen_ai.request.model": self._model,
            "pagestream.request.id": request.request_id,
            "pagestream.engine.id": self._engine_id,
            "pagestream.epoch": claim.epoch,
            "pagestream.attempt": claim.attempts,
            "pagestream.next_index": claim.next_index,
        }
        context, attributes, now = phases.context, phases.attributes, time.time()
        queue = self._tracer.start(
            "queue", context, kind=SpanKind.CONSUMER, attributes=attributes, at_s=now - claim.waited_s
        )
        queue.end(now)
        phases.span = self._tracer.start("prefill", context, attributes=attributes, at_s=now)

    def first_token(self, request: RunningRequest, choice: int) -> None:
        """Note a sequence's first token here; the first one of the request ends its prefill span."""
        phases = self._phases.get(request.request_id)
        if phases is None:
            return
        if self._tracer is not None and phases.span is not None and not phases.first_token_at:
            phases.span.end()
            phases.span = self._tracer.start("decode", phases.context, attributes=phases.attributes)
        phases.first_token_at[choice] = time.perf_counter(), request.num_generated(choice)

    def sequence_ended(self, request: RunningRequest, choice: int) -> None:
        """Record a sequence's time per output token, from its first to its last token here."""
        phases = self._phases.get(request.request_id)
        first = phases.first_token_at.pop(choice, None) if phases is not None else None
        if first is None:
            return
        at, count = first
        more = request.num_generated(choice) - count
        if more > 0:
            self._per_token.record((time.perf_counter() - at) / more)

    def completed(self, request: RunningRequest) -> None:
        """End the request's span: this engine wrote the end of its log."""
        self._end(request.request_id, "completed", {"pagestream.output_tokens": request.num_output_tokens})

    def failed(self, request_id: str, error_type: str) -> None:
        """Count an error of the request, and mark its span with it."""
        self.error(error_type)
        phases = self._phases.get(request_id)
        if phases is not None and phases.span is not None:
            phases.span.fail(error_type)

    def cancelled(self, request_id: str) -> None:
        """End the span and count a cancellation: by the client, the deadline, or for want of a reader."""
        if self._end(request_id, "cancelled"):
            self._cancellations.add()

    def dropped(self, request_id: str) -> None:
        """End the span and count a cancellation, unless the span ended before.

        Redis no longer shows the request as this engine's; nearly always since it was cancelled before it had a token
        to append.
        """
        if self._end(request_id, "dropped"):
            self._cancellations.add()

    def lost(self, request_id: str, error_type: str) -> None:
        """End the span with an error: Redis refused an append, and another engine may run the request."""
        phases = self._phases.get(request_id)
        if phases is not None:
            self.error(error_type)
            if phases.span is not None:
                phases.span.fail(error_type)
            self._end(request_id, "lost")

    def handed_back(self, request_ids: Collection[str]) -> None:
        """End the spans of requests that another engine goes on with."""
        for request_id in request_ids:
            self._end(request_id, "handed_back")

    def _end(self, request_id: str, outcome: str, more: Mapping[str, str | int] | None = None) -> bool:
        phases = self._phases.pop(request_id, None)
        if phases is None:
            return False
        if phases.span is not None:
            phases.span.set({"pagestream.outcome": outcome, **(more or {})})
            phases.span.end()
        return True


_FIGURES = tuple(metric for metric in catalog.ENGINE_METRICS if metric.figure)
"""What shows a figure of the engine as it is."""
_OF_MODELS = (
    *_FIGURES,
    catalog.KV_FRAGMENTATION,
    catalog.DRAINING,
    catalog.KV_BLOCKS,
    catalog.HOST_TIER_PAGES,
    catalog.HOST_TIER_COPIES,
    catalog.DEGRADATION_RUNG,
    catalog.DEGRADATION_SHARE,
    catalog.ACCEPTED,
    catalog.MEMORY_USAGE,
    catalog.GPU_MEMORY_USAGE,
    catalog.GPU_UTILIZATION,
)
"""What has the model as its first attribute."""


@dataclass(frozen=True)
class EngineReaders:
    """Functions that return an engine's current figures. All are called on the thread that collects."""

    figures: Callable[[], Figures]
    memory_bytes: Mapping[str, int]
    """Device memory by use; fixed once the model is loaded."""
    num_reclaimed: Callable[[], int]
    degradation: Callable[[], tuple[Rung, Shares]]
    """The rung in force, and what is in use of each resource."""


class EngineGauges:
    """Sets the gauges, and the counters that the engine keeps."""

    def __init__(self, registry: Registry, model: str, readers: EngineReaders, health: Health) -> None:
        self._readers = readers
        self._health = health
        self._model = model
        self._number = registry.number
        self._is_retired = False

    def update(self) -> None:
        """Read everything once. For `Registry.on_collect`."""
        if not self._is_retired:
            self._update()

    def retire(self) -> None:
        """Set nothing more, and remove what was set: the engine has another model."""
        self._is_retired = True
        for metric in _OF_MODELS:
            instrument = self._number(metric)
            instrument.forget_others({values for values, _ in instrument.items() if values[0] != self._model})

    def _update(self) -> None:
        figures = self._readers.figures()
        stats = figures.stats
        for metric in _FIGURES:
            self._number(metric).series(self._model).set(getattr(stats, metric.figure))
        self._number(catalog.KV_FRAGMENTATION).series(self._model).set(figures.fragmentation)
        self._number(catalog.DRAINING).series(self._model).set(int(self._health.is_draining))
        self._number(catalog.RECLAIMS).series().set(self._readers.num_reclaimed())
        blocks = {
            "used": stats.num_blocks - stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks - stats.num_cached_blocks,
        }
        for state, count in blocks.items():
            self._number(catalog.KV_BLOCKS).series(self._model, state).set(count)
        pages = {"cached": stats.num_used_host_pages, "free": stats.num_host_pages - stats.num_used_host_pages}
        for state, count in pages.items():
            self._number(catalog.HOST_TIER_PAGES).series(self._model, state).set(count)
        for direction, size in (("saved", stats.saved_bytes), ("loaded", stats.loaded_bytes)):
            self._number(catalog.HOST_TIER_COPIES).series(self._model, direction).set(size)
        rung, shares = self._readers.degradation()
        for each in Rung:
            if each is not Rung.NORMAL:
                self._number(catalog.DEGRADATION_RUNG).series(self._model, each.name.lower()).set(int(each <= rung))
        for resource, share in shares.items():
            if share is not None:
                self._number(catalog.DEGRADATION_SHARE).series(self._model, resource.value).set(share)
        for position, count in enumerate(stats.accepted_by_position, 1):
            self._number(catalog.ACCEPTED).series(self._model, str(position)).set(count)
        for kind, size in self._readers.memory_bytes.items():
            self._number(catalog.MEMORY_USAGE).series(self._model, kind).set(size)
        if figures.gpu is not None:
            self._number(catalog.GPU_MEMORY_USAGE).series(self._model).set(figures.gpu.memory_bytes)
            self._number(catalog.GPU_UTILIZATION).series(self._model).set(figures.gpu.utilization)


PERIOD_S = 1.0
"""Between two looks at whether somebody looks, one GET each, and between two maps."""
_ANSWER_S = 2.0
"""Seconds after which a map is given up: a step may take longer."""


def block_maps(core: EngineCore, session: EngineSession, block_size: int) -> Periodic:
    """Return the task that publishes maps while they are wanted, once it is started.

    Args:
        core: whose engine makes the maps.
        block_size: of the engine's blocks, in tokens.
    """
    return Periodic("block maps", PERIOD_S, lambda: _publish(core, session, block_size))


async def _publish(core: EngineCore, session: EngineSession, block_size: int) -> None:
    maps, identity = session.block_maps, session.identity
    async with within(_ANSWER_S, "a map of the blocks"):
        if not await maps.is_watched(identity.model):
            return
        try:
            found = await asyncio.shield(asyncio.wrap_future(core.read_blocks()))
        except EngineCoreError as error:
            logger.debug("no map of the blocks: %s", error)
            return
        await maps.publish(identity.engine_id, record_of(found, core.figures.stats, block_size))


def record_of(found: BlockMap, stats: EngineStats, block_size: int) -> Record:
    """Return a map as Redis gets it."""
    return Record(
        num_blocks=found.num_blocks,
        num_free=found.num_free,
        num_cached=found.num_cached,
        block_size=block_size,
        cells=found.cells,
        holders=[BlockHolders(sequences=each.sequences, num_references=each.num_references) for each in found.holders],
        sequences=[
            RunningSequence(
                request_id=request_id_of(each.seq_id),
                choice=_choice_of(each.seq_id),
                tenant=each.tenant,
                num_prompt_tokens=each.num_prompt_tokens,
                num_tokens=each.num_tokens,
                num_computed_tokens=each.num_computed_tokens,
                num_blocks=each.num_blocks,
                is_prefill=each.is_prefill,
            )
            for each in found.sequences
        ],
        num_running=found.num_running,
        num_waiting=found.num_waiting,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        at_ms=round(time.monotonic() * 1000),
    )


def _choice_of(seq_id: str) -> int:
    """Return the choice of `<request id>/<nonce>/<choice>`; a beam's is that of its search."""
    choice = choice_id(seq_id).rpartition("/")[2]
    return int(choice) if choice.isdecimal() else 0
