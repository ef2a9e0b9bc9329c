"""A worker whose engine's process ends alone: the worker hands everything back and ends with the reason."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, StreamsSettings
from pagestream_worker.serving.outputs import EngineFailed
from pagestream_worker.stepping.engine_process import EngineProcess
from support.engines.arithmetic_worker import (
    LIMIT_S,
    MODEL,
    TENANT,
    Running,
    SlowRunner,
    accepted,
    expected,
    read,
    running_worker,
    tokens,
)
from support.processes.waiting import children_of, is_running
from support.protocol.token_streams import eventually

NUM_TOKENS = 300
NUM_REQUESTS = 4
EXAMPLES = Path(__file__).parents[3] / "services" / "engine" / "examples"
PATIENT = StreamsSettings(lease_ms=60_000)
"""No lease lapses within the test: what goes on elsewhere was handed back."""


def kill_engine(running: Running, number: signal.Signals) -> None:
    assert isinstance(running.core, EngineProcess)
    os.kill(running.core.pid, number)


async def all_accepted(gateway: GatewaySession) -> list[RequestSpec]:
    return [await accepted(gateway, [number, 2], max_tokens=NUM_TOKENS) for number in range(NUM_REQUESTS)]


def check(logs: list[list[LogEntry]]) -> None:
    assert [tokens(log) for log in logs] == [expected([number, 2], NUM_TOKENS) for number in range(NUM_REQUESTS)]


async def test_requests_of_a_killed_engine_go_on_elsewhere(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url, PATIENT) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, engine_core="process") as first:
            specs = await all_accepted(gateway)
            await eventually(lambda: first.worker.load()["running"] == NUM_REQUESTS)
            await eventually(lambda: first.core.figures.stats.num_generated_tokens > 10 * NUM_REQUESTS)
            kill_engine(first, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(EngineFailed, match="was ended by SIGKILL"):
                    await first.task
        views = [await broker.view(spec.request_id, spec.tenant) for spec in specs]
        assert any(view.next_index > 0 for view in views), "the engine was killed before the first token"
        async with running_worker(broker, tmp_path) as second:
            check(await asyncio.gather(*(read(gateway, spec) for spec in specs)))
            await second.end()
        assert {(await broker.view(spec.request_id, spec.tenant)).attempts for spec in specs} == {2}


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_requests_of_an_engine_that_lost_a_rank_go_on_elsewhere(
    redis_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    """The rank's end, or that the others wait for it, ends the group, the engine and the worker."""
    ranks = {"tensor_parallel_size": 2}
    async with await Broker.connect(redis_url, PATIENT) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, engine_core="process", **ranks) as first:
            specs = await all_accepted(gateway)
            await eventually(lambda: first.worker.load()["running"] == NUM_REQUESTS)
            await eventually(lambda: first.core.figures.stats.num_generated_tokens > 10 * NUM_REQUESTS)
            assert isinstance(first.core, EngineProcess)
            pids = [pid for pid in children_of(first.core.pid) if b"spawn_main" in command_of(pid)]
            assert len(pids) == 2
            os.kill(pids[1], number)
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(EngineFailed, match=r"rank [01] of 2"):
                    await first.task
            await eventually(lambda: not any(map(is_running, pids)))
        async with running_worker(broker, tmp_path) as second:
            check(await asyncio.gather(*(read(gateway, spec) for spec in specs)))
            await second.end()
        assert {(await broker.view(spec.request_id, spec.tenant)).attempts for spec in specs} == {2}


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_stopped_engine_goes_on_when_it_is_continued(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, engine_core="process") as running:
            specs = await all_accepted(gateway)
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            await eventually(lambda: running.worker.load()["running"] == NUM_REQUESTS)
            kill_engine(running, signal.SIGSTOP)
            await eventually(lambda: running.core.step_age_s() > 0.5)
            kill_engine(running, signal.SIGCONT)
            check(await asyncio.gather(*readings))
            assert {(await broker.view(spec.request_id, spec.tenant)).attempts for spec in specs} == {1}
            await eventually(lambda: running.worker.load()["running"] == 0)
            assert running.core.step_age_s() == pytest.approx(0.0)
            await running.end()


async def test_the_process_imports_a_plugin_and_obeys_its_policy(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of one request, computed one after another: the shortest goes first of those that wait."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "custom_policy", raising=False)  # another test may have imported it
    options = {"max_num_seqs": 1, "scheduling_policy": "shortest_prompt_first", "plugins": ["custom_policy"]}
    prompts = [[number + 1] * length for number, length in enumerate((9, 60, 20, 2))]
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, engine_core="process", **options) as running:
            spec = RequestSpec(
                request_id=await gateway.place(MODEL, prompts[0], TENANT),
                model=MODEL,
                tenant=TENANT,
                prompts=[TokenIds(ids=prompt) for prompt in prompts],
                sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=20),
                disconnect_grace_ms=60_000,
            )
            await gateway.accept(spec)
            log = await read(gateway, spec)
            await running.end()
    assert [tokens(log, choice) for choice in range(4)] == [expected(prompt, 20) for prompt in prompts]
    order = [entry.choice for entry in log if entry.WhichOneof("body") == "token_id"]
    assert list(dict.fromkeys(order)) == [0, 3, 2, 1], "the first has begun when the others come"
    assert "custom_policy" not in sys.modules, "this process has registered nothing"
