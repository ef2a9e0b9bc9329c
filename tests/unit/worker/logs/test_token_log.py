"""What an engine can send again, whatever it has packed and dropped: with the logs in Python and in C++."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pagestream.v1.inference_pb2 import LogprobEntry, TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEntry, RequestSpec
from pagestream_streams import Claim
from pagestream_streams.protocol import digests
from pagestream_streams.protocol.entries import to_entry_values, to_log_entry
from pagestream_worker.logs.base import PACKED_ENTRIES, TokenLogs
from support.engines.token_logs import KINDS

LIMIT = 20_000
BEFORE = digests.chained("", [LogEntry(token_id=number) for number in range(3)])


def token(number: int) -> LogEntry:
    logprobs = TokenLogprobs(entries=[LogprobEntry(token_id=7, logprob=-1.5, rank=1, text=" word")] * (number % 3))
    return LogEntry(token_id=number, text=f" {number}", logprobs=logprobs)


class Logs(RuleBasedStateMachine):
    """A log beside the list of all that was written to it."""

    def __init__(self, make_logs: Callable[[int], TokenLogs]) -> None:
        super().__init__()
        claim = Claim(
            spec=RequestSpec(request_id="r"),
            epoch=1,
            nonce="a",
            next_index=len(BEFORE),
            digest=BEFORE[-1].digest,
            attempts=2,
            cached_tokens=0,
            deadline=None,
        )
        self.logs = make_logs(LIMIT)
        self.log = self.logs.open(claim)
        self.written = list(BEFORE)
        self.first = len(BEFORE)

    @rule(count=st.integers(1, 3 * PACKED_ENTRIES), finishes=st.booleans())
    def write(self, count: int, finishes: bool) -> None:
        entries = [token(len(self.written) + number) for number in range(count)]
        if finishes:
            entries.append(LogEntry(finish=ChoiceFinish(reason=1)))
        for entry in entries:
            kind, choice, value, text, _, extra = to_entry_values(entry)
            self.log.write(kind, choice, value, text, extra)
        self.written += digests.chained(self.written[-1].digest, entries)

    @precondition(lambda self: self.log.has_pending)
    @rule(limit=st.integers(1, 40))
    def append(self, limit: int) -> None:
        start = self.log.next_index
        entries, previous = self.log.pending(limit)
        assert list(map(to_log_entry, entries)) == self.written[start : start + len(entries)]
        assert previous == self.written[start - 1].digest
        follows = self.written[start + limit : start + limit + 1]
        splits = bool(follows) and follows[0].HasField("finish")
        assert len(entries) == min(limit + splits, len(self.written) - start)
        self.log.acknowledge(start + len(entries))

    @rule(back=st.integers(0, 200))
    def lose(self, back: int) -> None:
        """Redis lost its last entries."""
        index = max(0, self.log.next_index - back)
        assert self.log.can_send_from(index) == (index >= self.first)
        if index >= self.first:
            self.log.acknowledge(index)

    @rule()
    def drop(self) -> None:
        if self.log.drop_oldest():
            self.first += PACKED_ENTRIES
            assert self.first <= self.log.next_index, "it is not acknowledged"
        else:
            assert self.log.next_index < self.first + PACKED_ENTRIES or self.log.num_bytes == 0

    @invariant()
    def counts(self) -> None:
        assert self.logs.held_bytes == self.log.num_bytes >= 0
        assert self.logs.is_exceeded == (self.log.num_bytes > LIMIT)
        assert not self.log.can_send_from(len(self.written) + 1)
        assert self.log.has_pending == (self.log.next_index < len(self.written))

    def teardown(self) -> None:
        self.log.close()
        assert self.logs.held_bytes == 0


@pytest.mark.parametrize("make_logs", KINDS)
def test_a_log_sends_what_was_written_to_it(make_logs: Callable[[int], TokenLogs]) -> None:
    run_state_machine_as_test(
        lambda: Logs(make_logs), settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
