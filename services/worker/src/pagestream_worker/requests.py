"""The claimed requests of this engine, from claim to the end of their logs.

`ActiveRequests` holds them by id. A `RunningRequest` is one of them: the sequences that it runs as, and the log entries
that their outputs become. Below them its wire message as the engine's sampling parameters, and what the engine computes
of a prompt (log probabilities, a vector) as the parts that a log has.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    LogprobEntry,
    RequestError,
    StructuredOutputs,
    TokenLogprobs,
    Usage,
)
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import (
    LABEL_ACTIVATION_IDENTITY,
    LABEL_ACTIVATION_SIGMOID,
    LABEL_ACTIVATION_SOFTMAX,
    POOLING_KIND_CLS,
    POOLING_KIND_LAST,
    POOLING_KIND_MEAN,
    POOLING_KIND_UNSPECIFIED,
    Pooling,
    PromptPart,
    RequestSpec,
)
from pagestream.v1.records_pb2 import (
    ReasoningMarks as ReasoningMessage,
)
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.models.pooling import IDENTITY, SIGMOID, SOFTMAX, probabilities_of, vector_of
from pagestream_engine.request import Choice, SequenceOutput, TokenLogprob
from pagestream_engine.sampling_params import (
    STATES_DTYPE,
    ReasoningMarks,
    SamplingParams,
    StructuredOutputsParams,
    child_seed,
)
from pagestream_engine.scheduler.policies import LengthPredictor, RequestShape
from pagestream_engine.wire.worker import (
    NO_TOKENS,
    AbortSequences,
    AdapterName,
    AddGroup,
    Command,
    TokenColumns,
    request_id_of,
)
from pagestream_options.sampling import SAMPLING_PARAMETERS
from pagestream_streams import Append, AppendKind, AppendOutcome, Claim, fault_points
from pagestream_streams.fault_points import FaultPoint
from pagestream_streams.protocol.records import (
    END,
    FINISH,
    INVALID_REQUEST,
    PART,
    TOKEN,
    ClaimedLog,
    TokenOutcomes,
    error_text,
    finish_reason_name,
    is_prompt_alone,
    most_output_tokens,
    output_bounds,
    parse_finish_reason,
    usage_text,
)
from pagestream_telemetry.tracing import TraceContext, caller_context

from pagestream_worker.claim_budget import ClaimBudget
from pagestream_worker.logs.token_logs import PendingLogs, TokenBatch, TokenLogs, has_plain_tokens
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

_Outputs = tuple[Sequence[SequenceOutput], TokenColumns]


class EngineFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """The engine ended by an error; the process has to end, so that other engines go on with its requests."""


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
        self.is_appending = False
        """Whether an append is under way, so that no outputs are deferred: the next one takes all there is."""
        self.deferred: _Outputs | None = None
        """Outputs that wait for `take_deferred`."""
        self.ended = asyncio.Event()
        """Set when no more outputs are taken."""
        self.failure: EngineFailed | None = None
        """Why the engine, or the taking of an output, failed."""
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
        if claim.request_id in self._requests:  # it is claimed again before its loss was seen here
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
        for first, group in groups:
            self._run_group(request, first, group)
        if not groups:
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

    def _run_group(self, request: RunningRequest, first: int, group: AddGroup) -> None:
        choices, params = group.choices, group.choices[0].params
        self._budget.reserve(
            len(group.prompt_token_ids),
            [(choice.seq_id, len(choice.output_token_ids)) for choice in choices],
            priority=group.priority,
            num_at_end=params.width if params.use_beam_search or (params.best_of and params.has_best_of) else 0,
            is_search=params.use_beam_search,
        )
        for choice in choices:
            self._sequences[choice.seq_id] = request, first + (choice.index or 0)
        self._submit(group)

    def take_outputs(self, outputs: Sequence[SequenceOutput], tokens: TokenColumns = NO_TOKENS) -> None:
        """Add a step's plain tokens and outputs to their requests, first tokens before others.

        Where no append is under way, the outputs of requests with a first token are added at once, and the others of
        the step are deferred until the append of those first tokens has been sent. After one that failed no more are
        taken: a log would skip tokens.
        """
        if self.ended.is_set():
            return
        try:
            if self.deferred is not None:
                deferred, self.deferred = self.deferred, None
                self.add_outputs(*deferred)
            if self._budget.prefilling and not self.is_appending:
                outputs, tokens = self._defer(outputs, tokens)
            self.add_outputs(outputs, tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is, this process must not write on
            self.end_outputs(error)

    def take_deferred(self) -> None:
        """Take the outputs that were deferred."""
        if self.deferred is not None:
            self.take_outputs(())

    def end_outputs(self, error: BaseException | None) -> None:
        """Take what was deferred, then end, with the error of the engine if it had one."""
        self.take_deferred()
        if self.ended.is_set():
            return
        self.ended.set()
        if error is None:
            return
        logger.critical("the engine failed", exc_info=error)
        self._telemetry.error("engine_failed")
        self.failure = EngineFailed(f"the engine ended by {error!r}")
        self.failure.__cause__ = error

    def _defer(self, outputs: Sequence[SequenceOutput], tokens: TokenColumns) -> _Outputs:
        """Return what to add now, and defer the rest: whole requests, since the order of entries in a log must not
        depend on timing. A plain token is no first one.
        """
        prefilling = self._budget.prefilling
        begun = {request_id_of(each.seq_id) for each in outputs if each.seq_id in prefilling}
        if not begun:
            return outputs, tokens
        others = [output for output in outputs if request_id_of(output.seq_id) not in begun]
        if others or tokens.num_tokens:
            self.deferred = others, tokens
        return [output for output in outputs if request_id_of(output.seq_id) in begun], NO_TOKENS

    def add_outputs(self, outputs: Iterable[SequenceOutput], tokens: TokenColumns = NO_TOKENS) -> None:
        """Add a step's plain tokens, then its other outputs, to their requests.

        Those of sequences that were dropped during the step are ignored.
        """
        sequences, budget, prefilling = self._sequences, self._budget, self._budget.prefilling
        try:
            self._logs.write_tokens(tokens)
            for output in outputs:
                found = sequences.get(output.seq_id)
                if found is None:
                    continue
                request, choice = found
                is_first = output.token_id is not None and output.seq_id in prefilling
                if is_first:
                    budget.end_prefill(output.seq_id)
                request.add_output(choice, output)
                if is_first:
                    self._telemetry.first_token(request, choice)
                if output.finish_reason is not None:
                    self._end_sequence(request, choice, output)
        finally:
            self._on_pending()
        self._bound_memory()

    def _end_sequence(self, request: RunningRequest, choice: int, output: SequenceOutput) -> None:
        del self._sequences[output.seq_id]
        self._telemetry.sequence_ended(request, choice)
        if fault_points.IS_ON:
            fault_points.reach(FaultPoint.LAST_TOKEN)
        self._budget.release([output.seq_id])
        if output.error is not None:
            code = error_code(output)
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

    def apply_outcome(self, append: Append, outcome: AppendOutcome) -> bool:
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
            if request.has_ended and request.is_complete:
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

    def apply_token_outcomes(self, batch: TokenBatch, outcomes: TokenOutcomes) -> list[str]:
        """Apply a batch's outcomes. Returns the requests that have to be handed back, see `apply_outcome`."""
        logs, indexes = batch.logs, outcomes.next_indexes
        if outcomes.others:
            longer = [place for place in range(len(logs)) if place not in outcomes.others]
            logs, indexes = [logs[place] for place in longer], [indexes[place] for place in longer]
        if self._logs.acknowledge(logs, indexes):
            self._on_pending()
        if not outcomes.others:
            return []
        refused = outcomes.others.values()
        return [append.request_id for append, outcome in refused if self.apply_outcome(append, outcome)]

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


def _log_fields(request: RunningRequest) -> dict[str, Any]:
    fields = {"request_id": request.request_id}
    if request.claim.spec.traceparent and (trace := request.trace):
        fields |= {"trace_id": trace.trace_id, "span_id": trace.span_id}
    return fields


def _shape(spec: RequestSpec) -> RequestShape:
    num_prompt_tokens = sum(len(prompt.ids) for prompt in spec.prompts)
    return RequestShape(num_prompt_tokens, spec.tenant, most_output_tokens(spec))


def error_code(output: SequenceOutput) -> str:
    """Return the code of the error that a sequence ended with: whether its request is at fault."""
    return INVALID_REQUEST if output.is_request_fault else "engine_error"


class RunningRequest:
    """The log of one claimed request, with the entries that this engine has generated."""

    __slots__ = (
        "_cached_tokens",
        "_finishes",
        "_held",
        "_num_choices",
        "_num_tokens",
        "_prompt_parts",
        "_resumed",
        "_running",
        "_siblings",
        "claim",
        "has_ended",
        "log",
        "request_id",
    )

    def __init__(self, claim: Claim, logs: TokenLogs) -> None:
        self.claim = replace(claim, log=ClaimedLog())  # its tokens are taken below, and not needed again
        self.request_id = claim.spec.request_id
        self._siblings = max(1, claim.spec.sampling.n)
        self._num_choices = self._siblings * len(claim.spec.prompts)
        self._resumed = {choice: list(claim.log.tokens.get(choice, ())) for choice in range(self._num_choices)}
        self._num_tokens = {choice: len(tokens) for choice, tokens in self._resumed.items()}  # beside log.num_taken
        self._held: defaultdict[int, deque[SequenceOutput]] = defaultdict(deque)  # generated before their turn
        self._finishes = dict(claim.log.finishes)
        self._prompt_parts = PromptParts(claim.spec, claim.log.prompt_ends)
        self._running: set[int] = set()
        self._cached_tokens = claim.cached_tokens
        self.log = logs.open(claim)
        self.has_ended = False

    @property
    def trace(self) -> TraceContext:
        """The trace of the call that accepted the request; NO_TRACE where there is none."""
        return caller_context(self.claim.spec.traceparent, self.claim.spec.tracestate)

    # -- to the engine --

    def open_groups(self) -> Iterator[tuple[int, AddGroup]]:
        """Yield what the engine runs: of each prompt the choices whose log has no finish yet, after its first choice.

        One that is claimed for the first time waits for no mark: at worst it is suspected one death later.
        """
        claim, spec, num_siblings = self.claim, self.claim.spec, self._siblings
        of_all: SamplingParams | None = None  # checked once: the choices are many, and their lists may be long
        bounds = output_bounds(spec) if spec.max_total_tokens else None
        given = spec.adapter
        adapter = AdapterName(given.name, given.path, given.revision) if given.name else None
        log_handle = self.log.handle if has_plain_tokens(spec) else 0
        for number, prompt in enumerate(spec.prompts):
            first, choices = number * num_siblings, list[Choice]()
            for index in range(first, first + num_siblings):
                if index in self._finishes:
                    continue
                of_all = of_all or sampling_of(spec)
                params = sampling_of_child(of_all, child_of(spec, index) if index else 0)
                if bounds is not None:
                    params = params.with_max_tokens(bounds[number])
                if self._prompt_parts.are_complete(first):
                    if is_prompt_alone(spec):
                        reason = FINISH_REASON_STOP if spec.HasField("pooling") else FINISH_REASON_LENGTH
                        self._write_finish(index, reason, "", "")
                        continue
                    params = params.without_prompt_logprobs()
                self._running.add(index)
                choices.append(Choice(self._seq_id(index), params, self._resumed[index], index - first))
            if choices:
                group = AddGroup(
                    list(prompt.ids),
                    choices,
                    spec.cache_salt,
                    priority=spec.priority,
                    aged_classes=claim.aged_classes,
                    tenant=spec.tenant,
                    weight=claim.tenant_weight,
                    waits_for_mark=claim.attempts > 1,
                    adapter=adapter,
                    log_handle=log_handle,
                )
                yield first, group

    def running_seq_ids(self) -> list[str]:
        """Return the sequences that run in the engine, once: the caller aborts them."""
        running = [self._seq_id(index) for index in sorted(self._running)]
        self._running.clear()
        return running

    # -- from the engine --

    def add_output(self, choice: int, output: SequenceOutput) -> None:
        """Add one step's output of a choice to the log; the last choice's finish also ends the log."""
        if choice in self._finishes:
            return
        if output.prompt_logprobs is not None or output.pooled is not None:
            first = choice - choice % self._siblings
            for end, part in self._prompt_parts.missing(first, output):
                self.log.write(PART, str(first), str(end), "", part)
            self._cached_tokens += output.num_cached_tokens if output.pooled is not None else 0
        if self._siblings == 1 or output.error is not None:
            self._add(choice, output)
            return
        self._held[choice].append(output)
        first = choice - choice % self._siblings
        self._add_in_turn(range(first, first + self._siblings))

    def _add_in_turn(self, siblings: range) -> None:
        """Write the tokens of one prompt's choices in turn, in whatever order the engine generates them after a resume.

        So the order in the log, and with it the digest, is a function of the tokens alone.
        """
        while open_choices := [choice for choice in siblings if choice not in self._finishes]:
            turn = min(open_choices, key=self._num_tokens.__getitem__)
            if not self._held[turn]:
                return
            self._add(turn, self._held[turn].popleft())

    def _add(self, choice: int, output: SequenceOutput) -> None:
        if output.token_id is not None:
            # The finish carries the last token's text, so that a stop string never spans two entries.
            text = output.text if output.finish_reason is None else ""
            logprobs = "" if output.logprobs is None else logprobs_message(output.logprobs).SerializeToString()
            self.log.write(TOKEN, str(choice), str(output.token_id), text, logprobs)
            if self._num_tokens[choice] == 0:
                self._cached_tokens += output.num_cached_tokens
            self._num_tokens[choice] += 1
        if output.finish_reason is not None:
            self._finish_choice(choice, output)

    def fail(self, code: str, message: str) -> None:
        """End every open choice, and the log, with an error. Running sequences stay in `running_seq_ids`.

        Args:
            message: any text. Half a surrogate pair, as an exception may quote one, becomes "?": UTF-8 has none, and
                the append of all other requests would fail too.
        """
        running = set(self._running)
        for choice in self._num_tokens:
            if choice not in self._finishes:
                self._write_finish(choice, FINISH_REASON_ERROR, "", "")
        self._running = running
        self._end(RequestError(code=code, message=message.encode(errors="replace").decode()))

    def end_if_complete(self) -> None:
        """Write the end of a log whose last finish was written by an engine that died before the end."""
        if not self.has_ended and len(self._finishes) == self._num_choices:
            self._end(None)

    def num_generated(self, choice: int) -> int:
        """Return the number of tokens of a choice, including those of earlier engines."""
        taken = self.log.num_taken  # of choice 0, the only one
        return self._num_tokens[choice] + len(self._held[choice]) + taken

    @property
    def num_output_tokens(self) -> int:
        """Number of written tokens of all choices, including those of earlier engines."""
        return sum(self._num_tokens.values()) + self.log.num_taken

    # -- to the log --

    @property
    def is_complete(self) -> bool:
        """Whether the end of the log has been acknowledged."""
        return self.has_ended and not self.log.has_pending

    def pending(self, limit: int) -> Append:
        """Return the next append, of at most `limit` entries or one more (see UnacknowledgedLog.pending)."""
        entries, previous_digest = self.log.pending(limit)
        claim, next_index = self.claim, self.log.next_index
        cached_tokens = self._cached_tokens if next_index == claim.next_index else None
        return Append(self.request_id, claim.epoch, claim.nonce, next_index, entries, previous_digest, cached_tokens)

    # -- inside --

    def _seq_id(self, choice: int) -> str:
        # The nonce separates the outputs of this claim from those of an earlier claim of the same request.
        return f"{self.request_id}/{self.claim.nonce}/{choice}"

    def _finish_choice(self, choice: int, output: SequenceOutput) -> None:
        reason = parse_finish_reason(output.finish_reason) if output.finish_reason else FINISH_REASON_ERROR
        stop_reason = "" if output.stop_reason is None else str(output.stop_reason)
        self._write_finish(choice, reason, stop_reason, output.text)
        if output.error is not None:
            self.fail(error_code(output), output.error)
        self.end_if_complete()

    def _write_finish(self, choice: int, reason: FinishReason, stop_reason: str, text: str) -> None:
        self._finishes[choice] = reason
        self._running.discard(choice)
        self.log.write(FINISH, str(choice), finish_reason_name(reason), text, stop_reason)

    def _end(self, error: RequestError | None) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        usage = Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self.claim.spec.prompts),
            completion_tokens=self.num_output_tokens,
            cached_tokens=self._cached_tokens,
        )
        reason = FINISH_REASON_ERROR if error is not None else self._finishes[0]
        stored_error = "" if error is None else error_text(error)
        self.log.write(END, str(int(time.time())), finish_reason_name(reason), usage_text(usage), stored_error)


_FIELDS = SamplingMessage.DESCRIPTOR.fields_by_name
_EARLY_STOPPING: dict[int, bool | str] = {
    EARLY_STOPPING_UNSPECIFIED: False,
    EARLY_STOPPING_TRUE: True,
    EARLY_STOPPING_NEVER: "never",
}
_POOLINGS: dict[int, str] = {
    POOLING_KIND_UNSPECIFIED: "last",
    POOLING_KIND_LAST: "last",
    POOLING_KIND_MEAN: "mean",
    POOLING_KIND_CLS: "cls",
}


def child_of(spec: RequestSpec, choice: int) -> int:
    """Return which child of the request's seed a choice gets.

    Siblings of a prompt always differ. Prompts differ where the gateway chose the seed; with a client's own seed each
    prompt gets what it would get alone.
    """
    return choice if spec.seed_for_each_prompt else choice % max(1, spec.sampling.n)


def sampling_of(spec: RequestSpec) -> SamplingParams:
    """Return the parameters that all choices of a request come from, see `sampling_of_child`.

    Raises:
        InvalidRequest: the request asks for what this engine doesn't support.
    """
    if not spec.HasField("pooling"):
        return _from_message(spec.sampling, _marks(spec.reasoning) if spec.HasField("reasoning") else None)
    kind = _POOLINGS.get(spec.pooling.kind)
    if kind is None:
        raise InvalidRequest(f"pooling: given kind {spec.pooling.kind}, which this engine does not know")
    return SamplingParams(max_tokens=0, temperature=0.0, seed=spec.sampling.seed, pooling=kind)


def sampling_of_child(params: SamplingParams, child: int) -> SamplingParams:
    """Return the parameters of one choice of a request: `n` is 1, the seed is that choice's own, or with `best_of` its
    prompt's. They are not checked again.

    Args:
        params: of the request, from `sampling_of`.
        child: see `child_of`.
    """
    if params.pooling is not None:
        return params
    # All choices of a prompt have its seed, from which those that take part get theirs.
    if params.best_of is not None and params.has_best_of:
        child -= child % params.n
    return params.for_child(child_seed(params.seed or 0, child), 0)


def _from_message(message: SamplingMessage, reasoning: ReasoningMarks | None) -> SamplingParams:
    given = {
        name: _value(message, name)
        for name, each in SAMPLING_PARAMETERS.items()
        if each.body is not None and (not _FIELDS[name].has_presence or message.HasField(cast(Any, name)))
    }
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidRequest(f"early_stopping: given {message.early_stopping}, which this engine does not know")
    given |= {"n": max(1, message.n), "seed": message.seed, "early_stopping": _EARLY_STOPPING[message.early_stopping]}
    if message.HasField("structured_outputs"):
        given["structured_outputs"] = _constraint(message.structured_outputs, reasoning)
    return SamplingParams(**given)


def _value(message: SamplingMessage, name: str) -> Any:
    """Return a field's value; None where a list or mapping is empty."""
    value = getattr(message, name)
    if isinstance(value, Mapping):
        return dict(value) or None
    return (tuple(value) or None) if isinstance(value, Sequence) else value


def _constraint(message: StructuredOutputs, reasoning: ReasoningMarks | None) -> StructuredOutputsParams:
    given = message.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=message.json if given == "json" else None,
        regex=message.regex if given == "regex" else None,
        choice=tuple(message.choice.texts) if given == "choice" else None,
        grammar=message.grammar if given == "grammar" else None,
        json_object=message.json_object if given == "json_object" else None,
        disable_any_whitespace=message.disable_any_whitespace,
        reasoning=reasoning,
    )


def _marks(message: ReasoningMessage) -> ReasoningMarks:
    return ReasoningMarks(tuple(message.end.ids), tuple(tuple(opening.ids) for opening in message.openings))


ACTIVATIONS: Mapping[int, str] = {
    LABEL_ACTIVATION_SOFTMAX: SOFTMAX,
    LABEL_ACTIVATION_SIGMOID: SIGMOID,
    LABEL_ACTIVATION_IDENTITY: IDENTITY,
}
"""By what a request says."""
PART_BYTES = 8192
"""Of a part's log probabilities, beyond which it takes no further token."""


def logprobs_message(tokens: Sequence[TokenLogprob]) -> TokenLogprobs:
    """Return the log probabilities at one position."""
    entries = [
        LogprobEntry(token_id=token.token_id, logprob=token.logprob, rank=token.rank, text=token.text)
        for token in tokens
    ]
    return TokenLogprobs(entries=entries)


class PromptParts:
    """How far the parts of a request's prompts go in its log, and what is to be added."""

    def __init__(self, spec: RequestSpec, ends: Mapping[int, int]) -> None:
        self._spec = spec
        self._ends = dict(ends)

    def are_complete(self, first: int) -> bool:
        """Whether the log has all that is wanted of a prompt, whose first choice is given."""
        end = self._ends.get(first, 0)
        if self._spec.HasField("pooling"):
            return end > 0
        return 0 < end >= len(self._spec.prompts[first // max(1, self._spec.sampling.n)].ids) - 1

    def missing(self, first: int, output: SequenceOutput) -> list[tuple[int, bytes]]:
        """Return the parts that the log lacks: of each PromptPart.end, and the part without it."""
        begin = self._ends.get(first, 0)
        if output.pooled is None:
            parts = list(logprob_parts(output.prompt_logprobs or (), begin))
        else:
            parts = [] if begin else [embedding_part(output.pooled, self._spec.pooling)]
        if parts:
            self._ends[first] = parts[-1][0]
        return parts


def logprob_parts(rows: Sequence[Sequence[TokenLogprob]], begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the log probabilities of a prompt's tokens from the second on, in parts of about PART_BYTES.

    Args:
        rows: of all these tokens.
        begin: how many of them the log has already.

    Yields:
        PromptPart.end, and the part without it. Where parts end is a function of the rows' sizes alone.
    """
    part, num_bytes = PromptPart(), 0
    for end, row in enumerate(rows[begin:], begin + 1):
        message = logprobs_message(row)
        part.logprobs.append(message)
        num_bytes += message.ByteSize()
        if num_bytes >= PART_BYTES or end == len(rows):
            yield end, part.SerializeToString()
            part, num_bytes = PromptPart(), 0


def embedding_part(states: bytes, pooling: Pooling) -> tuple[int, bytes]:
    """Return PromptPart.end and the part of a vector: pooled states, cut and normalised as was asked for; or the
    probabilities of labels.

    Args:
        states: `SequenceOutput.pooled`.
    """
    if pooling.activation:
        vector = probabilities_of(states, ACTIVATIONS[pooling.activation])
    else:
        vector = vector_of(states, dimensions=pooling.dimensions, normalize=pooling.normalize)
    return len(vector), PromptPart(embedding=vector.astype(STATES_DTYPE).tobytes()).SerializeToString()
