"""SIGTERM of an engine in the middle of long streams: it hands them back and exits within seconds."""

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.stream_clients import GrpcReader
from support.faults.disturbed_runs import run_all
from support.processes.stack import Part, running_stack

pytestmark = pytest.mark.timeout(180)

DRAIN_LIMIT_S = 10.0


def test_an_engine_hands_back_and_another_continues(tmp_path: Path) -> None:
    with running_stack(tmp_path, engines=2) as stack:
        undisturbed = asyncio.run(run_all(stack))
        left: list[Part] = []
        drain_s: list[float] = []

        def drain(_: Sequence[GrpcReader]) -> None:
            drained = stack.busiest_engine()
            left.append(drained)
            started = time.monotonic()
            drained.signal(signal.SIGTERM)
            assert drained.wait() == 0
            drain_s.append(time.monotonic() - started)

        disturbed = asyncio.run(run_all(stack, disturb=drain))
        handed_back = [line for line in left[0].log_tail().splitlines() if "handed back" in line]

    assert drain_s[0] <= DRAIN_LIMIT_S
    assert handed_back
    # The log has what it held at SIGTERM; after its exit the other engine may have finished everything already.
    assert "handed back 0" not in handed_back[0]
    assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]
