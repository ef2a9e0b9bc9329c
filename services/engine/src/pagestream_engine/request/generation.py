"""What one sequence's tokens come to: text, and the reason to end."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

from pagestream_engine.request.sequence import Sequence
from pagestream_engine.text.detokenizer import IncrementalDetokenizer
from pagestream_engine.text.stop_strings import StopStringMatcher


class Taken(NamedTuple):
    """What one token came to."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation:
    """The text and stop state of one sequence: a pure function of its prompt, its parameters and its output tokens.

    So a resumed sequence goes on exactly: its former tokens are replayed through `take`.
    """

    __slots__ = ("_detokenizer", "_matcher", "_stop_token_ids", "seq")

    def __init__(
        self, seq: Sequence, detokenizer: IncrementalDetokenizer | None, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        params = seq.params
        self.seq = seq
        self._detokenizer = detokenizer
        self._stop_token_ids = frozenset(params.stop_token_ids or ()) - (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        include = params.include_stop_str_in_output
        stops = params.stop_strings
        self._matcher = StopStringMatcher(stops, include_stop_string=include) if stops else None

    def replay(self, output_token_ids: Tokens[int]) -> tuple[int, Taken | None]:
        """Take the tokens of an earlier run. Return how many led up to the end, and that end, if it is among them."""
        for index, token_id in enumerate(output_token_ids):
            taken = self.take(token_id, index + 1)
            if taken.finish_reason is not None:
                return index + 1, taken
        return len(output_token_ids), None

    def take(self, token_id: int, num_output_tokens: int) -> Taken:
        """Take the next token, the `num_output_tokens`-th of the output."""
        seq = self.seq
        is_end = token_id in seq.end_token_ids and num_output_tokens >= seq.params.min_tokens
        text = ""
        if self._detokenizer is not None and not (is_end and not seq.params.include_stop_str_in_output):
            text = self._detokenizer.push(token_id)
        if self._matcher is not None and num_output_tokens > seq.params.min_tokens:
            text, stop_string = self._matcher.push(text)
            if stop_string is not None:
                return Taken(text, "stop", stop_string)
        if is_end:
            return Taken(text + self._flush(), "stop", token_id if token_id in self._stop_token_ids else None)
        if seq.num_prompt_tokens + num_output_tokens >= seq.max_total_tokens:
            return Taken(text + self._flush(), "length")
        return Taken(text)

    def _flush(self) -> str:
        """Everything that was held back: an unfinished character, the beginning of a stop string."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._matcher is None:
            return rest
        return self._matcher.push(rest).text + self._matcher.flush()
