"""The counters, histograms and spans of an engine process.

A request has one span for each phase and none for a token: queue (until this claim), prefill (until its first token
here), decode. All are children of the span that accepted the request, so that an engine that is killed leaves no broken
tree: its last phase is missing, and the next engine's phases follow with the next attempt.
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pagestream_telemetry import catalog
from pagestream_telemetry.process import Telemetry, process_age_s
from pagestream_telemetry.tracing import Span, SpanKind, TraceContext

from pagestream_worker.running_request import RunningRequest

logger = logging.getLogger(__name__)

SERVICE = "pagestream-engine"


@dataclass
class _Phases:
    """The span of a request's current phase, and what its next spans and its end need."""

    context: TraceContext
    attributes: dict[str, str | int | float | bool]
    span: Span
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
        """Note a sequence's first token here; the first one of the request ends its prefill span."""
        phases = self._phases.get(request.request_id)
        if phases is None:
            return
        if not phases.first_token_at:
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
        if phases is not None:
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
        phases.span.set({"pagestream.outcome": outcome, **(more or {})})
        phases.span.end()
        return True
