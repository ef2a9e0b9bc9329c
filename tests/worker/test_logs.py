"""The logs in C++ append the bytes that those in Python append, whatever is written, lost, dropped and closed.

Both send what was written to them, and without a compiler there are those in Python.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pagestream.v1.inference_pb2 import LogprobEntry, TokenIds, TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, LogSlice, RequestSpec, WakeUp
from pagestream_engine import SequenceOutput
from pagestream_engine.wire.worker import NO_TOKENS, TokenColumns
from pagestream_streams import Append, Claim
from pagestream_streams.engine import append_arguments, slice_of
from pagestream_streams.protocol import chained, to_entry_values, to_log_entry
from pagestream_worker import (
    PACKED_ENTRIES,
    NativeLogError,
    PendingLogs,
    PlainSequences,
    PythonLog,
    PythonLogs,
    TokenLog,
    TokenLogs,
    load_library,
)
from support.engines.request_table import KINDS, native_logs

TOKEN, FINISH, END = (
    to_entry_values(entry)[0]
    for entry in (LogEntry(token_id=1), LogEntry(finish=ChoiceFinish(reason=1)), LogEntry(end=LogEnd(reason=1)))
)
"""What the values of an entry begin with."""

needs_library = pytest.mark.skipif(load_library() is None, reason="no C++ compiler")

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ['\0\x1f\x7f"\\/\b\f\n\r\t', "\u2028\u2029", "\U0001f600", "a" * 300]
)
token_ids = st.integers(0, 2**31 - 1)


def numbers(end: int) -> st.SearchStrategy[str]:
    return st.integers(0, end - 1).map(str)


tokens = st.tuples(st.just(TOKEN), numbers(2**31), numbers(2**31), texts, st.just("") | st.binary(max_size=300))
limits = st.integers(1, 3 * PACKED_ENTRIES)


def claim(number: int, partition: int | None, next_index: int) -> Claim:
    """Return a claim of plain tokens; partition None: of a request whose id names none."""
    request_id = f'r"{number}' if partition is None else f"2a97516c-{partition:04x}-{number:032x}"
    return Claim(
        spec=RequestSpec(request_id=request_id, prompts=[TokenIds(ids=[1])]),
        epoch=number,
        nonce=f"nonce-{number}",
        next_index=next_index,
        digest="0123456789abcdef" if next_index else "",
        attempts=1,
        cached_tokens=0,
        deadline=None,
    )


@dataclass
class Pair:
    """A log of each kind, of one claim."""

    claim: Claim
    python: TokenLog
    native: TokenLog

    def append(self, limit: int) -> Append:
        """Return the next append, which both have to agree on."""
        entries, previous = self.python.pending(limit)
        assert self.native.pending(limit) == (entries, previous)
        index = self.python.next_index
        return Append(self.claim.request_id, self.claim.epoch, self.claim.nonce, index, entries, previous)

    def is_plain(self) -> bool:
        """Whether all that is pending may go out in a batch."""
        assert isinstance(self.python, PythonLog)
        entries, _ = self.python.pending(sys.maxsize)
        is_in_tail = self.python.next_index >= self.python.tail_index
        has_begun = self.python.next_index > self.claim.next_index
        return has_begun and is_in_tail and all(kind == TOKEN and extra == "" for kind, *_, extra in entries)


class SameBytes(RuleBasedStateMachine):
    """Does the same to both, and compares all that they answer."""

    def __init__(self) -> None:
        super().__init__()
        self.python: TokenLogs = PythonLogs(10_000)
        self.native: TokenLogs = native_logs(10_000)
        self.pairs: list[Pair] = []
        self.closed: list[Pair] = []
        self.number = 0

    @initialize()
    def begin(self) -> None:
        for partition in (1, 0, 1):
            self.open(partition, 0)

    @precondition(lambda self: len(self.pairs) < 7)
    @rule(partition=st.none() | st.integers(0, 3), next_index=st.sampled_from([0, 1, 2**40]))
    def open(self, partition: int | None, next_index: int) -> None:
        self.number += 1
        made = claim(self.number, partition, next_index)
        self.pairs.append(Pair(made, self.python.open(made), self.native.open(made)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        self.pairs.remove(pair)
        self.closed.append(pair)
        pair.python.close()
        pair.native.close()

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), times=st.sampled_from([1, 1, 40]))
    def take(self, data: st.DataObject, times: int) -> None:
        """The tokens of a step, or of many; also of closed logs, and several of one log."""
        rows = st.tuples(st.sampled_from(self.pairs + self.closed), token_ids, texts)
        drawn = data.draw(st.lists(rows, min_size=1, max_size=9)) * times
        _, ids, said = zip(*drawn, strict=True)
        self.python.write_tokens(TokenColumns.of([pair.python.handle for pair, _, _ in drawn], ids, said))
        self.native.write_tokens(TokenColumns.of([pair.native.handle for pair, _, _ in drawn], ids, said))

    @precondition(lambda self: self.pairs)
    @rule(
        data=st.data(), values=tokens | st.tuples(st.sampled_from([FINISH, END]), numbers(2**31), texts, texts, texts)
    )
    def write(self, data: st.DataObject, values: tuple[str, str, str, str, str | bytes]) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        for log in (pair.python, pair.native):
            log.write(*values)

    @precondition(lambda self: self.pairs)
    @rule(limit=limits, data=st.data(), acknowledges=st.booleans())
    def append(self, limit: int, data: st.DataObject, acknowledges: bool) -> None:
        left_out = data.draw(st.lists(st.sampled_from(self.pairs + self.closed), max_size=2))
        expected = {pair.native.handle: pair for pair in self.pairs if pair.python.has_pending and pair not in left_out}
        of_python = self.python.pending(limit, [pair.python.handle for pair in left_out])
        assert set(of_python.others) == {pair.python.handle for pair in expected.values()}
        found = self.native.pending(limit, [pair.native.handle for pair in left_out])
        self._check(found, expected, limit)
        if acknowledges:
            pairs = [*expected.values(), *self.closed[:1]]
            indexes = [pair.claim.next_index if pair in self.closed else _end(pair, limit) for pair in pairs]
            more = [
                logs.acknowledge([pair.handle for pair in handles], indexes)
                for logs, handles in (
                    (self.python, [pair.python for pair in pairs]),
                    (self.native, [pair.native for pair in pairs]),
                )
            ]
            assert more[0] == more[1]

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), back=st.integers(0, 60))
    def lose(self, data: st.DataObject, back: int) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        index = max(0, pair.python.next_index - back)
        can = pair.python.can_send_from(index)
        assert pair.native.can_send_from(index) == can
        if can:
            pair.python.acknowledge(index)
            pair.native.acknowledge(index)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        assert pair.native.drop_oldest() == pair.python.drop_oldest()
        assert (pair.native.num_bytes > 0) == (pair.python.num_bytes > 0)

    @staticmethod
    def _check(found: PendingLogs, expected: dict[int, Pair], limit: int) -> None:
        """Compare a batch with the appends that Python makes, and require that every log that can be in one is."""
        batched = [handle for batch in found.batches for handle in batch.logs]
        assert sorted([*batched, *found.others]) == sorted(expected)
        assert len({batch.appends.partition for batch in found.batches}) == len(found.batches)
        for handle, pair in expected.items():
            pair.append(limit)
            has_partition = not pair.claim.request_id.startswith("r")
            assert (handle in batched) == (has_partition and pair.is_plain())
        for batch in found.batches:
            appends = [expected[handle].append(limit) for handle in batch.logs]
            _, values, _, wake_ups = append_arguments(0, {"prefix": appends}, channels="wake", make_slice=slice_of)
            assert b'["prefix",' + batch.appends.values + b"]" == values
            assert batch.appends.wake_ups == wake_ups
            assert batch.appends.ends == [each.first_index + len(each.entries) for each in appends]
            assert batch.appends.count == len(appends)
            for place, append in enumerate(appends):
                assert f"-{batch.appends.partition:04x}-" in append.request_id
                made = LogSlice(
                    request_id=append.request_id,
                    first_index=append.first_index,
                    entries=map(to_log_entry, append.entries),
                    previous_digest=append.previous_digest,
                )
                assert WakeUp.FromString(batch.appends.wake_up(place)) == WakeUp(slices=[made])
                append.previous_digest = ""
            assert batch.appends.appends() == appends

    def teardown(self) -> None:
        for pair in self.pairs:
            assert pair.native.num_taken == pair.python.num_taken
            pair.python.close()
            pair.native.close()
        assert self.python.held_bytes == self.native.held_bytes == 0


TestSameBytes = needs_library(SameBytes.TestCase)
TestSameBytes.settings = settings(max_examples=30, stateful_step_count=30)


def _end(pair: Pair, limit: int) -> int:
    return pair.python.next_index + len(pair.python.pending(limit)[0])


@needs_library
@given(st.integers(0, 200).map("x".__mul__), st.integers(0, 200).map("7".__mul__))
def test_a_link_is_one_of_sha_1_at_any_length(value: str, choice: str) -> None:
    """One, two and more blocks, and each way to pad the last one."""
    made = claim(1, 0, 3)
    python, native = PythonLogs(1000).open(made), native_logs(1000).open(made)
    for log in (python, native):
        log.write(FINISH, choice, value, "")
    assert native.pending(1) == python.pending(1)


@needs_library
def test_text_is_escaped_as_orjson_escapes_it() -> None:
    """All characters that UTF-8 has, in runs of 1,000."""
    made = claim(1, 0, 0)
    logs = native_logs(1 << 30)
    log = logs.open(made)
    log.write(TOKEN, "0", "1", "")
    log.acknowledge(1)
    for first in range(0, sys.maxunicode + 1, 1000):
        text = "".join(
            chr(each) for each in range(first, min(first + 1000, sys.maxunicode + 1)) if not 0xD800 <= each < 0xE000
        )
        logs.write_tokens(TokenColumns.of([log.handle], [first], [text]))
        [batch] = logs.pending(1).batches
        assert orjson.dumps(text) in batch.appends.values
        log.acknowledge(log.next_index + 1)


@needs_library
def test_what_does_not_fit_is_refused() -> None:
    logs = native_logs(1000)
    log = logs.open(claim(1, 0, 0))
    with pytest.raises(NativeLogError):
        log.write(TOKEN, "0", "1", "x" * ((16 << 20) + 1))
    short = TokenColumns.of([log.handle], [1], ["four"])
    for wrong in (short._replace(text=b"fou"), short._replace(text_lengths=b"\xff\xff\xff\xff")):
        with pytest.raises(NativeLogError):
            logs.write_tokens(wrong)
    with pytest.raises(ValueError, match="columns of other lengths"):
        logs.write_tokens(short._replace(token_ids=b""))
    with pytest.raises(UnicodeEncodeError):
        TokenColumns.of([log.handle], [1], ["\ud800"])
    assert not log.has_pending
    log.close()
    with pytest.raises(NativeLogError):
        log.write(TOKEN, "0", "1", "")


LIMIT = 20_000
BEFORE = chained("", [LogEntry(token_id=number) for number in range(3)])


def entry_of(number: int) -> LogEntry:
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
        entries = [entry_of(len(self.written) + number) for number in range(count)]
        if finishes:
            entries.append(LogEntry(finish=ChoiceFinish(reason=1)))
        for entry in entries:
            kind, choice, value, text, _, extra = to_entry_values(entry)
            self.log.write(kind, choice, value, text, extra)
        self.written += chained(self.written[-1].digest, entries)

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
    run_state_machine_as_test(lambda: Logs(make_logs), settings=settings(max_examples=25, stateful_step_count=20))


def test_the_first_and_the_last_output_of_a_sequence_stay_whole() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    first, second, third = SequenceOutput("a", 1, "x"), SequenceOutput("a", 2, "é"), SequenceOutput("a", 3, "", "stop")
    assert plain.split([first]) == (NO_TOKENS, [first])
    assert plain.split([second, third]) == (TokenColumns.of([7], [2], ["é"]), [third])
    plain.discard("a")
    assert plain.split([second]) == (NO_TOKENS, [second])


def test_tokens_of_the_step_with_the_first_one_stay_whole_behind_it() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    outputs = [SequenceOutput("a", 1, "x"), SequenceOutput("a", 2, "y")]
    assert plain.split(outputs) == (NO_TOKENS, outputs)
    assert plain.split(outputs) == (TokenColumns.of([7, 7], [1, 2], ["x", "y"]), [])


def test_an_output_without_a_token_is_no_first_one_and_other_sequences_stay_whole() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    of_prompt, other = SequenceOutput("a", None, ""), SequenceOutput("b", 5, "z")
    first, second = SequenceOutput("a", 1, "x"), SequenceOutput("a", 2, "y")
    assert plain.split([of_prompt, other]) == (NO_TOKENS, [of_prompt, other])
    assert plain.split([first, other]) == (NO_TOKENS, [first, other])
    assert plain.split([other, second]) == (TokenColumns.of([7], [2], ["y"]), [other])


def test_without_a_compiler_python_writes_the_logs_and_says_so(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from pagestream_worker import PythonLogs, open_logs\n"
        "assert isinstance(open_logs(1), PythonLogs)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {"PATH": "/nonexistent", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "by Python" in done.stderr
    assert "no C++ compiler" in done.stderr
