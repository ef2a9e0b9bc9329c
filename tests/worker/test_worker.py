"""The worker on a real queue, with the small arithmetic model in place of a large one."""

import asyncio
import logging
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import FinishReason, TokenIds
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine import SamplingParams
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_engine.request import SequenceOutput
from pagestream_engine.sampling_params import child_seed
from pagestream_streams import Append, AppendOutcome, Broker, EngineSession, GatewaySession, StreamsSettings
from pagestream_worker import EXIT_STALLED, EngineFailed, RunningRequest
from support.engines.arithmetic_model import (
    ArithmeticRunner,
    SeededRunner,
    undisturbed,
)
from support.engines.arithmetic_worker import (
    FACTS,
    LIMIT_S,
    MODEL,
    TENANT,
    GatedRunner,
    SlowRunner,
    accepted,
    expected,
    read,
    running_worker,
    tokens,
)
from support.processes.waiting import wait_until
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served


QUICK = StreamsSettings(lease_ms=2000)


class BrokenRunner(ArithmeticRunner):
    """Fails from its fifth step on."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 4:
            raise MemoryError("no memory for the step")
        return super().execute(plan)


class SlowSeededRunner(SeededRunner):
    """As slow, and choices differ by their seeds."""

    def execute(self, plan: StepPlan) -> PendingResult:
        time.sleep(0.005)
        return super().execute(plan)


async def test_requests_are_served_in_full(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, max_num_seqs=4) as running:
            specs = [await accepted(gateway, [number, 5, 6], n=2) for number in range(1, 8)]
            logs = await asyncio.gather(*(read(gateway, spec) for spec in specs))
            await running.end()
    for number, log in enumerate(logs, start=1):
        assert tokens(log, 0) == tokens(log, 1) == expected([number, 5, 6])
        assert log[-1].end.usage.completion_tokens == 60
        assert log[-1].end.reason == FinishReason.FINISH_REASON_LENGTH


async def test_a_request_that_the_engine_refuses_fails_alone(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path) as running:
            bad = await accepted(gateway, [FACTS.vocab_size + 1])
            unsupported = await accepted(gateway, [1], temperature=-1.0)
            good = await accepted(gateway, [1, 2])
            for spec, word in ((bad, "vocabulary"), (unsupported, "temperature")):
                end = (await read(gateway, spec))[-1].end
                assert end.reason == FinishReason.FINISH_REASON_ERROR
                assert word in end.error.message
            assert tokens(await read(gateway, good)) == expected([1, 2])
            await running.end()


async def test_a_step_that_takes_three_leases_costs_no_request_its_engine(redis_url: str, tmp_path: Path) -> None:
    GatedRunner.gate.clear()
    try:
        async with await Broker.connect(redis_url, QUICK) as broker, GatewaySession(broker) as gateway:
            async with running_worker(broker, tmp_path, GatedRunner) as slow:
                spec = await accepted(gateway, [1, 2])
                await eventually(lambda: slow.worker.load()["running"] == 1)
                async with running_worker(broker, tmp_path) as other:
                    await asyncio.sleep(3 * QUICK.lease_ms / 1000)  # the length is what is tested
                    GatedRunner.gate.set()
                    assert tokens(await read(gateway, spec)) == expected([1, 2])
                    assert (await broker.view(spec.request_id, TENANT)).attempts == 1
                    await other.end()
                await slow.end()
    finally:
        GatedRunner.gate.set()


async def test_a_cancelled_request_frees_the_engine(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, num_gpu_blocks_override=64) as running:
            spec = await accepted(gateway, [1, 2], max_tokens=900)
            reading = asyncio.create_task(read(gateway, spec))
            await eventually(lambda: running.worker.load()["running"] == 1)
            assert await broker.cancel(spec.request_id, TENANT) == FinishReason.FINISH_REASON_CANCELLED
            await eventually(lambda: running.worker.load()["running"] == 0)
            assert running.worker.load()["free_blocks"] == 64
            assert (await reading)[-1].end.reason == FinishReason.FINISH_REASON_CANCELLED
            again = await accepted(gateway, [3])
            assert tokens(await read(gateway, again)) == expected([3])
            await running.end()


async def test_a_list_of_prompts_larger_than_the_pool_is_served(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, num_gpu_blocks_override=4) as running:
            prompts = [[number, *range(1, 30)] for number in range(1, 6)]
            assert sum(map(len, prompts)) > 4 * 16
            spec = RequestSpec(
                request_id=await gateway.place(MODEL, prompts[0], TENANT),
                model=MODEL,
                tenant=TENANT,
                prompts=[TokenIds(ids=prompt) for prompt in prompts],
                sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=10),
                disconnect_grace_ms=60_000,
            )
            await gateway.accept(spec)
            log = await read(gateway, spec)
            for choice, prompt in enumerate(prompts):
                assert tokens(log, choice) == expected(prompt, 10)
            await running.end()


async def test_each_prompt_of_a_list_ends_where_it_is_so_long_with_its_output(redis_url: str, tmp_path: Path) -> None:
    prompts, max_tokens, total = [[3], [4] * 90, [5] * 40], 50, 100
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, max_model_len=200) as running:
            spec = RequestSpec(
                request_id=await gateway.place(MODEL, prompts[0], TENANT),
                model=MODEL,
                tenant=TENANT,
                prompts=[TokenIds(ids=prompt) for prompt in prompts],
                sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=max_tokens),
                max_total_tokens=total,
                disconnect_grace_ms=60_000,
            )
            await gateway.accept(spec)
            log = await read(gateway, spec)
            for choice, (prompt, most) in enumerate(zip(prompts, (50, 10, 50), strict=True)):
                assert tokens(log, choice) == expected(prompt, most)
            assert log[-1].end.usage.completion_tokens == 110
            await running.end()


async def test_a_busy_worker_claims_nothing_that_its_next_step_could_not_compute(
    redis_url: str, tmp_path: Path
) -> None:
    prompts = [[number, *range(1, 12)] for number in range(1, 11)]
    GatedRunner.gate.clear()
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, GatedRunner, max_num_batched_tokens=16) as busy:
            try:
                specs = [await accepted(gateway, prompts[0])]
                await eventually(lambda: busy.worker.load()["running"] == 1)
                specs += [await accepted(gateway, prompt) for prompt in prompts[1:]]
                readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
                async with running_worker(broker, tmp_path) as free:
                    await eventually(lambda: sum(reading.done() for reading in readings) >= 8)
                    await free.end()
            finally:
                GatedRunner.gate.set()
            logs = await asyncio.gather(*readings)
            await busy.end()
    for prompt, log in zip(prompts, logs, strict=True):
        assert tokens(log) == expected(prompt)


async def test_a_worker_with_short_steps_claims_the_next_ones_prompts_while_a_step_runs(
    redis_url: str, tmp_path: Path
) -> None:
    prompts = [[number, *range(1, 12)] for number in range(1, 11)]
    GatedRunner.gate.set()
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:

        async def num_claimed() -> int:
            views = [await broker.view(spec.request_id, TENANT) for spec in specs]
            return sum(view.attempts > 0 for view in views)

        async with running_worker(broker, tmp_path, GatedRunner, max_num_batched_tokens=12) as running:
            first = await accepted(gateway, prompts[0])
            await read(gateway, first)  # its steps were short
            GatedRunner.gate.clear()
            try:
                specs = [await accepted(gateway, prompts[0])]
                readings = [asyncio.create_task(read(gateway, specs[0]))]
                await eventually(lambda: running.worker.load()["running"] == 1)
                specs += [await accepted(gateway, prompt) for prompt in prompts[1:]]
                readings += [asyncio.create_task(read(gateway, spec)) for spec in specs[1:]]
                for _ in range(int(LIMIT_S / 0.01)):
                    if await num_claimed() > 1:
                        break
                    await asyncio.sleep(0.01)
                assert await num_claimed() == 2, "the running step's and the next one's"
            finally:
                GatedRunner.gate.set()
            logs = await asyncio.gather(*readings)
            await running.end()
    for prompt, log in zip(prompts, logs, strict=True):
        assert tokens(log) == expected(prompt)


async def test_first_tokens_are_appended_before_the_steps_other_tokens_are_taken(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, list[str]]] = []
    add_output, append = RunningRequest.add_output, EngineSession.append

    def recorded_add_output(request: RunningRequest, choice: int, output: SequenceOutput) -> None:
        done.append(("taken", [request.request_id]))
        add_output(request, choice, output)

    async def recorded_append(session: EngineSession, appends: Sequence[Append]) -> list[AppendOutcome]:
        done.append(("sent", [each.request_id for each in appends]))
        return await append(session, appends)

    monkeypatch.setattr(RunningRequest, "add_output", recorded_add_output)
    monkeypatch.setattr(EngineSession, "append", recorded_append)
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner) as running:
            long = await accepted(gateway, [1, 2], max_tokens=300)
            reading = asyncio.create_task(read(gateway, long))
            await eventually(lambda: running.worker.load()["running"] == 1)
            new: list[str] = []
            for number in range(20):
                spec = await accepted(gateway, [number, 3], max_tokens=2)
                new.append(spec.request_id)
                assert tokens(await read(gateway, spec)) == expected([number, 3], 2)
            assert tokens(await reading) == expected([1, 2], 300)
            await running.end()
    old = long.request_id
    wanted = [[("taken", [each]), ("sent", [each]), ("taken", [old]), ("sent", [old])] for each in new]
    # Where the step before is still being sent, all are taken at once.
    assert any(done[place : place + 4] in wanted for place in range(len(done)))


async def test_a_worker_that_ends_hands_back_and_the_next_goes_on(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        spec = RequestSpec()
        async with running_worker(broker, tmp_path, SlowRunner) as first:
            spec.CopyFrom(await accepted(gateway, [1, 2], max_tokens=900))
            reading = asyncio.create_task(read(gateway, spec))
            await eventually(lambda: first.worker.load()["running"] == 1)
            await first.end()
        before = await broker.view(spec.request_id, TENANT)
        assert before.next_index < 900
        async with running_worker(broker, tmp_path) as second:
            assert tokens(await reading) == expected([1, 2], 900)
            await second.end()
        assert (await broker.view(spec.request_id, TENANT)).attempts == 2


async def test_siblings_that_were_handed_back_go_on_as_one_request(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        spec = RequestSpec()
        async with running_worker(broker, tmp_path, SlowSeededRunner) as first:
            spec.CopyFrom(await accepted(gateway, [1, 2], n=3, seed=9, max_tokens=600))
            reading = asyncio.create_task(read(gateway, spec))
            await eventually(lambda: first.worker.load()["running"] == 3)
            await first.end()
        assert 0 < (await broker.view(spec.request_id, TENANT)).next_index < 3 * 600
        # The three do not fit to their end: they are preempted, or split where they came far before.
        async with running_worker(broker, tmp_path, SeededRunner, num_gpu_blocks_override=76) as second:
            log = await reading
            await second.end()
        params = SamplingParams(max_tokens=600, ignore_eos=True)
        for choice in range(3):
            assert tokens(log, choice) == undisturbed([1, 2], params, FACTS, 1000, seed=child_seed(9, choice))
        assert log[-1].end.usage.prompt_tokens == 2
        assert log[-1].end.usage.completion_tokens == 1800


async def test_an_engine_that_fails_ends_the_worker_and_loses_nothing(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, BrokenRunner) as broken:
            spec = await accepted(gateway, [1, 2])
            reading = asyncio.create_task(read(gateway, spec))
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(EngineFailed, match="no memory"):
                    await broken.task
        async with running_worker(broker, tmp_path) as healthy:
            assert tokens(await reading) == expected([1, 2])
            await healthy.end()


async def test_outputs_that_cannot_be_taken_end_the_worker_and_lose_no_token(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_output = RunningRequest.add_output

    def broken(request: RunningRequest, choice: int, output: SequenceOutput) -> None:
        if list(request.claim.spec.prompts[0].ids) == [1, 2] and request.pending(100).first_index >= 5:
            raise OverflowError("no such number")
        add_output(request, choice, output)

    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner) as failing:
            with monkeypatch.context() as patch:
                patch.setattr(RunningRequest, "add_output", broken)
                specs = [await accepted(gateway, [number, 2], max_tokens=200) for number in (1, 2, 3)]
                readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
                async with asyncio.timeout(LIMIT_S):
                    with pytest.raises(EngineFailed, match="no such number"):
                        await failing.task
        async with running_worker(broker, tmp_path) as healthy:
            for number, reading in zip((1, 2, 3), readings, strict=True):
                assert tokens(await reading) == expected([number, 2], 200)
            await healthy.end()


async def test_a_request_whose_choices_fail_together_leaves_room_for_any_size(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, num_gpu_blocks_override=4) as running:
            bad = await accepted(gateway, [FACTS.vocab_size + 1], n=4)
            assert (await read(gateway, bad))[-1].end.reason == FinishReason.FINISH_REASON_ERROR
            prompts = [[number, *range(1, 30)] for number in range(1, 6)]
            large = RequestSpec(
                request_id=await gateway.place(MODEL, prompts[0], TENANT),
                model=MODEL,
                tenant=TENANT,
                prompts=[TokenIds(ids=prompt) for prompt in prompts],
                sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=10),
                disconnect_grace_ms=60_000,
            )
            await gateway.accept(large)
            assert tokens(await read(gateway, large), 4) == expected(prompts[4], 10)
            await running.end()


STALLING = """
    import asyncio, sys, time
    from pathlib import Path
    sys.path.insert(0, {support!r})
    from support.engines import arithmetic_worker as w

    class StalledRunner(w.ArithmeticRunner):
        def execute(self, step):
            time.sleep(60)

    async def main():
        async with await w.Broker.connect({url!r}) as broker, w.GatewaySession(broker) as gateway:
            async with w.running_worker(broker, Path({folder!r}), StalledRunner):
                await w.accepted(gateway, [1])
                await asyncio.sleep(30)

    settings = w.WorkerSettings
    w.WorkerSettings = lambda *arguments, **given: settings(*arguments, **given, stall_timeout_s=0.3)
    asyncio.run(main())
"""


def test_the_watchdog_ends_a_process_whose_step_never_ends(redis_url: str, tmp_path: Path) -> None:
    support = Path(__file__).parents[1]
    program = textwrap.dedent(STALLING).format(support=str(support), url=redis_url, folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT_S + 10, check=False)
    assert ended.returncode == EXIT_STALLED, ended.stderr.decode()
    assert b"exiting" in ended.stderr

    async def suspects() -> list[bytes]:
        """Once the lease of the dead engine has lapsed."""
        async with await Broker.connect(redis_url) as broker, GatewaySession(broker):
            where = broker.connection.keyspace.partition(MODEL, 0)
            name = where.prefix + "suspects"
            await eventually(lambda: broker.connection.execute("ZCARD", name))
            found: list[bytes] = await broker.connection.execute("ZRANGE", name, 0, -1)
            return found

    assert len(asyncio.run(suspects())) == 1, "it was new in the step: one death is enough"


STOPPED = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, {support!r})
    from pagestream_streams import StreamsSettings
    from support.engines import arithmetic_worker as w
    from support.processes.waiting import until

    async def main():
        broker = w.Broker.connect({url!r}, StreamsSettings(lease_ms=60_000))
        async with await broker as broker, w.GatewaySession(broker) as gateway:
            async with w.running_worker(broker, Path({folder!r}), w.SlowRunner, engine_core={core!r}) as running:
                spec = await w.accepted(gateway, [1], max_tokens=300)
                await until(lambda: running.core.figures.stats.num_generated_tokens > 20, "some tokens")
                print("runs", flush=True)
                assert w.tokens(await w.read(gateway, spec)) == w.expected([1], 300)
                await running.end()
        print("ended")

    settings = w.WorkerSettings
    w.WorkerSettings = lambda *arguments, **given: settings(*arguments, **given, stall_timeout_s={stall_timeout_s})
    asyncio.run(main())
"""
STALL_TIMEOUT_S = 1.5


@pytest.mark.parametrize("core", ["process", pytest.param("inline", marks=pytest.mark.slow)])
def test_a_process_that_was_stopped_goes_on(redis_url: str, tmp_path: Path, core: str) -> None:
    """SIGSTOP and SIGCONT of the worker, with a step under way: for its watchdog the time between did not pass."""
    values = {"support": str(Path(__file__).parents[1]), "url": redis_url, "folder": str(tmp_path), "core": core}
    program = textwrap.dedent(STOPPED).format(**values, stall_timeout_s=STALL_TIMEOUT_S)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "runs\n"
        worker.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped_at + 2 * STALL_TIMEOUT_S, "more than the stall timeout")
        worker.send_signal(signal.SIGCONT)
        assert worker.communicate(timeout=LIMIT_S + 10)[0] == "ended\n"
    assert worker.returncode == 0


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
