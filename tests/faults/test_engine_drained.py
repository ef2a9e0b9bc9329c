"""SIGTERM of an engine in the middle of long streams: it hands them back and is gone in seconds."""

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.stream_clients import GrpcReader
from support.faults.disturbed_runs import open_ids, run_all
from support.processes.stack import Part, running_stack

pytestmark = pytest.mark.timeout(180)

DRAIN_LIMIT_S = 10.0


def test_an_engine_hands_back_and_another_goes_on(tmp_path: Path) -> None:
    with running_stack(tmp_path, engines=2) as stack:
        undisturbed = asyncio.run(run_all(stack))
        left: list[Part] = []
        seen: list[float] = []

        def drain(readers: Sequence[GrpcReader]) -> None:
            under_way = open_ids(readers)
            assert under_way
            leaver = stack.engine_with_most_of(under_way)
            left.append(leaver)
            started = time.monotonic()
            leaver.signal(signal.SIGTERM)
            assert leaver.wait() == 0
            seen.append(time.monotonic() - started)

        disturbed = asyncio.run(run_all(stack, disturb=drain))
        handed_back = [line for line in left[0].log_tail().splitlines() if "handed back" in line]

    assert seen[0] <= DRAIN_LIMIT_S
    assert handed_back
    # What it held when it was told to end; once it has ended, the other one may be through with everything.
    assert "handed back 0" not in handed_back[0]
    assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
