"""Interleavings of the worker's event loop that no real queue brings about at will."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine.request.outputs import StepOutput
from pagestream_streams import Append, AppendOutcome, Claim, EngineSession
from pagestream_worker import worker as worker_module
from pagestream_worker.engine_thread import EngineThread, Stop
from pagestream_worker.request import Choice, RunningRequest
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.worker import EngineFailed, Worker

STEP_TOKENS = 512


class StillThread:
    """An engine's thread that computes nothing: the test says what it made."""

    def __init__(self) -> None:
        scheduler = SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=STEP_TOKENS)
        self.loaded: Future[Any] = Future()
        self.loaded.set_result(SimpleNamespace(block_size=16, config=SimpleNamespace(scheduler=scheduler)))
        self.last_prefill_step_s = 1.0
        self.on_stop: Any = None

    def listen(self, **_: object) -> None:
        pass

    def submit(self, command: object) -> None:
        if isinstance(command, Stop) and self.on_stop is not None:
            self.on_stop()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_free_blocks=1000)

    def step_age_s(self) -> float:
        return 0.0


class ScriptedQueue:
    """One request waits; a claim empties the queue some time before its answer comes."""

    head_start_s = 0.1

    def __init__(self) -> None:
        self.waits = True
        self.is_answered = False
        self.looks = 0

    async def retire(self) -> bool:
        return True

    async def has_queued_with_same_fingerprint(self) -> bool:
        self.looks += 1
        return self.waits

    async def claim(self, **_: object) -> list[Claim]:
        if self.waits and self.looks:  # the last of its kind has looked, and will look again
            self.waits = False
            await asyncio.sleep(0.3)
            self.is_answered = True
        return []

    async def wait_for_work(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        pass

    async def mark(self, **_: object) -> None:
        pass

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        return []


def idle_worker(**settings: float) -> tuple[Worker, StillThread]:
    thread = StillThread()
    return Worker(cast(EngineThread, thread), WorkerSettings("m", "", "m", "e", **settings)), thread  # type: ignore[arg-type]


def free(worker: Worker) -> tuple[int, int]:
    return worker._seats.free(worker._thread.stats().num_free_blocks)


def claim(nonce: str, *, prompts: int = 1, length: int = 2) -> Claim:
    spec = RequestSpec(request_id="r", prompts=[TokenIds(ids=[1] * length)] * prompts)
    return Claim(spec=spec, epoch=1, nonce=nonce, next_index=0, digest="", attempts=1, cached_tokens=0, deadline=None)


@pytest.mark.parametrize("is_appending", [False, True])
async def test_the_order_of_a_log_does_not_hang_on_what_is_being_sent(is_appending: bool) -> None:
    worker, _ = idle_worker()
    worker._start(claim("n", prompts=2))
    worker._take_outputs_or_end([StepOutput("r/n/0", 10, "a")])
    worker._is_appending = is_appending
    worker._take_outputs_or_end([StepOutput("r/n/0", 11, "b"), StepOutput("r/n/1", 20, "c")])
    worker._take_untaken()
    entries = worker._requests["r"].pending(100).entries
    assert [(entry.choice, entry.token_id) for entry in entries] == [(0, 10), (0, 11), (1, 20)]


async def test_a_request_that_comes_back_before_its_loss_is_seen_leaves_no_seat_taken() -> None:
    worker, _ = idle_worker()
    worker._start(claim("old", length=STEP_TOKENS + 100))
    assert free(worker) == (0, 0)
    worker._start(claim("new", length=STEP_TOKENS + 100))
    worker._take_outputs_or_end([StepOutput("r/old/0", 1, "")])
    worker._take_outputs_or_end([StepOutput("r/new/0", 1, "", "length")])
    requests, tokens = free(worker)
    assert requests == 1
    assert tokens > STEP_TOKENS


async def test_a_request_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: RunningRequest) -> Iterator[Sequence[Choice]]:
        raise OverflowError("no such number")
        yield ()

    worker, _ = idle_worker()
    with monkeypatch.context() as patch:
        patch.setattr(RunningRequest, "open_groups", broken)
        worker._start(claim("n"))
    [*_, end] = worker._requests["r"].pending(100).entries
    assert end.end.error.code == "engine_error"
    assert "number" not in end.end.error.message
    assert free(worker)[0] == 1


async def test_the_last_outputs_are_taken_before_the_end_and_may_be_what_fails() -> None:
    worker, _ = idle_worker()
    worker._start(claim("n"))
    worker._untaken = [StepOutput("no id", 1, "")]
    worker._take_end(None)
    with pytest.raises(EngineFailed):
        worker._thread_ended.result()


async def test_the_last_of_a_kind_waits_for_the_answer_of_its_last_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LINGER_S", 0.0)
    worker, thread = idle_worker(finish_timeout_s=5.0)
    thread.on_stop = lambda: worker._take_end(None)
    queue, stop = ScriptedQueue(), asyncio.Event()
    stop.set()
    async with asyncio.timeout(10):
        await worker.run(cast(EngineSession, queue), stop)
    assert (queue.waits, queue.is_answered) == (False, True)
