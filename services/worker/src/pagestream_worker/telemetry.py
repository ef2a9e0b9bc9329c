"""What a worker measures, and the spans of the requests that it runs: one for each phase, none for a token.

A request's phases are queue (until this claim), prefill (until its first token here) and decode. All are children of
the span that accepted it, so that what an engine which is killed could not send leaves no hole in the tree: its last
phase is missing, and the next engine's phases follow with the next attempt.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pagestream_engine.request.outputs import EngineStats
from pagestream_telemetry import catalog
from pagestream_telemetry.context import TraceContext
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.process import Telemetry, process_age_s, silent_telemetry
from pagestream_telemetry.spans import Span, SpanKind

from pagestream_worker.gpu import gpu_use
from pagestream_worker.health import Health
from pagestream_worker.request import RunningRequest

SERVICE = "pagestream-engine"


@dataclass(frozen=True)
class EngineView:
    """Where the figures that are read, not counted, come from. All are called on the thread that collects."""

    stats: Callable[[], EngineStats]
    fragmentation: Callable[[], float]
    memory_bytes: Mapping[str, int]
    reclaimed: Callable[[], int]


@dataclass
class _Phases:
    """Where a claimed request stands."""

    context: TraceContext
    attributes: dict[str, str | int | float | bool]
    span: Span
    first_token_at: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By choice: when, and how many tokens it had then."""


class WorkerTelemetry:
    """Instruments of a worker. `step` is called by the thread that steps, the rest on the event loop.

    Args:
        telemetry: of the process.
        model: the served name.
        engine_id: as in leases, for spans.
    """

    def __init__(self, telemetry: Telemetry, model: str, engine_id: str) -> None:
        registry = telemetry.registry
        self._tracer = telemetry.tracer
        self._registry = registry
        self._model = model
        self._engine_id = engine_id
        self._phases: dict[str, _Phases] = {}
        self._step_duration = registry.distribution(catalog.STEP_DURATION).series(model)
        self._batch_size = registry.distribution(catalog.BATCH_SIZE).series(model)
        self._queue_wait = registry.distribution(catalog.QUEUE_WAIT).series(model)
        self._per_token = registry.distribution(catalog.ENGINE_TIME_PER_OUTPUT_TOKEN).series(model)
        self._resumes = registry.number(catalog.RESUMES).series(model)
        self._cancellations = registry.number(catalog.CANCELLATIONS).series(model)
        self._errors = registry.number(catalog.ERRORS)

    # -- what is read --

    def watch(self, view: EngineView, health: Health) -> None:
        """The engine is there: from now on its figures are told."""
        gauges = _Gauges(self._registry, self._model, view, health)
        self._registry.on_collect(gauges.set)

    def ready(self) -> None:
        """It claims."""
        self._registry.number(catalog.STARTUP_DURATION).series(self._model).set(process_age_s())

    # -- what is counted --

    def step(self, duration_s: float, sequences: int) -> None:
        """A step has ended."""
        self._step_duration.record(duration_s)
        self._batch_size.record(sequences)

    def error(self, error_type: str) -> None:
        """Something went wrong that is no single request's."""
        self._errors.series(self._model, error_type).add()

    # -- a request's phases --

    def claimed(self, request: RunningRequest) -> None:
        """It is this engine's now: its wait has ended, its prefill begins."""
        claim, now = request.claim, time.time()
        if claim.attempts > 1:
            self._resumes.add()
        else:
            self._queue_wait.record(claim.waited_s)
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.request.model": self._model,
            "pagestream.request.id": request.request_id,
            "pagestream.engine.id": self._engine_id,
            "pagestream.epoch": claim.epoch,
            "pagestream.attempt": claim.attempts,
            "pagestream.next_index": claim.next_index,
        }
        context = request.trace
        waited = self._tracer.start(
            "queue", context, kind=SpanKind.CONSUMER, attributes=attributes, at_s=now - claim.waited_s
        )
        waited.end(now)
        prefill = self._tracer.start("prefill", context, attributes=attributes, at_s=now)
        self._phases[request.request_id] = _Phases(context, attributes, prefill)

    def first_token(self, request: RunningRequest, choice: int) -> None:
        """A sequence has got its first token here; the first of them ends the prefill."""
        phases = self._phases.get(request.request_id)
        if phases is None:
            return
        if not phases.first_token_at:
            phases.span.end()
            phases.span = self._tracer.start("decode", phases.context, attributes=phases.attributes)
        phases.first_token_at[choice] = time.perf_counter(), request.num_made(choice)

    def sequence_ended(self, request: RunningRequest, choice: int) -> None:
        """A sequence has got its last token here."""
        phases = self._phases.get(request.request_id)
        first = phases.first_token_at.pop(choice, None) if phases is not None else None
        if first is None:
            return
        at, count = first
        more = request.num_made(choice) - count
        if more > 0:
            self._per_token.record((time.perf_counter() - at) / more)

    def completed(self, request: RunningRequest) -> None:
        """Its log has its end, by this engine."""
        self._end(request.request_id, "completed", {"pagestream.output_tokens": request.num_output_tokens})

    def failed(self, request_id: str, error_type: str) -> None:
        """It ended with an error, here."""
        self.error(error_type)
        phases = self._phases.get(request_id)
        if phases is not None:
            phases.span.fail(error_type)

    def cancelled(self, request_id: str) -> None:
        """It was ended from outside: by its client, its deadline, or for want of a reader."""
        if self._end(request_id, "cancelled"):
            self._cancellations.add()

    def dropped(self, request_id: str) -> None:
        """Redis no longer shows it as this engine's; nearly always since it was ended from outside before it had a
        token to append."""
        if self._end(request_id, "dropped"):
            self._cancellations.add()

    def lost(self, request_id: str, error_type: str) -> None:
        """It is no longer this engine's, and another one may be at it."""
        phases = self._phases.get(request_id)
        if phases is not None:
            self.error(error_type)
            phases.span.fail(error_type)
            self._end(request_id, "lost")

    def handed_back(self, request_ids: Collection[str]) -> None:
        """Another engine goes on with them."""
        for request_id in request_ids:
            self._end(request_id, "handed_back")

    def _end(self, request_id: str, outcome: str, more: Mapping[str, str | int] | None = None) -> bool:
        phases = self._phases.pop(request_id, None)
        if phases is None:
            return False
        phases.span.set({"pagestream.outcome": outcome, **(more or {})})
        phases.span.end()
        return True


class _Gauges:
    """Sets what a snapshot of the engine tells."""

    def __init__(self, registry: Registry, model: str, view: EngineView, health: Health) -> None:
        self._view = view
        self._health = health
        self._model = model
        self._number = registry.number

    def set(self) -> None:
        """Takes a snapshot."""
        stats = self._view.stats()
        for metric, value in (
            (catalog.KV_UTILIZATION, stats.kv_utilization),
            (catalog.KV_FRAGMENTATION, self._view.fragmentation()),
            (catalog.PREFIX_QUERIES, stats.prefix_query_tokens),
            (catalog.PREFIX_HITS, stats.prefix_hit_tokens),
            (catalog.REQUESTS_RUNNING, stats.num_running),
            (catalog.REQUESTS_WAITING, stats.num_waiting),
            (catalog.TOKENS_PROMPT, stats.num_prompt_tokens),
            (catalog.TOKENS_GENERATED, stats.num_generated_tokens),
            (catalog.PREEMPTIONS, stats.num_preemptions),
            (catalog.DRAINING, int(self._health.is_draining)),
        ):
            self._number(metric).series(self._model).set(value)
        self._number(catalog.RECLAIMS).series().set(self._view.reclaimed())
        blocks = {
            "used": stats.num_blocks - stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks - stats.num_cached_blocks,
        }
        for state, count in blocks.items():
            self._number(catalog.KV_BLOCKS).series(self._model, state).set(count)
        for kind, size in self._view.memory_bytes.items():
            self._number(catalog.MEMORY_USAGE).series(self._model, kind).set(size)
        self._set_gpu()

    def _set_gpu(self) -> None:
        use = gpu_use()
        if use is not None:
            self._number(catalog.GPU_MEMORY_USAGE).series(self._model).set(use.memory_bytes)
            self._number(catalog.GPU_UTILIZATION).series(self._model).set(use.utilization)


def silent_worker_telemetry(model: str = "") -> WorkerTelemetry:
    """One that exports nothing."""
    return WorkerTelemetry(silent_telemetry(SERVICE), model, "")
