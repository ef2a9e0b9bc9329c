"""From a step's tokens to outputs: text, log probabilities, and what ends.

`OutputProcessor.process` is called once a step. A sequence's text is a pure function of its tokens (`take`), which
`IncrementalDetokenizer` makes. What one request's text raises is its own end.

`IncrementalDetokenizer` stands in place of `tokenizers.DecodeStream`, which was tried first (0.23): that raises
"Invalid prefix" on byte-fallback bytes that form no character, takes quadratic time over such bytes, and does not show
what it holds back. Here a token is a piece of bytes, and the stream of bytes is decoded as UTF-8, which is linear and
never fails. See docs/design/tool-calls.md#tokenizing-prompts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from codecs import utf_8_decode
from collections import abc
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pagestream_grammars import TokenTable
from tokenizers import Tokenizer

from pagestream_engine.errors import InvalidRequest, RequestFault
from pagestream_engine.plan import Float32Array, ScheduledStep, StepLogprobs, StepPromptLogprobs, StepResult
from pagestream_engine.request import LogprobRow, Sequence, SequenceOutput, SequenceState, TokenLogprob
from pagestream_engine.sampling_params import STATES_DTYPE

if TYPE_CHECKING:
    from pagestream_engine.features.beams import RunningSearch, Searches
    from pagestream_engine.scheduler.scheduler import Scheduler


_log = logging.getLogger(__name__)


class OutputProcessor:
    """Makes outputs of tokens that their sequences have got, and finishes the sequences that end with them.

    Args:
        scheduler: frees what a finished sequence holds.
        sequences: each unfinished sequence with a text, by its seq_id; finished ones are taken out.
        pieces: makes the texts of log probabilities; None without a tokenizer.
    """

    def __init__(self, scheduler: Scheduler, sequences: dict[str, Sequence], pieces: Pieces | None) -> None:
        self._scheduler = scheduler
        self._sequences = sequences
        self.searches: Searches | None = None
        """The beam searches, whose beams have no text; None before the first one."""
        self._pieces = pieces

    def process(
        self, step: ScheduledStep, tokens: abc.Sequence[abc.Sequence[int]], result: StepResult
    ) -> list[SequenceOutput]:
        """Return an output for each prompt whose log probabilities are complete, then one for each new token.

        What a step has sampled for a sequence past its end, or after it was aborted, is dropped.

        Args:
            step: a collected step, after `Scheduler.update_from_output`.
            tokens: `result.tokens()`.
        """
        outputs: list[SequenceOutput] = []
        if result.prompt_logprobs is not None:
            outputs += self._take_prompt_logprobs(step, result.prompt_logprobs)
        if (
            result.has_one_each
            and result.logprobs is None
            and not any(chunk.needs_sample and chunk.seq.ends_with_prompt for chunk in step.prefills)
        ):
            outputs += self._take_one_each(step.sampled(), tokens)
        else:
            outputs += self._take_tokens(step.sampled(), tokens, result)
        return outputs

    def _take_tokens(
        self, sampled: list[Sequence], tokens: abc.Sequence[abc.Sequence[int]], result: StepResult
    ) -> list[SequenceOutput]:
        """Return an output for each new token, up to the end of its sequence."""
        errors, logprobs = result.errors, logprob_rows(result.logprobs)
        pooled = {} if result.pooled is None else result.pooled.by_sample()
        outputs: list[SequenceOutput] = []
        ended: list[Sequence] = []
        searches = self.searches
        advanced: dict[int, RunningSearch] = {}
        for place, (seq, token_ids) in enumerate(zip(sampled, tokens, strict=True)):
            if seq.state is not SequenceState.RUNNING:
                continue  # It ended while the step was in flight.
            if searches is not None and seq.params.use_beam_search:
                if place in errors:
                    outputs += searches.fail(seq.seq_id, errors[place])
                elif token_ids:
                    running = searches.note(seq, logprobs[place][0])
                    advanced[id(running)] = running
                continue
            if seq.ends_with_prompt and place not in errors:
                taken = [ended_prompt(seq, pooled.get(place))]
            else:
                taken = self._take_some(seq, token_ids, logprobs.get(place))
            if place in errors and not (taken and taken[-1].finish_reason is not None):
                taken.append(failed_output(seq, errors[place]))
            outputs += taken
            if taken and taken[-1].finish_reason is not None:
                ended.append(seq)
        if ended:
            self._finish(ended)
        if searches is not None:
            due = [running for running in advanced.values() if running.is_due]
            outputs += [output for running in due for output in searches.advance(running)]
        return outputs

    def _take_some(
        self, seq: Sequence, token_ids: abc.Sequence[int], logprobs: list[LogprobRow] | None
    ) -> list[SequenceOutput]:
        """Return the outputs of one sequence's new tokens, up to its end."""
        outputs: list[SequenceOutput] = []
        for index, token_id in enumerate(token_ids):
            output = output_of(seq, token_id, seq.num_output_tokens - len(token_ids) + index + 1)
            if logprobs is not None:
                output = with_logprobs(output, logprobs[index], seq, self._pieces)
            outputs.append(output)
            if output.finish_reason is not None:
                break
        return outputs

    def _take_one_each(self, sampled: list[Sequence], tokens: abc.Sequence[abc.Sequence[int]]) -> list[SequenceOutput]:
        """Do `_take_tokens` for a step without errors, drafts and log probabilities: most steps."""
        running = SequenceState.RUNNING
        outputs: list[SequenceOutput] = []
        ended: list[Sequence] = []
        for seq, (token_id,) in zip(sampled, tokens, strict=True):
            if seq.state is not running:
                continue  # It ended while the step was in flight.
            output = output_of(seq, token_id, len(seq.token_ids) - seq.num_prompt_tokens)
            outputs.append(output)
            if output.finish_reason is not None:
                ended.append(seq)
        if ended:
            self._finish(ended)
        return outputs

    def _take_prompt_logprobs(self, step: ScheduledStep, given: StepPromptLogprobs) -> list[SequenceOutput]:
        """Keep what chunks report of their prompts. Return an output for each prompt that is complete."""
        outputs: list[SequenceOutput] = []
        for part in prompt_logprob_rows(given):
            seq = step.prefills[part.scheduled].seq
            if seq.state is not SequenceState.RUNNING or not seq.wants_prompt_logprobs:
                continue  # It ended while the step was in flight, or another choice has reported the prompt.
            rows = seq.prompt_rows
            rows[part.position - 1 :] = part.rows  # A preempted prompt is computed again, from its beginning.
            if len(rows) == seq.num_prompt_tokens - 1:
                for member in seq.request.sequences:
                    member.wants_prompt_logprobs = False
                outputs.append(with_prompt_logprobs(seq, rows, self._pieces))
                rows.clear()
                if outputs[-1].finish_reason is not None:
                    self._finish([seq])
        return outputs

    def _finish(self, ended: list[Sequence]) -> None:
        for seq in ended:
            del self._sequences[seq.seq_id]
        self._scheduler.finish_requests(ended)


REPLAY_TOKENS = 512
"""Output tokens that are replayed without a pause: 1.5 ms, with stop strings 7 ms."""


class Taken(NamedTuple):
    """What one token came to."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def begin_text(
    seq: Sequence,
    detokenizer: IncrementalDetokenizer | None,
    eos_token_ids: frozenset[int] = frozenset(),
    hidden_stops: Mapping[int, str] | None = None,
) -> None:
    """Prepare a sequence for `take`.

    Its text and its end are a pure function of its prompt, its parameters and its output tokens. So a resumed sequence
    goes on exactly: `replay` takes its former tokens.

    Args:
        detokenizer: makes its text; None: it has none.
        hidden_stops: see `Sequence`.
    """
    params = seq.params
    seq.detokenizer = detokenizer
    seq.stop_token_ids = frozenset(params.stop_token_ids or ())
    if not params.ignore_eos:
        seq.stop_token_ids -= eos_token_ids
    seq.hidden_stops = hidden_stops or {}
    if params.stop:
        include = params.include_stop_str_in_output
        seq.stop_matcher = StopStringMatcher(params.stop_strings, include_stop_string=include)


def replay(seq: Sequence, output_token_ids: abc.Sequence[int]) -> Generator[None, None, Taken | None]:
    """Take the tokens of an earlier run, in parts of REPLAY_TOKENS, and yield after each.

    Returns:
        What the last one came to, where the output ends with it.

    Raises:
        InvalidRequest: there is no text of a token, or there are tokens after the end.
    """
    end = None
    for count, token_id in enumerate(output_token_ids, 1):
        if end is not None:
            raise InvalidRequest(
                f"output_token_ids: given {len(output_token_ids)} tokens, expected at most {count - 1}, "
                "where the output ends by its parameters; resume with the parameters of the first run"
            )
        try:
            taken = take(seq, token_id, count)
        except BaseException as error:
            if not is_fault_of_request(error):
                raise
            raise InvalidRequest(
                f"output_token_ids: given {token_id}, which the tokenizer can't make text of, expected ids of its "
                f"vocabulary: {error}"
            ) from error
        if taken.finish_reason is not None:
            end = taken
        elif count % REPLAY_TOKENS == 0:
            yield
    yield
    return end


def take(seq: Sequence, token_id: int, num_output_tokens: int) -> Taken:
    """Take the next token of a sequence, the `num_output_tokens`-th of its output."""
    # Output tokens from which an end token ends it. A grammar lets no end come earlier, unless it must.
    first_end = 0 if seq.params.structured_outputs is not None else seq.params.min_tokens
    is_end = token_id in seq.end_token_ids and num_output_tokens >= first_end
    text = ""
    if seq.detokenizer is not None and not (is_end and not seq.params.include_stop_str_in_output):
        text = seq.detokenizer.push(token_id)
    if seq.stop_matcher is not None and num_output_tokens > seq.params.min_tokens:
        text, stop_string = seq.stop_matcher.push(text)
        if stop_string is not None:
            return Taken(text, "stop", stop_string)
        if not is_end and (hidden := seq.hidden_stops.get(token_id)) is not None:
            shown = hidden if seq.params.include_stop_str_in_output else ""
            return Taken(text + _flush(seq) + shown, "stop", hidden)
    if is_end:
        return Taken(text + _flush(seq), "stop", token_id if token_id in seq.stop_token_ids else None)
    if num_output_tokens >= seq.requested_total_tokens - seq.num_prompt_tokens:
        return Taken(text + _flush(seq), "length")
    return Taken(text)


def _flush(seq: Sequence) -> str:
    """Everything that was held back: an unfinished character, the beginning of a stop string."""
    rest = seq.detokenizer.flush() if seq.detokenizer is not None else ""
    if seq.stop_matcher is None:
        return rest
    return seq.stop_matcher.push(rest)[0] + seq.stop_matcher.flush()


def output_of(seq: Sequence, token_id: int, num_output_tokens: int) -> SequenceOutput:
    """Return the output of a sequence's next token, the `num_output_tokens`-th of its output."""
    try:
        if (
            num_output_tokens < seq.requested_total_tokens - seq.num_prompt_tokens
            and token_id not in seq.end_token_ids
            and seq.stop_matcher is None
        ):  # It plainly ends nothing: most tokens.
            text = seq.detokenizer.push(token_id) if seq.detokenizer is not None else ""
            return SequenceOutput(seq.seq_id, token_id, text, None, None, seq.num_cached_tokens)
        text, finish, stop = take(seq, token_id, num_output_tokens)
    except BaseException as error:  # noqa: BLE001 - what one request's text raises must not fail its neighbours
        return _failed_by(error, seq, token_id)
    return SequenceOutput(seq.seq_id, token_id, text, finish, stop, seq.num_cached_tokens)


def token_logprobs(row: LogprobRow, pieces: Pieces | None) -> tuple[TokenLogprob, ...]:
    """Return what an output has of a row; without `pieces` the tokens' texts are empty."""
    return tuple(
        TokenLogprob(token_id, logprob, index or row.rank, pieces.shown(token_id) if pieces is not None else "")
        for index, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True))
    )


def with_logprobs(output: SequenceOutput, row: LogprobRow, seq: Sequence, pieces: Pieces | None) -> SequenceOutput:
    """Return a token's output with its log probabilities."""
    try:
        output.logprobs = token_logprobs(row, pieces)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, output.token_id)
    return output


def with_prompt_logprobs(seq: Sequence, rows: list[LogprobRow], pieces: Pieces | None) -> SequenceOutput:
    """Return the output of a prompt whose log probabilities are complete."""
    try:
        prompt_logprobs = tuple(token_logprobs(row, pieces) for row in rows)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, None)
    return SequenceOutput(seq.seq_id, None, "", prompt_logprobs=prompt_logprobs)


def ended_prompt(seq: Sequence, states: Float32Array | None) -> SequenceOutput:
    """Return the end of a sequence that ends with its prompt, with the (hidden_size,) states pooled from it."""
    if states is None:
        return SequenceOutput(seq.seq_id, None, "", "length", None, seq.num_cached_tokens)
    if not np.isfinite(states).all():
        return failed_output(seq, "the hidden states of the prompt are not finite")
    pooled = states.astype(STATES_DTYPE).tobytes()
    return SequenceOutput(seq.seq_id, None, "", "stop", None, seq.num_cached_tokens, pooled=pooled)


def failed_output(seq: Sequence, error: str, token_id: int | None = None) -> SequenceOutput:
    """Return the end of a sequence that failed, with the token that it failed at, if there is one."""
    is_fault = isinstance(error, RequestFault)
    return SequenceOutput(seq.seq_id, token_id, "", "error", None, seq.num_cached_tokens, error, is_fault)


def _failed_by(error: BaseException, seq: Sequence, token_id: int | None) -> SequenceOutput:
    """Return the end of a sequence whose text has raised; raise what is no request's fault."""
    if not is_fault_of_request(error):
        raise error
    _log.error("request %s failed", seq.seq_id, exc_info=error)
    return failed_output(seq, f"{type(error).__name__}: {error}", token_id)


class PromptRows(NamedTuple):
    """What a chunk reports of its prompt."""

    scheduled: int
    """Index of its row in the step."""
    position: int
    """Place in the prompt of the first token that is reported."""
    rows: list[LogprobRow]


def prompt_logprob_rows(given: StepPromptLogprobs) -> Iterator[PromptRows]:
    """Yield the rows of each chunk that reports some."""
    token_ids, logprobs, ranks = given.token_ids.tolist(), given.logprobs.tolist(), given.ranks.tolist()
    first = 0
    columns = (given.scheduled, given.positions, given.num_tokens, given.counts)
    for scheduled, position, num_tokens, count in zip(*(each.tolist() for each in columns), strict=True):
        places = range(first, first + num_tokens)
        width = count + 1
        rows = [LogprobRow(token_ids[place][:width], logprobs[place][:width], ranks[place]) for place in places]
        yield PromptRows(scheduled, position, rows)
        first += num_tokens


def logprob_rows(given: StepLogprobs | None) -> dict[int, list[LogprobRow]]:
    """Return the rows of each sample that asked for them, one for each of its tokens, by its index.

    Args:
        given: the step's; None where no sample asked for any.
    """
    rows: dict[int, list[LogprobRow]] = {}
    if given is None:
        return rows
    columns = (given.samples, given.counts, given.token_ids, given.logprobs, given.ranks)
    for sample, count, token_ids, logprobs, rank in zip(*(each.tolist() for each in columns), strict=True):
        row = LogprobRow(token_ids[: count + 1], logprobs[: count + 1], rank)
        rows.setdefault(sample, []).append(row)
    return rows


_LONGEST_CHARACTER = 4  # bytes of UTF-8


class _Word(bytes):
    """A piece that a space follows, unless the text ends there."""


_SPACE = _Word(b" ")


class Pieces:
    """What each token adds to a text that it does not begin, found on first use: text, or bytes where it is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = TokenTable(tokenizer)
        self._shown = _PieceTable(self._piece)
        self._hidden = _PieceTable(self._piece, hidden=self.tokens.special_ids)

    def table(self, *, skip_special_tokens: bool) -> Mapping[int, str | bytes]:
        """The piece of each token. An id without a token (a padded vocabulary) is empty."""
        return self._hidden if skip_special_tokens else self._shown

    def shown(self, token_id: int) -> str:
        """The token alone, special ones too, as a text that a person can read: U+FFFD for what is no character."""
        piece = self._shown[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def _piece(self, token_id: int) -> str | bytes:
        raw = self.tokens.spelled(token_id)
        return _Word(raw) if self.tokens.ends_word(token_id) else _text_if_complete(raw)


class _PieceTable(dict[int, str | bytes]):
    """Finds a piece when it is first asked for."""

    def __init__(self, read: Callable[[int], str | bytes], hidden: Collection[int] = ()) -> None:
        super().__init__()
        self._read = read
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = "" if token_id in self._hidden else self._read(token_id)
        return piece


class IncrementalDetokenizer:
    """The text of one sequence's output, as deltas.

    The text is a pure function of the tokens: the same deltas come out of a replay. For byte-level tokenizers it is
    the UTF-8 text of all bytes with U+FFFD for each maximal invalid part, as `Tokenizer.decode` has it; for byte
    fallback the same rule holds (`decode` spoils valid neighbours of an invalid byte). Spaces at the beginning are
    kept: the output goes on from the prompt.
    """

    __slots__ = ("_pending", "_pieces")

    def __init__(
        self, pieces: Pieces, prompt_token_ids: abc.Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces.table(skip_special_tokens=skip_special_tokens)
        self._pending = self._unfinished(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; bytes of an unfinished character wait, and a space after a word."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            raw = self._pending + piece.encode()
        else:
            raw = self._pending + piece
        text, used = utf_8_decode(raw, "replace", False)
        self._pending = _SPACE if isinstance(piece, _Word) else raw[used:]
        return text

    def flush(self) -> str:
        """The rest, now that nothing follows: U+FFFD for an unfinished character."""
        pending, self._pending = self._pending, b""
        return "" if pending is _SPACE else utf_8_decode(pending, "replace", True)[0]

    def _unfinished(self, prompt_token_ids: abc.Sequence[int]) -> bytes:
        """The bytes at the end of the prompt that the first output tokens may complete to a character, or the space
        before them."""
        tail = b""
        for token_id in reversed(prompt_token_ids[-2 * _LONGEST_CHARACTER :]):
            piece = self._pieces[token_id]
            if isinstance(piece, _Word):
                return tail or _SPACE
            if isinstance(piece, str) and piece:
                break
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        _, used = utf_8_decode(tail, "replace", False)
        return tail[used:]


def _text_if_complete(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class StopMatch(NamedTuple):
    """What a piece of text came to."""

    text: str
    """What may be shown now."""
    stop_string: str | None
    """The stop string that ended it."""


class StopStringMatcher:
    """Finds the stop string that is complete first, wherever the token borders fall.

    Text that may be the beginning of a stop string is held back until that is decided, so that what was shown is never
    taken back. The result depends on the characters alone, not on how they were cut into pieces, but for one thing:
    what follows the match in the same piece is dropped.
    """

    def __init__(self, stop_strings: abc.Sequence[str], *, include_stop_string: bool = False) -> None:
        self._stops = sorted(set(stop_strings))
        self._first = frozenset(stop[0] for stop in self._stops)
        self._shortest = min(map(len, self._stops), default=0)
        self._longest = max(map(len, self._stops), default=1)
        self._include = include_stop_string
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text."""
        if not self._held and self._first.isdisjoint(text):
            return StopMatch(text, None)
        text = self._held + text
        stops = self._stops if len(text) >= self._shortest else ()
        found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include else start], stop)
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return StopMatch(text[:keep], None)

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of some stop string, but not all of it."""
        stops, first = self._stops, self._first
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in first:
                end = text[start:]
                place = bisect_left(stops, end)  # those that begin with it follow it in order
                if place < len(stops) and stops[place].startswith(end):
                    return len(end)
        return 0


_PANIC = "PanicException"
"""Name of the type that pyo3 raises for a panic of Rust: a BaseException, and one of its own in each extension."""


def is_fault_of_request(error: BaseException) -> bool:
    """Whether an error belongs to the request whose text was made: any Exception, and a panic of the tokenizer.

    What ends the program (KeyboardInterrupt, SystemExit) or a generator does not.
    """
    return isinstance(error, Exception) or type(error).__name__ == _PANIC
