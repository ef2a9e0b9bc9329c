"""SIGSTOP of an engine past its lease, then SIGCONT: another engine continues, and the resumed one can't write."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.stream_clients import GrpcReader
from support.faults.disturbed_runs import run_all
from support.processes.stack import Part, running_stack
from support.processes.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


def test_a_zombie_writes_nothing_and_serves_again(tmp_path: Path) -> None:
    with running_stack(tmp_path, engines=2) as stack:
        undisturbed = asyncio.run(run_all(stack))
        paused: list[Part] = []

        def pause(_: Sequence[GrpcReader]) -> None:
            paused.append(stack.busiest_engine())
            paused[0].signal(signal.SIGSTOP)

        disturbed = asyncio.run(run_all(stack, disturb=pause))
        assert [outcome.content() for outcome in disturbed] == [outcome.content() for outcome in undisturbed]

        zombie = paused[0]
        zombie.signal(signal.SIGCONT)
        wait_until(lambda: "dropped" in zombie.log_tail(), limit_s=10, what="the zombie to drop what it had")
        for other in stack.engines:
            if other is not zombie:
                other.stop()
        again = asyncio.run(run_all(stack))

    assert [outcome.content() for outcome in again] == [outcome.content() for outcome in undisturbed]
