"""The table of active requests: what the engine, the budget and the logs get when a request starts, goes on, leaves."""

import gc
from collections.abc import Callable, Iterator, Sequence

import pytest
from pagestream_engine.request.outputs import StepOutput
from pagestream_streams import AppendKind, AppendOutcome
from pagestream_worker.logs.base import TokenLogs
from pagestream_worker.requests.running_request import Choice, RunningRequest
from pagestream_worker.stepping.commands import AbortSequences, AddGroup
from support.engines.request_table import STEP_TOKENS, RequestTable, claim
from support.engines.token_logs import KINDS


async def test_a_request_that_is_claimed_again_before_its_loss_is_seen_leaves_nothing_reserved() -> None:
    table = RequestTable()
    table.requests.start(claim("old", length=STEP_TOKENS + 100))
    assert table.budget.available(1000) == (0, 0)
    table.requests.start(claim("new", length=STEP_TOKENS + 100))
    assert [type(command) for command in table.commands] == [AddGroup, AbortSequences, AddGroup]
    table.requests.add_outputs([StepOutput("r/old/0", 1, "")])
    table.requests.add_outputs([StepOutput("r/new/0", 1, "", "length")])
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
    def broken(_: RunningRequest) -> Iterator[Sequence[Choice]]:
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
    table.requests.add_outputs([StepOutput("r/n/0", 10, "a")])
    assert table.requests.ids_without_tokens() == []
    table.requests.drop(["r", "unknown"])
    assert table.commands[-1] == AbortSequences(["r/n/0", "r/n/1"])
    table.requests.add_outputs([StepOutput("r/n/0", 11, "b")])
    assert (len(table.requests), table.requests.has_pending) == (0, False)


async def test_a_sequence_that_fails_before_its_first_token_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RequestTable()
    table.requests.start(claim("n", prompts=2))
    first_tokens: list[int] = []
    monkeypatch.setattr(table.telemetry, "first_token", lambda _request, choice: first_tokens.append(choice))
    table.requests.add_outputs([StepOutput("r/n/1", 7, "a"), StepOutput("r/n/0", None, "", "error", error="broken")])
    assert first_tokens == [1]
    assert not table.budget.has_prefilling


async def test_nothing_is_left_of_requests_that_have_gone() -> None:
    """However they went: completed, failed, failed with siblings that ran or waited their turn, reclaimed, dropped."""
    table = RequestTable()
    request_ids = ["completed", "failed", "siblings", "again", "dropped"]
    for request_id in request_ids:
        table.requests.start(claim("n", request_id=request_id, prompts=2, num_choices=2))
    table.requests.start(claim("m", request_id="again"))
    ends = [StepOutput(f"completed/n/{choice}", 1, "", "length") for choice in (3, 1, 0, 2)]
    failed = StepOutput("failed/n/0", None, "", "error", error="broken")
    waits = [StepOutput("siblings/n/1", 1, "", "length"), StepOutput("siblings/n/3", 1, "")]
    fails = StepOutput("siblings/n/0", 1, "", "error", error="broken")
    table.requests.add_outputs([*ends, failed, *waits, fails, StepOutput("again/m/0", 1, "", "stop")])
    for append in table.requests.pending(100).appends:
        table.requests.settle(append, AppendOutcome(AppendKind.OK, len(append.entries)))
    assert table.requests.ids() == ["dropped"]
    table.requests.drop(["dropped"])
    del append
    living = [each.request_id for each in gc.get_objects() if type(each) is RunningRequest]
    assert set(living).isdisjoint(request_ids)
    assert table.budget.available(1000)[0] == 1
    assert not table.budget.has_prefilling
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
        table.requests.add_outputs([StepOutput("long/n/0", number, " word")])
        long.log.acknowledge(number + 1)
        if number < 40:
            table.requests.add_outputs([StepOutput("short/n/0", number, " word")])
            short.log.acknowledge(number + 1)
        assert table.logs.held_bytes <= 8_000
    assert short.log.can_send_from(0)
    assert long.log.can_send_from(350)
    assert not long.log.can_send_from(0)
    for number in range(400, 800):
        table.requests.add_outputs([StepOutput("long/n/0", number, " word")])
        assert table.logs.held_bytes <= 8_000
    assert table.requests.ids() == ["short"]
    table.requests.drop(["short"])
    assert table.logs.held_bytes == 0


@pytest.mark.parametrize("make_logs", KINDS)
async def test_a_small_cache_keeps_what_redis_lacks(make_logs: Callable[[int], TokenLogs]) -> None:
    table = RequestTable(make_logs=make_logs)
    for request_id in ("acknowledged", "pending"):
        table.requests.start(claim("n", request_id=request_id))
        table.requests.add_outputs([StepOutput(f"{request_id}/n/0", number, " word") for number in range(200)])
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
