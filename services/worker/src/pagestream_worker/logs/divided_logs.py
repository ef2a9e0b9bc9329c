"""Logs in C++ for requests whose tokens are plain, and in Python for the others."""

from collections.abc import Collection, Sequence

from pagestream_streams import Claim

from pagestream_worker.logs.base import PendingLogs, TokenLog, has_plain_tokens
from pagestream_worker.logs.native_logs import NativeLogs
from pagestream_worker.logs.python_logs import PythonLogs
from pagestream_worker.logs.token_columns import TokenColumns

FIRST_PYTHON_HANDLE = 1 << 62
"""Handles of the logs in Python begin here, far above those that C++ gives."""


class DividedLogs:
    """See TokenLogs.

    C++ takes all plain tokens of a step in one call. What is written entry by entry costs more there, a call for each,
    than in Python: log probabilities, and the tokens of several choices.

    Args:
        native: for plain tokens.
        limit_bytes: of all packed entries.
    """

    def __init__(self, native: NativeLogs, limit_bytes: int) -> None:
        self.native = native
        self._python = PythonLogs(limit_bytes, first_handle=FIRST_PYTHON_HANDLE)
        self.limit_bytes = limit_bytes
        """See TokenLogs."""

    @property
    def held_bytes(self) -> int:
        """See TokenLogs."""
        return self.native.held_bytes + self._python.held_bytes

    @property
    def is_exceeded(self) -> bool:
        """See TokenLogs."""
        return self.held_bytes > self.limit_bytes

    def open(self, claim: Claim) -> TokenLog:
        """See TokenLogs."""
        return self.native.open(claim) if has_plain_tokens(claim.spec) else self._python.open(claim)

    def take(self, tokens: TokenColumns) -> None:
        """See TokenLogs."""
        self.native.take(tokens)

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """See TokenLogs."""
        found = self.native.pending(limit, without)
        return PendingLogs(found.batches, [*found.others, *self._python.pending(limit, without).others])

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """See TokenLogs. Those of batches, which are all in C++."""
        return self.native.acknowledge(logs, next_indexes)
