"""A worker that ends while all others have another fingerprint: an interleaving that no real queue produces at will."""

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream_engine import RankLost
from pagestream_engine.plan import full_attention
from pagestream_engine.wire.worker import Stop
from pagestream_streams import Append, AppendOutcome, Claim, EngineSession
from pagestream_telemetry import silent_telemetry
from pagestream_worker import EngineCore, EngineFailed, Health, Worker, WorkerSettings, WorkerTelemetry
from support.processes.waiting import LIMIT_S


class IdleCore:
    """An engine that has loaded and gets no work."""

    def __init__(self) -> None:
        self.loaded: Future[Any] = Future()
        self.loaded.set_result(
            SimpleNamespace(kv_layout=full_attention(16), max_num_seqs=64, max_num_batched_tokens=512, interrupts=False)
        )
        self.figures = SimpleNamespace(stats=SimpleNamespace(num_claimable_blocks=1000))
        self.ended: Future[None] = Future()

    def listen(self, **_: object) -> None:
        pass

    def submit(self, command: object) -> None:
        if isinstance(command, Stop) and not self.ended.done():
            self.ended.set_result(None)

    def step_age_s(self) -> float:
        return 0.0


class ScriptedSession:
    """One request waits; a claim empties the queue some time before its answer arrives."""

    head_start_s = 0.1

    def __init__(self) -> None:
        self.waits = True
        self.is_answered = False
        self.looks = 0
        self.failed: list[bool] = []

    async def retire(self) -> bool:
        return True

    async def has_queued_with_same_fingerprint(self) -> bool:
        self.looks += 1
        return self.waits

    async def claim(self, **_: object) -> list[Claim]:
        if self.waits and self.looks:  # the worker has looked at the queue once, and will look again
            self.waits = False
            await asyncio.sleep(0.3)
            self.is_answered = True
        return []

    async def wait_for_work(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        self.failed.append(failed)

    async def mark(self, **_: object) -> None:
        pass

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        return []


async def test_the_last_engine_of_a_fingerprint_waits_for_the_answer_of_its_last_claim() -> None:
    settings = WorkerSettings("m", "", "m", "e", finish_timeout_s=5.0)
    telemetry = WorkerTelemetry(silent_telemetry(), "m", "e")
    worker = Worker(cast(EngineCore, IdleCore()), settings, Health(60.0), telemetry)
    session, stop = ScriptedSession(), asyncio.Event()
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await worker.run(cast(EngineSession, session), stop)
    assert (session.waits, session.is_answered) == (False, True)


@pytest.mark.parametrize(
    ("error", "is_death"),
    [
        (KeyError("a defect"), True),
        (StopIteration(), True),
        (RankLost(1, 2, "was killed by signal 9"), True),
        (RankLost(1, 2, "sent nothing for 1.5 s", is_link_lost=True), False),
    ],
    ids=repr,
)
async def test_whatever_ends_the_engine_ends_the_worker(error: Exception, is_death: bool) -> None:
    """An asyncio future refuses StopIteration, which an engine can raise as any other error. A machine that fell silent
    is no death of which the requests are suspected.
    """
    core, session = IdleCore(), ScriptedSession()
    session.waits = False
    telemetry = WorkerTelemetry(silent_telemetry(), "model", "engine")
    worker = Worker(cast(EngineCore, core), WorkerSettings("m", "", "model", "engine"), Health(60.0), telemetry)
    running = asyncio.create_task(worker.run(cast(EngineSession, session), asyncio.Event()))
    await asyncio.sleep(0)
    core.ended.set_exception(error)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineFailed):
            await running
    assert session.failed == [is_death]
