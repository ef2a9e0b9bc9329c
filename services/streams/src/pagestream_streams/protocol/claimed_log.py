"""What earlier engines generated for a request, in the form that an engine needs to go on."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagestream.v1.inference_pb2 import FinishReason
from pagestream.v1.records_pb2 import LogEntry

from pagestream_streams.protocol.finish_reasons import parse_finish_reason


@dataclass
class ClaimedLog:
    """The tokens and finishes of each choice, and how far the parts of prompts go.

    Texts, logprobs and the parts are left out: a token takes four bytes.
    """

    tokens: dict[int, array[int]] = field(default_factory=dict)
    """Token ids by choice."""
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    """By choice, of those that have finished."""
    prompt_ends: dict[int, int] = field(default_factory=dict)
    """By first choice of a prompt, how far its parts go (see PromptPart.end)."""

    @classmethod
    def of(cls, entries: Iterable[LogEntry]) -> ClaimedLog:
        """Return the log with these entries."""
        log = cls()
        for entry in entries:
            if entry.HasField("token_id"):
                log._add_token(entry.choice, entry.token_id)
            elif entry.HasField("finish"):
                log.finishes[entry.choice] = entry.finish.reason
            elif entry.HasField("prompt_part"):
                log.prompt_ends[entry.choice] = entry.prompt_part.end
        return log

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.tokens.values()))

    def add(self, fields: Mapping[bytes, bytes]) -> None:
        """Add a Redis stream entry. KeyError, ValueError or OverflowError where it can't be read."""
        token = fields.get(b"t")
        if token is not None:
            self._add_token(int(fields[b"c"]), int(token))
        elif b"p" in fields:
            self.prompt_ends[int(fields[b"c"])] = int(fields[b"p"])
        elif b"end" not in fields:
            self.finishes[int(fields[b"c"])] = parse_finish_reason(fields[b"f"].decode())

    def _add_token(self, choice: int, token_id: int) -> None:
        tokens = self.tokens.get(choice)
        if tokens is None:
            tokens = self.tokens[choice] = array("I")
        tokens.append(token_id)
