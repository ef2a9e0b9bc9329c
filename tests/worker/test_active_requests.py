"""The table of active requests: what the engine, the budget and the logs get when a request starts, goes on, leaves."""

import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry
from pagestream_engine.request import SequenceOutput
from pagestream_engine.wire.worker import AbortSequences, AddGroup, TokenColumns
from pagestream_streams import Append, AppendKind, AppendOutcome
from pagestream_streams.protocol import to_entry_values
from pagestream_worker import EngineFailed, NativeLog, PythonLog, RunningRequest, TokenLogs, load_library
from support.engines.request_table import KINDS, STEP_TOKENS, RequestTable, claim, native_logs

TOKEN, FINISH, END = (
    to_entry_values(entry)[0]
    for entry in (LogEntry(token_id=1), LogEntry(finish=ChoiceFinish(reason=1)), LogEntry(end=LogEnd(reason=1)))
)
"""What the values of an entry begin with."""


async def test_a_request_that_is_claimed_again_before_its_loss_is_seen_leaves_nothing_reserved() -> None:
    table = RequestTable()
    table.requests.start(claim("old", length=STEP_TOKENS + 100))
    assert table.budget.available(1000) == (0, 0)
    table.requests.start(claim("new", length=STEP_TOKENS + 100))
    assert [type(command) for command in table.commands] == [AddGroup, AbortSequences, AddGroup]
    table.requests.add_outputs([SequenceOutput("r/old/0", 1, "")])
    table.requests.add_outputs([SequenceOutput("r/new/0", 1, "", "length")])
    requests, tokens = table.budget.available(1000)
    assert requests == 1
    assert tokens > STEP_TOKENS


async def test_the_engine_gets_class_and_tenant_for_its_policy() -> None:
    table = RequestTable()
    table.requests.start(claim("n", priority=2))
    [command] = table.commands
    assert isinstance(command, AddGroup)
    assert (command.priority, command.tenant) == (2, "t")


async def test_a_request_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: RunningRequest) -> Iterator[Sequence[object]]:
        raise OverflowError("no such number")
        yield ()

    table = RequestTable()
    with monkeypatch.context() as patch:
        patch.setattr(RunningRequest, "open_groups", broken)
        table.requests.start(claim("n"))
    [*_, end] = table.entries()
    assert end.end.error.code == "engine_error"
    assert "number" not in end.end.error.message
    assert table.commands == []
    assert table.budget.available(1000)[0] == 1


async def test_a_dropped_request_is_aborted_and_takes_no_outputs() -> None:
    table = RequestTable()
    table.requests.start(claim("n", prompts=2))
    assert table.requests.ids_without_tokens() == ["r"]
    table.requests.add_outputs([SequenceOutput("r/n/0", 10, "a")])
    assert table.requests.ids_without_tokens() == []
    table.requests.drop(["r", "unknown"])
    assert table.commands[-1] == AbortSequences(["r/n/0", "r/n/1"])
    table.requests.add_outputs([SequenceOutput("r/n/0", 11, "b")])
    assert (len(table.requests), table.requests.has_pending) == (0, False)


async def test_a_sequence_that_fails_before_its_first_token_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RequestTable()
    table.requests.start(claim("n", prompts=2))
    first_tokens: list[int] = []
    monkeypatch.setattr(table.telemetry, "first_token", lambda _request, choice: first_tokens.append(choice))
    table.requests.add_outputs(
        [SequenceOutput("r/n/1", 7, "a"), SequenceOutput("r/n/0", None, "", "error", error="broken")]
    )
    assert first_tokens == [1]
    assert not table.budget.prefilling


async def test_nothing_is_left_of_requests_that_have_gone() -> None:
    """However they went: completed, failed, failed with siblings that ran or waited their turn, reclaimed, dropped."""
    table = RequestTable()
    request_ids = ["completed", "failed", "siblings", "again", "dropped"]
    for request_id in request_ids:
        table.requests.start(claim("n", request_id=request_id, prompts=2, num_choices=2))
    table.requests.start(claim("m", request_id="again"))
    ends = [SequenceOutput(f"completed/n/{choice}", 1, "", "length") for choice in (3, 1, 0, 2)]
    failed = SequenceOutput("failed/n/0", None, "", "error", error="broken")
    waits = [SequenceOutput("siblings/n/1", 1, "", "length"), SequenceOutput("siblings/n/3", 1, "")]
    fails = SequenceOutput("siblings/n/0", 1, "", "error", error="broken")
    table.requests.add_outputs([*ends, failed, *waits, fails, SequenceOutput("again/m/0", 1, "", "stop")])
    for append in table.requests.pending(100).appends:
        table.requests.apply_outcome(append, AppendOutcome(AppendKind.OK, len(append.entries)))
    assert table.requests.ids() == ["dropped"]
    table.requests.drop(["dropped"])
    del append
    living = [each.request_id for each in gc.get_objects() if type(each) is RunningRequest]
    assert set(living).isdisjoint(request_ids)
    assert table.budget.available(1000)[0] == 1
    assert not table.budget.prefilling
    assert table.logs.held_bytes == 0


@pytest.mark.parametrize("make_logs", KINDS)
async def test_what_is_kept_to_be_sent_again_is_bounded_in_bytes(make_logs: Callable[[int], TokenLogs]) -> None:
    """Acknowledged entries go first, the longest log's; in an outage, where none is acknowledged, a request goes."""
    table = RequestTable(memory_bytes=8_000, make_logs=make_logs)
    for request_id in ("long", "short"):
        table.requests.start(claim("n", request_id=request_id))
    long, short = table.requests.get("long"), table.requests.get("short")
    assert long is not None
    assert short is not None
    for number in range(400):
        table.requests.add_outputs([SequenceOutput("long/n/0", number, " word")])
        long.log.acknowledge(number + 1)
        if number < 40:
            table.requests.add_outputs([SequenceOutput("short/n/0", number, " word")])
            short.log.acknowledge(number + 1)
        assert table.logs.held_bytes <= 8_000
    assert short.log.can_send_from(0)
    assert long.log.can_send_from(350)
    assert not long.log.can_send_from(0)
    for number in range(400, 800):
        table.requests.add_outputs([SequenceOutput("long/n/0", number, " word")])
        assert table.logs.held_bytes <= 8_000
    assert table.requests.ids() == ["short"]
    table.requests.drop(["short"])
    assert table.logs.held_bytes == 0


@pytest.mark.parametrize("make_logs", KINDS)
async def test_a_small_cache_keeps_what_redis_lacks(make_logs: Callable[[int], TokenLogs]) -> None:
    table = RequestTable(make_logs=make_logs)
    for request_id in ("acknowledged", "pending"):
        table.requests.start(claim("n", request_id=request_id))
        table.requests.add_outputs([SequenceOutput(f"{request_id}/n/0", number, " word") for number in range(200)])
    acknowledged, pending = table.requests.get("acknowledged"), table.requests.get("pending")
    assert acknowledged is not None
    assert pending is not None
    acknowledged.log.acknowledge(200)
    held = table.logs.held_bytes
    table.requests.drop_acknowledged(held)
    assert table.logs.held_bytes == held
    table.requests.drop_acknowledged(0)
    assert 0 < table.logs.held_bytes < held
    assert not acknowledged.log.can_send_from(100)
    assert pending.log.can_send_from(0)
    assert set(table.requests.ids()) == {"acknowledged", "pending"}


def outcomes_of(next_indexes: Sequence[int], others: dict[int, tuple[Append, AppendOutcome]] | None = None) -> Any:
    """Return what became of a batch, as a session answers it: where each log is, and what is not OK, by place."""
    return SimpleNamespace(next_indexes=next_indexes, others=others or {})


IDS = [f"2a97516c-{number % 2:04x}-{number:032x}" for number in range(4)]


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest) -> RequestTable:
    make_logs: Callable[[int], TokenLogs] = request.param
    return RequestTable(make_logs=make_logs)


def begin(table: RequestTable, *request_ids: str) -> dict[str, int]:
    """Start requests and append their first tokens; return the logs that the engine got for further ones."""
    for request_id in request_ids:
        table.requests.start(claim("n", request_id=request_id))
        table.requests.add_outputs([SequenceOutput(f"{request_id}/n/0", 1, "a")])
    settle(table)
    groups = [command for command in table.commands if isinstance(command, AddGroup)]
    return {group.choices[0].seq_id.partition("/")[0]: group.log_handle for group in groups}


def settle(table: RequestTable) -> None:
    """Append all that is pending, as Redis does without a loss."""
    pending = table.requests.pending(100)
    for append in pending.appends:
        table.requests.apply_outcome(append, AppendOutcome(AppendKind.OK, append.first_index + len(append.entries)))
    for batch in pending.logs.batches:
        ends = [append.first_index + len(append.entries) for append in batch.appends.appends()]
        table.requests.apply_token_outcomes(batch, outcomes_of(ends))


def written(table: RequestTable) -> dict[str, list[tuple[str, str]]]:
    """Return what the logs lack, as kind and value by request."""
    pending = table.requests.pending(100)
    appends = [*pending.appends, *(append for batch in pending.logs.batches for append in batch.appends.appends())]
    return {append.request_id: [(entry[0], entry[2]) for entry in append.entries] for append in appends}


async def test_a_request_goes_on_in_columns_and_ends_with_an_output(table: RequestTable) -> None:
    logs = begin(table, *IDS)
    table.requests.add_outputs([], TokenColumns.of(logs.values(), range(10, 14), ["b"] * 4))
    assert written(table) == {request_id: [(TOKEN, str(10 + number))] for number, request_id in enumerate(IDS)}
    settle(table)
    assert not table.requests.has_pending
    last = SequenceOutput(f"{IDS[0]}/n/0", 12, "", "length")
    table.requests.add_outputs([last], TokenColumns.of([logs[IDS[0]]], [11], ["c"]))
    assert written(table) == {IDS[0]: [(TOKEN, "11"), (TOKEN, "12"), (FINISH, "length"), (END, "length")]}
    end = table.requests.pending(100).appends[0].entries[-1]
    assert end[3] == "2,4,0", "the usage counts the tokens in columns"
    settle(table)
    assert table.requests.ids() == IDS[1:]


async def test_tokens_after_the_end_or_the_loss_of_a_request_are_ignored(table: RequestTable) -> None:
    logs = begin(table, IDS[0], IDS[1])
    table.requests.add_outputs([SequenceOutput(f"{IDS[0]}/n/0", 2, "", "stop")])
    table.requests.drop([IDS[1]])
    before = written(table)
    table.requests.start(claim("again", request_id=IDS[1]))
    table.requests.add_outputs([], TokenColumns.of(logs.values(), [3, 3], ["x", "x"]))
    assert written(table) == before


async def test_only_a_single_choice_without_logprobs_has_a_log_for_plain_tokens(table: RequestTable) -> None:
    asks = claim("n", request_id="logprobs")
    asks.spec.sampling.MergeFrom(SamplingParams(logprobs=0))
    for each in (asks, claim("n", request_id="two", num_choices=2), claim("n", request_id="one")):
        table.requests.start(each)
    groups = [command for command in table.commands if isinstance(command, AddGroup)]
    assert [group.log_handle > 0 for group in groups] == [False, False, True]


async def test_columns_wait_for_the_append_of_first_tokens(table: RequestTable) -> None:
    logs = begin(table, IDS[0])
    table.requests.start(claim("n", request_id=IDS[1]))
    table.requests.take_outputs([SequenceOutput(f"{IDS[1]}/n/0", 5, "")], TokenColumns.of([logs[IDS[0]]], [2], ["b"]))
    assert table.requests.deferred is not None
    assert written(table) == {IDS[1]: [(TOKEN, "5")]}
    table.requests.take_outputs([], TokenColumns.of([logs[IDS[0]]], [3], ["c"]))
    assert written(table) == {IDS[1]: [(TOKEN, "5")], IDS[0]: [(TOKEN, "2"), (TOKEN, "3")]}


async def test_a_batch_s_refusals_are_each_request_s_own(table: RequestTable) -> None:
    """One is lost, one ended, one has a gap, and one goes on."""
    logs = begin(table, *IDS)
    table.requests.add_outputs([], TokenColumns.of(logs.values(), [2] * 4, ["b"] * 4))
    kinds = dict(zip(IDS, (AppendKind.FENCED, AppendKind.ENDED, AppendKind.GAP, AppendKind.OK), strict=True))
    pending = table.requests.pending(100)
    handed_back = []
    for append in pending.appends:
        if table.requests.apply_outcome(append, AppendOutcome(kinds[append.request_id], 0)):
            handed_back.append(append.request_id)
    for batch in pending.logs.batches:
        outcomes = [(each, AppendOutcome(kinds[each.request_id], 0)) for each in batch.appends.appends()]
        others = {place: each for place, each in enumerate(outcomes) if each[1].kind is not AppendKind.OK}
        handed_back += table.requests.apply_token_outcomes(batch, outcomes_of([2] * len(outcomes), others))
    assert handed_back == []
    assert table.requests.ids() == IDS[2:]
    assert [command.seq_ids for command in table.commands if isinstance(command, AbortSequences)] == [
        [f"{request_id}/n/0"] for request_id in IDS[:2]
    ]
    lacks = written(table)
    assert lacks[IDS[2]] == [(TOKEN, "1"), (TOKEN, "2")], "all of it is sent again"


@pytest.mark.skipif(load_library() is None, reason="the logs can't be compiled here")
def test_what_is_no_plain_token_is_logged_in_python() -> None:
    """A call into C++ for each entry costs three times what Python does."""
    logs = native_logs(1_000_000)
    plain, several, wanting = claim("n", request_id=IDS[0]), claim("n", num_choices=2), claim("n")
    wanting.spec.sampling.logprobs = 0
    kinds = [type(logs.open(each)) for each in (plain, several, wanting, claim("n", prompts=2))]
    assert kinds == [NativeLog, PythonLog, PythonLog, PythonLog]


@pytest.mark.parametrize("is_appending", [False, True])
async def test_the_order_of_a_log_does_not_depend_on_what_is_being_appended(is_appending: bool) -> None:
    table = RequestTable()
    table.requests.start(claim("n", prompts=2))
    table.requests.take_outputs([SequenceOutput("r/n/0", 10, "a")])
    table.requests.is_appending = is_appending
    table.requests.take_outputs([SequenceOutput("r/n/0", 11, "b"), SequenceOutput("r/n/1", 20, "c")])
    table.requests.take_deferred()
    assert [(entry.choice, entry.token_id) for entry in table.entries()] == [(0, 10), (0, 11), (1, 20)]


@pytest.mark.parametrize("is_appending", [False, True])
async def test_only_first_tokens_are_taken_while_nothing_is_being_appended(is_appending: bool) -> None:
    table = RequestTable()
    table.requests.start(claim("n", request_id="old"))
    table.requests.take_outputs([SequenceOutput("old/n/0", 1, "a")])
    table.requests.start(claim("n", request_id="new"))
    table.requests.is_appending = is_appending
    table.requests.take_outputs([SequenceOutput("old/n/0", 2, "b"), SequenceOutput("new/n/0", 3, "c")])
    assert (table.requests.deferred is None) is is_appending
    assert len(table.entries("new")) == 1
    assert len(table.entries("old")) == (2 if is_appending else 1)
    table.requests.take_deferred()
    assert len(table.entries("old")) == 2


async def test_an_output_that_cannot_be_taken_ends_the_engine() -> None:
    table = RequestTable()
    table.requests.start(claim("n"))
    table.requests.take_outputs([SequenceOutput("r/n/0", 1, "", "no such reason")])
    assert isinstance(table.requests.failure, EngineFailed)
    before = table.entries()
    table.requests.take_outputs([SequenceOutput("r/n/0", 1, "")])
    assert table.entries() == before


async def test_deferred_outputs_are_taken_before_the_end_and_may_be_what_fails() -> None:
    table = RequestTable()
    table.requests.start(claim("n", request_id="old"))
    table.requests.take_outputs([SequenceOutput("old/n/0", 1, "")])
    table.requests.start(claim("n"))
    table.requests.take_outputs([SequenceOutput("r/n/0", 1, ""), SequenceOutput("old/n/0", 2, "", "no such reason")])
    assert table.requests.deferred is not None
    table.requests.end_outputs(None)
    assert table.requests.ended.is_set()
    assert isinstance(table.requests.failure, EngineFailed)
    assert len(table.entries()) == 1
