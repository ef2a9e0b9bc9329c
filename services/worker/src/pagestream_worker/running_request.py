"""A claimed request on this engine: the sequences that it runs as, and the log entries that they become."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pagestream.v1.inference_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    RequestError,
    TokenIds,
    Usage,
)
from pagestream_engine.errors import RequestFault
from pagestream_engine.request import StepOutput
from pagestream_engine.sampling_params import SamplingParams
from pagestream_streams import Append, Claim
from pagestream_streams.protocol.records import (
    END,
    FINISH,
    INVALID_REQUEST,
    PART,
    TOKEN,
    ClaimedLog,
    error_text,
    finish_reason_name,
    is_prompt_alone,
    output_bounds,
    parse_finish_reason,
    usage_text,
)
from pagestream_telemetry.tracing import TraceContext, caller_context

from pagestream_worker.logs.token_logs import TokenLogs, has_plain_tokens
from pagestream_worker.request_messages import PromptParts, child_of, logprobs_message, sampling_of, sampling_of_child


def error_code(error: str) -> str:
    """Return the code of what a sequence ended with: whether its request is at fault."""
    return INVALID_REQUEST if isinstance(error, RequestFault) else "engine_error"


@dataclass(frozen=True)
class Choice:
    """One sequence to run, or to go on with after another engine."""

    seq_id: str
    index: int
    prompt: TokenIds
    params: SamplingParams
    output_token_ids: Sequence[int]


class RunningRequest:
    """The log of one claimed request, with the entries that this engine has generated."""

    __slots__ = (
        "_cached_tokens",
        "_ended",
        "_finishes",
        "_held",
        "_num_choices",
        "_num_tokens",
        "_prompt_parts",
        "_resumed",
        "_running",
        "_siblings",
        "claim",
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
        self._held: defaultdict[int, deque[StepOutput]] = defaultdict(deque)  # generated before their turn
        self._finishes = dict(claim.log.finishes)
        self._prompt_parts = PromptParts(claim.spec, claim.log.prompt_ends)
        self._running: set[int] = set()
        self._cached_tokens = claim.cached_tokens
        self.log = logs.open(claim)
        self._ended = False

    @property
    def trace(self) -> TraceContext:
        """The trace of the call that accepted the request; NO_TRACE where there is none."""
        return caller_context(self.claim.spec.traceparent, self.claim.spec.tracestate)

    # -- to the engine --

    def open_choices(self) -> Iterator[Choice]:
        """Yield the choices whose log has no finish yet."""
        of_all: SamplingParams | None = None  # checked once: the choices are many, and their lists may be long
        bounds = output_bounds(self.claim.spec)
        for index, tokens in self._resumed.items():
            if index in self._finishes:
                continue
            of_all = of_all or sampling_of(self.claim.spec)
            params = sampling_of_child(of_all, child_of(self.claim.spec, index))
            prompt = self.claim.spec.prompts[index // self._siblings]
            if self.claim.spec.max_total_tokens:
                params = params.with_max_tokens(bounds[index // self._siblings])
            if self._prompt_parts.are_complete(index - index % self._siblings):
                if is_prompt_alone(self.claim.spec):
                    reason = FINISH_REASON_STOP if self.claim.spec.HasField("pooling") else FINISH_REASON_LENGTH
                    self._write_finish(index, reason, "", "")
                    continue
                params = params.without_prompt_logprobs()
            choice = Choice(self._seq_id(index), index, prompt, params, tokens)
            self._running.add(index)
            yield choice

    def open_groups(self) -> Iterator[list[Choice]]:
        """Yield `open_choices` by prompt: siblings, which the engine runs as one group."""
        for _, choices in groupby(self.open_choices(), key=lambda choice: choice.index // self._siblings):
            yield list(choices)

    @property
    def num_siblings(self) -> int:
        """Choices of each prompt."""
        return self._siblings

    @property
    def is_plain(self) -> bool:
        """See has_plain_tokens."""
        return has_plain_tokens(self.claim.spec)

    def running_seq_ids(self) -> list[str]:
        """Return the sequences that run in the engine, once: the caller aborts them."""
        running = [self._seq_id(index) for index in sorted(self._running)]
        self._running.clear()
        return running

    # -- from the engine --

    def add_output(self, choice: int, output: StepOutput) -> None:
        """Add one step's output of a choice to the log; the last choice's finish also ends the log."""
        if choice in self._finishes:
            return
        if output.prompt_logprobs is not None or output.pooled is not None:
            first = choice - choice % self._siblings
            for end, part in self._prompt_parts.take(first, output):
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

    def _add(self, choice: int, output: StepOutput) -> None:
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
        if not self._ended and len(self._finishes) == self._num_choices:
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
        return self._ended and not self.log.has_pending

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

    def _finish_choice(self, choice: int, output: StepOutput) -> None:
        reason = parse_finish_reason(output.finish_reason) if output.finish_reason else FINISH_REASON_ERROR
        stop_reason = "" if output.stop_reason is None else str(output.stop_reason)
        self._write_finish(choice, reason, stop_reason, output.text)
        if output.error is not None:
            self.fail(error_code(output.error), output.error)
        self.end_if_complete()

    def _write_finish(self, choice: int, reason: FinishReason, stop_reason: str, text: str) -> None:
        self._finishes[choice] = reason
        self._running.discard(choice)
        self.log.write(FINISH, str(choice), finish_reason_name(reason), text, stop_reason)

    def _end(self, error: RequestError | None) -> None:
        if self._ended:
            return
        self._ended = True
        usage = Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self.claim.spec.prompts),
            completion_tokens=self.num_output_tokens,
            cached_tokens=self._cached_tokens,
        )
        reason = FINISH_REASON_ERROR if error is not None else self._finishes[0]
        stored_error = "" if error is None else error_text(error)
        self.log.write(END, str(int(time.time())), finish_reason_name(reason), usage_text(usage), stored_error)
