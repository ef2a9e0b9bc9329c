"""SIGKILL of an engine under 32 streams: another engine, or its successor, continues them unchanged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.stream_clients import GrpcReader
from support.faults.disturbed_runs import run_all, unfinished
from support.faults.workloads import NUM_TOKENS
from support.processes.stack import Part, running_stack

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_streams_continue_unchanged(tmp_path: Path, num_engines: int) -> None:
    with running_stack(tmp_path, engines=num_engines) as stack:
        undisturbed = asyncio.run(run_all(stack))
        open_streams = []

        def kill_an_engine(readers: Sequence[GrpcReader]) -> None:
            victim: Part = stack.busiest_engine()
            victim.kill()
            open_streams.append(unfinished(readers))
            if num_engines == 1:
                victim.start()

        disturbed = asyncio.run(run_all(stack, disturb=kill_an_engine))

    assert open_streams[0] > 0, "the engine was killed after the streams had ended"
    assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
    assert all(outcome.num_tokens == NUM_TOKENS for outcome in disturbed)
    assert not any(outcome.reconnects for outcome in disturbed), "the gateway should have kept every stream open"
