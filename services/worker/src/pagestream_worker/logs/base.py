"""The interface of the logs, which `PythonLogs`, `NativeLogs` and `DividedLogs` have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Claim
from pagestream_streams.protocol.records import EntryValues, TokenAppends, is_prompt_alone

from pagestream_worker.logs.token_columns import TokenColumns

PACKED_ENTRIES = 16
"""Entries of a part, the unit in which acknowledged entries are dropped."""


def has_plain_tokens(spec: RequestSpec) -> bool:
    """Whether an output of a request between its first and its last one is nothing but a token of choice 0, which
    `TokenLogs.take` writes.
    """
    sampling = spec.sampling
    comes_at_end = sampling.use_beam_search or sampling.HasField("best_of") or is_prompt_alone(spec)
    has_logprobs = sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")
    return len(spec.prompts) == 1 and sampling.n <= 1 and not has_logprobs and not comes_at_end


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The next appends of logs that lack nothing but plain tokens."""

    appends: TokenAppends
    logs: Sequence[int]
    """Their handles, in the order of the appends."""


@dataclass(frozen=True, slots=True)
class PendingLogs:
    """What the logs lack in Redis."""

    batches: Sequence[TokenBatch]
    """One for each partition."""
    others: Sequence[int]
    """Handles of the logs with other pending entries: `TokenLog.pending` returns them."""


class TokenLog(Protocol):
    """Entries of one claim's log from its next index on, and how far Redis has acknowledged them.

    Acknowledged ones are kept too, so that they can be appended again from any index that the log asks for: after a
    lost reply, or after Redis has lost its last seconds. They are the first to go where memory is short. A log that
    then asks for them is handed back, and generated again from there.
    """

    @property
    def handle(self) -> int:
        """Names it among the logs of this process, for ever; above 0."""

    @property
    def next_index(self) -> int:
        """Index of the first entry that is not acknowledged."""

    @property
    def num_taken(self) -> int:
        """Tokens that `TokenLogs.take` has written."""

    @property
    def num_bytes(self) -> int:
        """What its packed entries take."""

    @property
    def has_pending(self) -> bool:
        """Whether some entry has not been acknowledged."""

    def write(self, kind: str, choice: str, value: str, text: str, extra: str | bytes = "") -> None:
        """Add an entry with these values (see EntryValues), chained to the digest of those before it."""

    def pending(self, limit: int) -> tuple[Sequence[EntryValues], str]:
        """Return the next entries to append, and the digest of the log before them.

        At most `limit` entries, or one more to keep a choice's last token and its finish together: an engine that
        resumed between the two would write the prompt's other choices first.
        """

    def acknowledge(self, next_index: int) -> None:
        """Continue from the log's next index: ahead after an append, back after the log has lost entries."""

    def can_send_from(self, next_index: int) -> bool:
        """Whether the entry that the log asks for is kept here."""

    def drop_oldest(self) -> bool:
        """Drop the oldest packed entries; return False where none of them is acknowledged."""

    def close(self) -> None:
        """Give its memory back: the request is no longer this engine's."""


class TokenLogs(Protocol):
    """The logs of a process. For one thread."""

    limit_bytes: int
    """Most that the packed entries of all logs may take."""

    @property
    def held_bytes(self) -> int:
        """What the packed entries of all logs take."""

    @property
    def is_exceeded(self) -> bool:
        """Whether that is more than the limit, so that some of them must go."""

    def open(self, claim: Claim) -> TokenLog:
        """Return the log of a claim, without entries."""

    def take(self, tokens: TokenColumns) -> None:
        """Write plain tokens of choice 0, each to its log; those of logs that were closed or have ended are ignored."""

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """Return the next append of each log with pending entries.

        Args:
            limit: most entries of one log.
            without: handles of logs to leave out.
        """

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """`TokenLog.acknowledge` for many; closed ones are ignored. Return whether one of them has more pending."""
