"""A claimed request on this engine: the sequences that it runs as, and the log entries that they become."""

import heapq
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request import Sibling, StepOutput
from pagestream_engine.scheduler.policies import LengthPredictor, RequestShape
from pagestream_streams import Append, AppendKind, AppendOutcome, Claim, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.protocol.records import INVALID_REQUEST, TokenOutcomes, most_output_tokens

from pagestream_worker.claim_budget import ClaimBudget
from pagestream_worker.logs.token_logs import PendingLogs, TokenBatch, TokenLogs
from pagestream_worker.messages import NO_TOKENS, AbortSequences, AdapterName, AddGroup, Command, TokenColumns
from pagestream_worker.running_request import Choice, RunningRequest, error_code
from pagestream_worker.telemetry import WorkerTelemetry


@dataclass(frozen=True, slots=True)
class PendingAppends:
    """The next append of each request with pending entries."""

    appends: Sequence[Append]
    """Of the requests that lack more than plain tokens."""
    logs: PendingLogs
    """All the logs; its batches are the other requests' appends."""

    @property
    def handles(self) -> list[int]:
        """Handles of all these logs."""
        return [*self.logs.others, *chain.from_iterable(batch.logs for batch in self.logs.batches)]


logger = logging.getLogger(__name__)

SPARE_SHARE = 32
"""At the limit of its memory, one part in so many of what the logs hold goes at once."""


class ActiveRequests:
    """The requests by id, kept in step with the engine, the claim budget and telemetry. For the event loop alone.

    Args:
        submit: hands a command to the engine.
        budget: gets each sequence that starts and ends.
        telemetry: gets each phase of a request.
        on_pending: called when a request has got entries that its log lacks.
        logs: keep the entries until Redis has them, and to send them again.
    """

    def __init__(
        self,
        submit: Callable[[Command], None],
        budget: ClaimBudget,
        telemetry: WorkerTelemetry,
        on_pending: Callable[[], None],
        logs: TokenLogs,
    ) -> None:
        self._submit = submit
        self._budget = budget
        self._telemetry = telemetry
        self._on_pending = on_pending
        self._logs = logs
        self.on_poison: Callable[[RequestSpec], None] = lambda _: None
        """Gets a request that ran alone, as a suspect of an engine's death, and ended by its own fault."""
        self.lengths = LengthPredictor()
        """Learns how long the answers are of requests that are complete, their choices together."""
        self._requests: dict[str, RunningRequest] = {}
        self._by_log: dict[int, RunningRequest] = {}
        self._sequences: dict[str, tuple[RunningRequest, int]] = {}  # by id, with the choice; until it ends or goes

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> RunningRequest | None:
        """Return a request; None where it is not active. Any thread may call this."""
        return self._requests.get(request_id)

    def ids(self) -> list[str]:
        """Return the ids of all active requests."""
        return list(self._requests)

    def ids_without_tokens(self) -> list[str]:
        """Return the ids of the requests for which no engine has generated a token."""
        return [request_id for request_id, request in self._requests.items() if not request.num_output_tokens]

    # -- from claim to log --

    def start(self, claim: Claim) -> None:
        """Run a claimed request. One that the engine can't run is failed: its log gets an error as its end."""
        # The same request may be claimed again before this engine has seen that it lost the earlier claim.
        self.drop([claim.request_id])
        request = RunningRequest(claim, self._logs)
        self._requests[request.request_id] = self._by_log[request.log.handle] = request
        self._telemetry.claimed(request)
        try:
            groups = list(request.open_groups())
        except InvalidRequest as error:
            self._fail(request, INVALID_REQUEST, str(error))
            return
        except Exception:
            # A request that no engine can read would end one engine after the other.
            logger.exception("failed: the request could not be read", extra=_log_fields(request))
            self._fail(request, "engine_error", "the engine could not read this request")
            return
        for choices in groups:
            self._run_group(request, choices)
        request.end_if_complete()
        self._on_pending()
        logger.info(
            "claimed",
            extra=_log_fields(request)
            | {"attempt": claim.attempts, "next_index": claim.next_index, "isolated": claim.isolated},
        )

    def _fail(self, request: RunningRequest, code: str, message: str) -> None:
        self._telemetry.failed(request.request_id, code)
        request.fail(code, message)
        self._on_pending()

    def _run_group(self, request: RunningRequest, choices: Sequence[Choice]) -> None:
        """Run the choices of one prompt as a group.

        One that is claimed for the first time waits for no mark: at worst it is suspected one death later.
        """
        claim, prompt = request.claim, list(choices[0].prompt.ids)
        sizes = [(choice.seq_id, len(choice.output_token_ids)) for choice in choices]
        siblings = [
            Sibling(choice.seq_id, choice.params, choice.output_token_ids, choice.index % request.num_siblings)
            for choice in choices
        ]
        params = siblings[0].params
        num_at_end = params.width if params.use_beam_search or params.has_best_of else 0
        priority, is_search = claim.spec.priority, params.use_beam_search
        self._budget.reserve(len(prompt), sizes, priority=priority, num_at_end=num_at_end, is_search=is_search)
        self._sequences.update((choice.seq_id, (request, choice.index)) for choice in choices)
        log = request.log.handle if request.is_plain else 0
        spec, was_claimed = claim.spec, claim.attempts > 1
        self._submit(
            AddGroup(
                prompt,
                siblings,
                spec.cache_salt,
                priority=spec.priority,
                aged_classes=claim.aged_classes,
                tenant=spec.tenant,
                weight=claim.tenant_weight,
                waits_for_mark=was_claimed,
                adapter=_adapter_of(spec),
                log=log,
            )
        )

    def add_outputs(self, outputs: Iterable[StepOutput], tokens: TokenColumns = NO_TOKENS) -> None:
        """Add a step's plain tokens, then its other outputs, to their requests.

        Those of sequences that were dropped during the step are ignored.
        """
        sequences, budget = self._sequences, self._budget
        try:
            self._logs.take(tokens)
            for output in outputs:
                found = sequences.get(output.seq_id)
                if found is None:
                    continue
                request, choice = found
                is_first = budget.has_prefilling and output.token_id is not None and budget.note_token(output.seq_id)
                request.add_output(choice, output)
                if is_first:
                    self._telemetry.first_token(request, choice)
                if output.finish_reason is not None:
                    self._end_sequence(request, choice, output)
        finally:
            self._on_pending()
        self._bound_memory()

    def _end_sequence(self, request: RunningRequest, choice: int, output: StepOutput) -> None:
        del self._sequences[output.seq_id]
        self._telemetry.sequence_ended(request, choice)
        reach(FaultPoint.LAST_TOKEN)
        self._budget.release([output.seq_id])
        if output.error is not None:
            code = error_code(output.error)
            level = logging.INFO if code == INVALID_REQUEST else logging.ERROR
            logger.log(level, "failed: %s", output.error, extra=_log_fields(request))
            self._telemetry.failed(request.request_id, code)
            if code == INVALID_REQUEST and request.claim.isolated:
                self.on_poison(request.claim.spec)
            self._abort(request)

    def _bound_memory(self) -> None:
        """Drop acknowledged entries, the longest log's first. In an outage there may be none: then a request goes.

        The heartbeat after the outage hands back what Redis shows as this engine's and isn't here. Once at the limit, a
        part of what is held goes at once, so that not every step has to look for the longest.
        """
        if not self._logs.is_exceeded:
            return
        by_size = [(-request.log.num_bytes, request_id) for request_id, request in self._requests.items()]
        heapq.heapify(by_size)
        least = self._logs.limit_bytes - self._logs.limit_bytes // SPARE_SHARE
        while self._logs.held_bytes > least and by_size:
            request = self._requests[by_size[0][1]]
            if request.log.drop_oldest():
                heapq.heapreplace(by_size, (-request.log.num_bytes, request.request_id))
                continue
            heapq.heappop(by_size)
            if self._logs.is_exceeded:
                logger.warning("dropped: too much waits for Redis", extra=_log_fields(request))
                self.drop([request.request_id])

    def drop_acknowledged(self, most_bytes: int) -> None:
        """Drop entries that Redis has, the longest log's first, until no more than `most_bytes` are kept. Where Redis
        loses them, their requests are handed back and generated again from there.
        """
        for request in sorted(self._requests.values(), key=lambda request: request.log.num_bytes, reverse=True):
            while self._logs.held_bytes > most_bytes and request.log.drop_oldest():
                pass

    # -- appends --

    @property
    def has_pending(self) -> bool:
        """Whether some request has entries that its log lacks."""
        return any(request.log.has_pending for request in self._requests.values())

    def pending(self, limit: int, *, without: Collection[int] = ()) -> PendingAppends:
        """Return the next append of each request with pending entries.

        Args:
            limit: most entries of one request.
            without: handles of the logs to leave out.
        """
        pending = self._logs.pending(limit, without)
        return PendingAppends([self._by_log[log].pending(limit) for log in pending.others], pending)

    def settle(self, append: Append, outcome: AppendOutcome) -> bool:
        """Apply an append's outcome. Returns whether the request was dropped here, but is still this engine's in Redis
        and has to be handed back.
        """
        request = self._requests.get(append.request_id)
        if request is None or request.claim.nonce != append.nonce:
            return False
        if outcome.kind is AppendKind.OK or (
            outcome.kind is AppendKind.GAP and request.log.can_send_from(outcome.next_index)
        ):
            request.log.acknowledge(outcome.next_index)
            if request.is_complete:
                self._telemetry.completed(request)
                self.lengths.note_length(_shape(request.claim.spec), request.num_output_tokens)
                self._remove(request)
            elif request.log.has_pending:
                self._on_pending()
            return False
        logger.warning("the log refused an append: %s", outcome.kind.name, extra=_log_fields(request))
        if outcome.kind is AppendKind.ENDED:
            self._telemetry.cancelled(append.request_id)
        else:
            self._telemetry.lost(append.request_id, outcome.kind.name.lower())
        self.drop([append.request_id])
        return not outcome.lost

    def settle_tokens(self, batch: TokenBatch, outcomes: TokenOutcomes) -> list[str]:
        """Apply a batch's outcomes. Returns the requests that have to be handed back, see `settle`."""
        logs, indexes = batch.logs, outcomes.next_indexes
        if outcomes.others:
            longer = [place for place in range(len(logs)) if place not in outcomes.others]
            logs, indexes = [logs[place] for place in longer], [indexes[place] for place in longer]
        if self._logs.acknowledge(logs, indexes):
            self._on_pending()
        if not outcomes.others:
            return []
        refused = outcomes.others.values()
        return [append.request_id for append, outcome in refused if self.settle(append, outcome)]

    # -- leaving --

    def drop(self, request_ids: Collection[str]) -> None:
        """Abort requests that are no longer this engine's: ended, cancelled, handed back or reclaimed."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._remove(request)
                logger.warning("dropped: no longer this engine's", extra=_log_fields(request))
                self._telemetry.dropped(request_id)
                self._abort(request)

    def drop_handed_back(self, request_ids: Collection[str]) -> None:
        """Abort requests that are handed back, and count them as that."""
        self._telemetry.handed_back(request_ids)
        self.drop(request_ids)

    def _remove(self, request: RunningRequest) -> None:
        del self._requests[request.request_id], self._by_log[request.log.handle]
        request.log.close()

    def _abort(self, request: RunningRequest) -> None:
        running = request.running_seq_ids()
        for seq_id in running:
            self._sequences.pop(seq_id, None)
        self._budget.release(running)
        self._submit(AbortSequences(running))


async def hand_back(session: EngineSession, request_ids: Sequence[str]) -> None:
    """Hand requests back to their queues. Where Redis is away, a heartbeat after the outage hands them back."""
    try:
        await session.hand_back(request_ids)
    except Unavailable as error:
        logger.warning("could not hand back %d requests: %s", len(request_ids), error)


def _log_fields(request: RunningRequest) -> dict[str, Any]:
    trace = request.trace
    traced = {"trace_id": trace.trace_id, "span_id": trace.span_id} if trace else {}
    return {"request_id": request.request_id, **traced}


def _adapter_of(spec: RequestSpec) -> AdapterName | None:
    given = spec.adapter
    return AdapterName(given.name, given.path, given.revision) if given.name else None


def _shape(spec: RequestSpec) -> RequestShape:
    num_prompt_tokens = sum(len(prompt.ids) for prompt in spec.prompts)
    return RequestShape(num_prompt_tokens, spec.tenant, most_output_tokens(spec))
