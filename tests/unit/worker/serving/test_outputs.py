"""Outputs of steps: first tokens are taken before others, and an output that can't be taken ends the engine."""

import asyncio
from contextlib import nullcontext

import pytest
from pagestream_engine.request.outputs import StepOutput
from pagestream_worker.serving.outputs import EngineFailed, StepOutputs
from support.engines.request_table import RequestTable, claim


def outputs_of(table: RequestTable) -> StepOutputs:
    return StepOutputs(table.requests, table.budget, table.telemetry)


@pytest.mark.parametrize("is_appending", [False, True])
async def test_the_order_of_a_log_does_not_depend_on_what_is_being_appended(is_appending: bool) -> None:
    table = RequestTable()
    outputs = outputs_of(table)
    table.requests.start(claim("n", prompts=2))
    outputs.take([StepOutput("r/n/0", 10, "a")])
    with outputs.appending() if is_appending else nullcontext():
        outputs.take([StepOutput("r/n/0", 11, "b"), StepOutput("r/n/1", 20, "c")])
    outputs.take_deferred()
    assert [(entry.choice, entry.token_id) for entry in table.entries()] == [(0, 10), (0, 11), (1, 20)]


@pytest.mark.parametrize("is_appending", [False, True])
async def test_only_first_tokens_are_taken_while_nothing_is_being_appended(is_appending: bool) -> None:
    table = RequestTable()
    outputs = outputs_of(table)
    table.requests.start(claim("n", request_id="old"))
    outputs.take([StepOutput("old/n/0", 1, "a")])
    table.requests.start(claim("n", request_id="new"))
    with outputs.appending() if is_appending else nullcontext():
        outputs.take([StepOutput("old/n/0", 2, "b"), StepOutput("new/n/0", 3, "c")])
    assert outputs.has_deferred is not is_appending
    assert len(table.entries("new")) == 1
    assert len(table.entries("old")) == (2 if is_appending else 1)
    outputs.take_deferred()
    assert len(table.entries("old")) == 2


async def test_an_output_that_cannot_be_taken_ends_the_engine() -> None:
    table = RequestTable()
    outputs = outputs_of(table)
    table.requests.start(claim("n"))
    outputs.take([StepOutput("r/n/0", 1, "", "no such reason")])
    assert outputs.has_failed
    before = table.entries()
    outputs.take([StepOutput("r/n/0", 1, "")])
    assert table.entries() == before
    with pytest.raises(EngineFailed):
        outputs.ended.result()


async def test_deferred_outputs_are_taken_before_the_end_and_may_be_what_fails() -> None:
    table = RequestTable()
    outputs = outputs_of(table)
    table.requests.start(claim("n", request_id="old"))
    outputs.take([StepOutput("old/n/0", 1, "")])
    table.requests.start(claim("n"))
    outputs.take([StepOutput("r/n/0", 1, ""), StepOutput("old/n/0", 2, "", "no such reason")])
    assert outputs.has_deferred
    outputs.end(None)
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(outputs.ended, 1)
    assert len(table.entries()) == 1
