"""An engine in a process of its own: the same tokens, every way in which it can end, and what its worker does then."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from random import Random

import pytest
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_engine import (
    Choice,
    ConfigError,
    Engine,
    EngineConfig,
    EngineError,
    RankLost,
    SamplingParams,
    SequenceOutput,
)
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_engine.wire.worker import AddGroup, Program, Stop, TokenColumns
from pagestream_streams import Broker, GatewaySession, StreamsSettings
from pagestream_worker import STEPS_AHEAD, TITLE, EngineCoreError, EngineFailed, EngineProcess, is_link_lost
from support.engines.arithmetic_model import make_folder, undisturbed
from support.engines.arithmetic_worker import (
    FACTS,
    LIMIT_S,
    MODEL,
    TENANT,
    ArithmeticRunner,
    Running,
    SlowRunner,
    accepted,
    arithmetic_program,
    expected,
    read,
    running_worker,
    tokens,
)
from support.processes.waiting import children_of, is_running, until, wait_until
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
PROMPT = [1, 2, 3]
NUM_TOKENS = 300
NUM_REQUESTS = 4
EXAMPLES = Path(__file__).parents[2] / "services" / "engine" / "examples"
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
                # A busy machine may show the end of the connection a second before that of the process.
                with pytest.raises(EngineFailed, match=r"was ended by SIGKILL|closed its connection"):
                    await first.task
        views = [await broker.view(spec.request_id, spec.tenant) for spec in specs]
        assert any(view.next_index > 0 for view in views), "the engine was killed before the first token"
        async with running_worker(broker, tmp_path) as second:
            check(await asyncio.gather(*(read(gateway, spec) for spec in specs)))
            await second.end()
        assert {(await broker.view(spec.request_id, spec.tenant)).attempts for spec in specs} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
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


class ExitingRunner(ArithmeticRunner):
    """Ends its process in the third step, as a library might."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise SystemExit("a library has had enough")
        return super().execute(plan)


class CrashingRunner(ArithmeticRunner):
    """Ends its process in the third step, without a word."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            os._exit(7)
        return super().execute(plan)


class SilentRunner(ArithmeticRunner):
    """Loses another machine in the third step."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise RankLost(1, 2, "sent nothing for 1.5 s", is_link_lost=True)
        return super().execute(plan)


def refused_load(model: str, config: EngineConfig) -> Engine:
    """Load as with a wrong option."""
    raise ConfigError("block_size", 3, "a power of two")


def broken_load(model: str, config: EngineConfig) -> Engine:
    """Load as with a broken library."""
    raise ImportError("libtorch.so is cut off")


def is_asleep(pid: int) -> Callable[[], bool]:
    """Return whether a process waits, and has not computed since the last call."""
    seen = [""]

    def look() -> bool:
        state, *figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        before, seen[0] = seen[0], "/".join(figures[10:12])  # user and system time
        return state == "S" and seen[0] == before

    return look


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0")


class Owner:
    """The event loop's side of a process."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.outputs: list[SequenceOutput] = []
        process.listen(on_outputs=self._take, on_begun=lambda _: None, on_step=lambda *_: None)

    def _take(self, outputs: Sequence[SequenceOutput], _: TokenColumns) -> None:
        self.outputs += outputs

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(self.process.ended)


@asynccontextmanager
async def running(folder: Path, runner: type[ArithmeticRunner] = ArithmeticRunner) -> AsyncIterator[Owner]:
    process = EngineProcess(arithmetic_program(make_folder(folder), EngineConfig(), runner))
    await process.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(process.loaded)
        yield Owner(process)
    finally:
        process.close()


@pytest.mark.parametrize("starts_by_itself", [True], ids=["an interpreter of its own"])
async def test_it_computes_the_same_tokens_and_stops_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as owner:
        facts = owner.process.loaded.result(0)
        assert (facts.vocab_size, facts.kv_layout.block_size, dict(facts.memory_bytes)) == (FACTS.vocab_size, 16, {})
        assert title(owner.process.pid) == TITLE
        owner.process.submit(AddGroup(PROMPT, [Choice("a", PARAMS)]))
        # Larger than what a socket takes at once.
        owner.process.submit(AddGroup([FACTS.vocab_size] * 100_000, [Choice("bad", PARAMS)]))
        await until(lambda: len(owner.outputs) == 21, "all outputs")
        assert owner.process.figures.num_commands == 2
        os.kill(owner.process.pid, signal.SIGTERM)  # to the whole group, of which the worker decides the end
        owner.process.submit(Stop())
        await owner.ended()
        wait_until(lambda: not is_running(owner.process.pid), "its end")
    tokens = [output.token_id for output in owner.outputs if output.seq_id == "a"]
    assert tokens == undisturbed(PROMPT, PARAMS, FACTS, 100)
    [refused] = [output for output in owner.outputs if output.seq_id == "bad"]
    assert refused.error is not None
    assert "vocabulary" in refused.error


def relay(source: socket.socket, target: socket.socket, sizes: Random) -> None:
    """Send on what comes in pieces of at most 40 bytes, each once the one before was received."""
    with source, target, suppress(ConnectionError):
        while data := source.recv(sizes.randint(1, 40)):
            target.sendall(data)
            while int.from_bytes(ioctl(target, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                time.sleep(0.0001)
        target.shutdown(socket.SHUT_WR)


@asynccontextmanager
async def cut_connections(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let nothing but small pieces cross a pair of sockets that is made meanwhile, wherever a message ends."""
    make_pair, threads = socket.socketpair, list[threading.Thread]()

    def cut_pair() -> tuple[socket.socket, socket.socket]:
        (ours, near), (far, theirs) = make_pair(), make_pair()
        for number, (source, target) in enumerate([(near, far.dup()), (far, near.dup())]):
            thread = threading.Thread(target=relay, args=(source, target, Random(number)))
            thread.start()
            threads.append(thread)
        return ours, theirs

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", cut_pair)
        yield
    for thread in threads:
        await asyncio.to_thread(thread.join, LIMIT_S)
        assert not thread.is_alive()


async def test_messages_are_read_however_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {f"{number}": [number + 1] * length for number, length in enumerate((1, 40, 90))}
    async with cut_connections(monkeypatch), running(tmp_path) as owner:
        for seq_id, prompt in prompts.items():
            owner.process.submit(AddGroup(prompt, [Choice(f"{seq_id}/{child}", PARAMS) for child in range(2)]))
        owner.process.submit(AddGroup([FACTS.vocab_size], [Choice("bad", PARAMS)]))
        await until(lambda: len(owner.outputs) == 121, "all outputs")
        figures = owner.process.figures
        assert (figures.num_commands, figures.stats.num_generated_tokens) == (4, 120)
        owner.process.submit(Stop())
        await owner.ended()
    [refused] = [output for output in owner.outputs if output.error is not None]
    assert (refused.seq_id, refused.finish_reason) == ("bad", "error")
    for seq_id, prompt in prompts.items():
        for child in range(2):
            outputs = [output for output in owner.outputs if output.seq_id == f"{seq_id}/{child}"]
            assert [output.token_id for output in outputs] == undisturbed(prompt, PARAMS, FACTS, 200)
            assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]


async def test_it_waits_for_a_worker_that_takes_no_reports(tmp_path: Path) -> None:
    """A worker that is stopped, or starved, must not find that its engine has finished what it shows as running."""
    async with running(tmp_path) as owner:
        owner.process.submit(AddGroup(PROMPT, [Choice("a", ENDLESS)]))
        await until(lambda: len(owner.outputs) > STEPS_AHEAD, "steps that were taken")
        before = len(owner.outputs)
        wait_until(is_asleep(owner.process.pid), "the engine to wait for this event loop")
        os.kill(owner.process.pid, signal.SIGKILL)
        with pytest.raises(EngineCoreError):
            await owner.ended()
    assert before < len(owner.outputs) <= before + STEPS_AHEAD


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        pytest.param(ExitingRunner, "SystemExit: a library has had enough", marks=pytest.mark.slow),
        pytest.param(CrashingRunner, "exited with code 7", marks=pytest.mark.slow),
        (SilentRunner, "sent nothing for 1.5 s"),
    ],
)
async def test_a_process_that_ends_itself_says_why(tmp_path: Path, runner: type[ArithmeticRunner], reason: str) -> None:
    async with running(tmp_path, runner) as owner:
        owner.process.submit(AddGroup(PROMPT, [Choice("a", PARAMS)]))
        with pytest.raises(EngineCoreError, match=reason) as caught:
            await owner.ended()
        assert len(owner.outputs) == 2
        assert is_link_lost(caught.value) == (runner is SilentRunner)


@pytest.mark.parametrize(
    ("load", "error", "words"),
    [
        ("refused_load", EngineError, "block_size: given 3"),
        pytest.param("broken_load", EngineCoreError, "ImportError: libtorch", marks=pytest.mark.slow),
    ],
)
async def test_the_error_of_a_load_is_the_futures(load: str, error: type[Exception], words: str) -> None:
    process = EngineProcess(Program(f"{__name__}:{load}", "model", EngineConfig(), "json", "INFO", "e"))
    await process.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(error, match=words) as caught:
                await asyncio.wrap_future(process.loaded)
        assert isinstance(caught.value, EngineError) == (error is EngineError)
    finally:
        process.close()


PARENT = """
import asyncio, sys, time
from pathlib import Path
from pagestream_engine import EngineConfig
from pagestream_worker import EngineProcess
from support.engines.arithmetic_worker import SlowRunner, arithmetic_program

async def main():
    process = EngineProcess(arithmetic_program(Path(sys.argv[1]), EngineConfig(), SlowRunner))
    await process.start()
    await asyncio.wrap_future(process.loaded)
    print(process.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_it_dies_with_its_worker(tmp_path: Path) -> None:
    """Also where it is stopped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(make_folder(tmp_path))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not is_running(pid), "its end")
