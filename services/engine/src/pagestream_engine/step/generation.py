"""What one sequence's tokens come to: text, and the reason to end."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request import LogprobRow, TokenSequence
from pagestream_engine.text.detokenizer import IncrementalDetokenizer
from pagestream_engine.text.faults import is_fault_of_request
from pagestream_engine.text.stop_strings import StopStringMatcher

REPLAY_TOKENS = 512
"""Output tokens that are replayed without a pause: 1.5 ms, with stop strings 7 ms."""


class Taken(NamedTuple):
    """What one token came to."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation:
    """The text and stop state of one sequence: a pure function of its prompt, its parameters and its output tokens.

    So a resumed sequence goes on exactly: its former tokens are replayed through `take`.
    """

    __slots__ = (
        "_detokenizer",
        "_first_end",
        "_hidden_stops",
        "_matcher",
        "_most_output_tokens",
        "_stop_token_ids",
        "prompt_rows",
        "seq",
    )

    def __init__(
        self,
        seq: TokenSequence,
        detokenizer: IncrementalDetokenizer | None,
        eos_token_ids: frozenset[int] = frozenset(),
        hidden_stops: Mapping[int, str] | None = None,
    ) -> None:
        params = seq.params
        self.seq = seq
        self.prompt_rows: list[LogprobRow] = []
        """Of its prompt's tokens from the second on, as far as they are computed, until they are complete."""
        self._detokenizer = detokenizer
        self._most_output_tokens = seq.max_total_tokens - seq.num_prompt_tokens
        self._stop_token_ids = frozenset(params.stop_token_ids or ()) - (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        include = params.include_stop_str_in_output
        stops = params.stop_strings
        self._first_end = 0 if params.structured_outputs is not None else params.min_tokens
        """Output tokens from which an end token ends it. A grammar lets no end come earlier, unless it must."""
        self._hidden_stops = hidden_stops or {}
        """Stop strings that are special tokens which the text doesn't show, by their tokens."""
        self._matcher = StopStringMatcher(stops, include_stop_string=include) if stops else None

    def replay(self, output_token_ids: Sequence[int]) -> Generator[None, None, Taken | None]:
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
                taken = self.take(token_id, count)
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

    def take_plain(self, token_id: int, num_output_tokens: int) -> str | None:
        """Take the next token as `take` does, and return its text, where it plainly ends nothing: most tokens.

        None, and nothing done, where `take` has to look closer.
        """
        if (
            num_output_tokens >= self._most_output_tokens
            or token_id in self.seq.end_token_ids
            or self._matcher is not None
        ):
            return None
        return self._detokenizer.push(token_id) if self._detokenizer is not None else ""

    def take(self, token_id: int, num_output_tokens: int) -> Taken:
        """Take the next token, the `num_output_tokens`-th of the output."""
        seq = self.seq
        is_end = token_id in seq.end_token_ids and num_output_tokens >= self._first_end
        text = ""
        if self._detokenizer is not None and not (is_end and not seq.params.include_stop_str_in_output):
            text = self._detokenizer.push(token_id)
        if self._matcher is not None and num_output_tokens > seq.params.min_tokens:
            text, stop_string = self._matcher.push(text)
            if stop_string is not None:
                return Taken(text, "stop", stop_string)
            if not is_end and (hidden := self._hidden_stops.get(token_id)) is not None:
                shown = hidden if seq.params.include_stop_str_in_output else ""
                return Taken(text + self._flush() + shown, "stop", hidden)
        if is_end:
            return Taken(text + self._flush(), "stop", token_id if token_id in self._stop_token_ids else None)
        if num_output_tokens >= self._most_output_tokens:
            return Taken(text + self._flush(), "length")
        return Taken(text)

    def _flush(self) -> str:
        """Everything that was held back: an unfinished character, the beginning of a stop string."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._matcher is None:
            return rest
        return self._matcher.push(rest).text + self._matcher.flush()
