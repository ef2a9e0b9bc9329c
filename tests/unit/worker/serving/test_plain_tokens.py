"""Plain tokens of a step in the table of active requests: what is appended, deferred, refused and ignored."""

from collections.abc import Callable

import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream_engine.request.outputs import StepOutput
from pagestream_streams import AppendKind, AppendOutcome
from pagestream_streams.protocol.entries import END, FINISH, TOKEN
from pagestream_streams.protocol.token_appends import TokenOutcomes
from pagestream_worker.logs.base import TokenLogs
from pagestream_worker.logs.library import load_library
from pagestream_worker.logs.native_logs import NativeLog
from pagestream_worker.logs.python_logs import PythonLog
from pagestream_worker.logs.token_columns import TokenColumns
from pagestream_worker.serving.outputs import StepOutputs
from pagestream_worker.stepping.commands import AbortSequences, AddGroup
from support.engines.request_table import RequestTable, claim
from support.engines.token_logs import KINDS, divided_logs

IDS = [f"2a97516c-{number % 2:04x}-{number:032x}" for number in range(4)]


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest) -> RequestTable:
    make_logs: Callable[[int], TokenLogs] = request.param
    return RequestTable(make_logs=make_logs)


def begin(table: RequestTable, *request_ids: str) -> dict[str, int]:
    """Start requests and append their first tokens; return the logs that the engine got for further ones."""
    for request_id in request_ids:
        table.requests.start(claim("n", request_id=request_id))
        table.requests.add_outputs([StepOutput(f"{request_id}/n/0", 1, "a")])
    settle(table)
    groups = [command for command in table.commands if isinstance(command, AddGroup)]
    return {group.siblings[0].seq_id.partition("/")[0]: group.log for group in groups}


def settle(table: RequestTable) -> None:
    """Append all that is pending, as Redis does without a loss."""
    pending = table.requests.pending(100)
    for append in pending.appends:
        table.requests.settle(append, AppendOutcome(AppendKind.OK, append.first_index + len(append.entries)))
    for batch in pending.logs.batches:
        ends = [append.first_index + len(append.entries) for append in batch.appends.appends()]
        table.requests.settle_tokens(batch, TokenOutcomes(ends, {}))


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
    last = StepOutput(f"{IDS[0]}/n/0", 12, "", "length")
    table.requests.add_outputs([last], TokenColumns.of([logs[IDS[0]]], [11], ["c"]))
    assert written(table) == {IDS[0]: [(TOKEN, "11"), (TOKEN, "12"), (FINISH, "length"), (END, "length")]}
    end = table.requests.pending(100).appends[0].entries[-1]
    assert end[3] == "2,4,0", "the usage counts the tokens in columns"
    settle(table)
    assert table.requests.ids() == IDS[1:]


async def test_tokens_after_the_end_or_the_loss_of_a_request_are_ignored(table: RequestTable) -> None:
    logs = begin(table, IDS[0], IDS[1])
    table.requests.add_outputs([StepOutput(f"{IDS[0]}/n/0", 2, "", "stop")])
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
    assert [group.log > 0 for group in groups] == [False, False, True]


async def test_columns_wait_for_the_append_of_first_tokens(table: RequestTable) -> None:
    logs = begin(table, IDS[0])
    outputs = StepOutputs(table.requests, table.budget, table.telemetry)
    table.requests.start(claim("n", request_id=IDS[1]))
    outputs.take([StepOutput(f"{IDS[1]}/n/0", 5, "")], TokenColumns.of([logs[IDS[0]]], [2], ["b"]))
    assert outputs.has_deferred
    assert written(table) == {IDS[1]: [(TOKEN, "5")]}
    outputs.take([], TokenColumns.of([logs[IDS[0]]], [3], ["c"]))
    assert written(table) == {IDS[1]: [(TOKEN, "5")], IDS[0]: [(TOKEN, "2"), (TOKEN, "3")]}


async def test_a_batch_s_refusals_are_each_request_s_own(table: RequestTable) -> None:
    """One is lost, one ended, one has a gap, and one goes on."""
    logs = begin(table, *IDS)
    table.requests.add_outputs([], TokenColumns.of(logs.values(), [2] * 4, ["b"] * 4))
    kinds = dict(zip(IDS, (AppendKind.FENCED, AppendKind.ENDED, AppendKind.GAP, AppendKind.OK), strict=True))
    pending = table.requests.pending(100)
    handed_back = []
    for append in pending.appends:
        if table.requests.settle(append, AppendOutcome(kinds[append.request_id], 0)):
            handed_back.append(append.request_id)
    for batch in pending.logs.batches:
        outcomes = [(each, AppendOutcome(kinds[each.request_id], 0)) for each in batch.appends.appends()]
        others = {place: each for place, each in enumerate(outcomes) if each[1].kind is not AppendKind.OK}
        handed_back += table.requests.settle_tokens(batch, TokenOutcomes([2] * len(outcomes), others))
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
    logs = divided_logs(1_000_000)
    plain, several, wanting = claim("n", request_id=IDS[0]), claim("n", num_choices=2), claim("n")
    wanting.spec.sampling.logprobs = 0
    kinds = [type(logs.open(each)) for each in (plain, several, wanting, claim("n", prompts=2))]
    assert kinds == [NativeLog, PythonLog, PythonLog, PythonLog]
