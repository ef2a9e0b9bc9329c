"""The supervisor, against real small programs."""

import asyncio
import dataclasses
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pagestream_cli import PartFailedError
from pagestream_cli.supervisor import (
    Death,
    PartOutput,
    PartSpec,
    PartState,
    PartView,
    RestartPolicy,
    Standby,
    Supervisor,
)
from support.processes.waiting import LIMIT_S, is_running, until

pytestmark = pytest.mark.served

SLEEPER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, stable_s=60.0)


class Journal:
    """Records what a supervisor reports."""

    def __init__(self) -> None:
        self.deaths: list[tuple[str, int, float]] = []
        self.lines: list[tuple[str, str]] = []
        self.states: list[tuple[PartState, ...]] = []

    def changed(self, views: Sequence[PartView]) -> None:
        self.states.append(tuple(view.state for view in views))

    def died(self, view: PartView, death: Death, restart_delay_s: float) -> None:
        self.deaths.append((view.spec.name, death.exit_code, restart_delay_s))

    def line(self, spec: PartSpec, text: str) -> None:
        self.lines.append((spec.name, text))


def part(
    tmp_path: Path,
    name: str,
    code: str,
    *,
    stage: int = 0,
    drain_limit_s: float = 10.0,
    probe: Callable[[], Awaitable[bool]] | None = None,
    env: dict[str, str] | None = None,
) -> PartSpec:
    return PartSpec(
        name=name,
        argv=(sys.executable, "-I", "-S", "-c", code),
        log_path=tmp_path / f"{name}.log",
        drain_stage=stage,
        drain_limit_s=drain_limit_s,
        probe=probe,
        env=env or {},
    )


@asynccontextmanager
async def running(
    parts: Sequence[PartSpec], policy: RestartPolicy = QUICK, journal: Journal | None = None
) -> AsyncIterator[tuple[Supervisor, Journal]]:
    journal = journal or Journal()
    supervisor = Supervisor(parts, journal, policy)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, journal
    finally:
        supervisor.stop()
        async with asyncio.timeout(LIMIT_S):
            await task


def pid_of(supervisor: Supervisor, name: str) -> int | None:
    return next(view.pid for view in supervisor.views if view.spec.name == name)


def ups(journal: Journal, name: str = "a") -> int:
    return journal.lines.count((name, "up"))


async def test_parts_start_together_and_end_together(tmp_path: Path) -> None:
    async with running([part(tmp_path, "a", SLEEPER), part(tmp_path, "b", SLEEPER)]) as (supervisor, journal):
        await until(lambda: ups(journal) == ups(journal, "b") == 1, "both are up")
        pids = [view.pid for view in supervisor.views]
        assert all(pid is not None and is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids if pid is not None)
    assert [view.state for view in supervisor.views] == [PartState.ENDED, PartState.ENDED]
    assert journal.deaths == []


async def test_a_part_that_was_killed_is_started_again_at_once(tmp_path: Path) -> None:
    async with running([part(tmp_path, "a", SLEEPER)]) as (supervisor, journal):
        await until(lambda: ups(journal) == 1, "it is up")
        first = pid_of(supervisor, "a")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: ups(journal) == 2, "it is up again")
        assert pid_of(supervisor, "a") not in (first, None)
        assert supervisor.views[0].restarts == 1
    assert journal.deaths == [("a", -signal.SIGKILL, 0.0)]


async def test_a_part_that_dies_repeatedly_waits_longer_each_time(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.04, stable_s=60.0, hopeless_starts=100)

    async def never() -> bool:
        return False

    async with running([part(tmp_path, "a", "raise SystemExit(3)", probe=never)], policy) as (_, journal):
        await until(lambda: len(journal.deaths) >= 5, "five deaths")
    assert journal.deaths[:5] == [("a", 3, delay) for delay in (0.0, 0.01, 0.02, 0.04, 0.04)]


@pytest.mark.parametrize(("code", "deaths"), [(1, 2), (2, 0)])
async def test_a_part_that_cannot_start_ends_everything_with_its_last_words(
    tmp_path: Path, code: int, deaths: int
) -> None:
    """The third exit, or the first that says that the options are wrong, is the last one, and raised as the failure."""

    async def never() -> bool:
        return False

    good = part(tmp_path, "good", SLEEPER)
    bad = part(tmp_path, "bad", f"import sys; print('no such option', file=sys.stderr); sys.exit({code})", probe=never)
    journal = Journal()
    supervisor = Supervisor([good, bad], journal, QUICK)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: pid_of(supervisor, "good") is not None, "the good one runs")
    pid = pid_of(supervisor, "good")
    with pytest.raises(PartFailedError, match=rf"bad cannot start \(exit code {code}\)") as caught:
        async with asyncio.timeout(LIMIT_S):
            await task
    assert "no such option" in str(caught.value)
    assert caught.value.exit_code == code
    assert [name for name, _, _ in journal.deaths] == ["bad"] * deaths
    assert pid is not None
    assert not is_running(pid)


async def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    spec = PartSpec("ghost", ("/no/such/program",), tmp_path / "ghost.log", probe=never)
    with pytest.raises(PartFailedError, match="No such file or directory"):
        async with asyncio.timeout(LIMIT_S):
            await Supervisor([spec], Journal(), QUICK).run()


async def test_stages_end_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import os, signal, sys\n"
        "def end(*_):\n"
        "    with open(os.environ['ORDER'], 'a') as file: file.write(os.environ['NAME'] + '\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\n"
        "while True: signal.pause()"
    )
    parts = [
        part(tmp_path, name, code, stage=stage, env={"ORDER": str(order), "NAME": name})
        for name, stage in (("redis", 2), ("gateway", 0), ("engine", 1))
    ]
    async with running(parts) as (_, journal):
        await until(lambda: len(journal.lines) == 3, "all are up")
    assert order.read_text().split() == ["gateway", "engine", "redis"]


async def test_a_part_that_ignores_the_request_is_killed_after_its_limit(tmp_path: Path) -> None:
    async with running([part(tmp_path, "a", STUBBORN, drain_limit_s=0.2)]) as (supervisor, journal):
        await until(lambda: ups(journal) == 1, "it is up")
        pid = pid_of(supervisor, "a")
    assert pid is not None
    assert not is_running(pid)


async def test_a_second_stop_kills(tmp_path: Path) -> None:
    async with running([part(tmp_path, "a", STUBBORN, drain_limit_s=3600)]) as (supervisor, journal):
        await until(lambda: ups(journal) == 1, "it is up")
        pid = pid_of(supervisor, "a")
        supervisor.stop()  # the context asks again
    assert pid is not None
    assert not is_running(pid)


async def test_what_a_part_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\nsignal.pause()"
    )
    async with running([part(tmp_path, "a", code)]) as (supervisor, journal):
        await until(lambda: len(journal.lines) == 1, "the grandchild runs")
        grandchild = int(journal.lines[0][1])
        first = pid_of(supervisor, "a")
        assert is_running(grandchild)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_running(grandchild), "the grandchild ended with it")


async def test_an_orphan_that_holds_the_output_does_not_hide_the_death(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, signal\n"
        "command = [sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()']\n"
        "child = subprocess.Popen(command, start_new_session=True)\n"
        "print(child.pid, flush=True)\nsignal.pause()"
    )
    orphans: list[int] = []
    try:
        async with running([part(tmp_path, "a", code)]) as (supervisor, journal):
            await until(lambda: len(journal.lines) == 1, "the grandchild runs")
            first = pid_of(supervisor, "a")
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(lambda: len(journal.lines) == 2, "it was started again")
            orphans = [int(text) for _, text in journal.lines]
            assert is_running(orphans[0])
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)


async def test_readiness_follows_the_probe_and_is_lost_with_the_process(tmp_path: Path) -> None:
    answers: list[bool] = []

    async def probe() -> bool:
        answers.append(len(answers) >= 2)
        return answers[-1]

    async with running([part(tmp_path, "a", SLEEPER, probe=probe)]) as (supervisor, journal):
        async with asyncio.timeout(LIMIT_S):
            await supervisor.wait_ready("a")
        assert answers == [False, False, True]
        assert supervisor.views[0].state is PartState.READY
        assert journal.states[0] == (PartState.STARTING,)
        pid = pid_of(supervisor, "a")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: (PartState.WAITING,) in journal.states, "it is waiting")
        async with asyncio.timeout(LIMIT_S):
            await supervisor.wait_ready("a")


async def test_output_is_kept_and_passed_on(tmp_path: Path) -> None:
    code = (
        "import signal, sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr, flush=True)\n"
        "signal.pause()"
    )
    async with running([part(tmp_path, "a", code)]) as (_, journal):
        await until(lambda: len(journal.lines) == 2, "both lines came")
    assert journal.lines == [("a", "to stdout"), ("a", "to stderr")]
    assert (tmp_path / "a.log").read_text() == "to stdout\nto stderr\n"


async def test_the_log_of_the_run_before_is_kept_aside(tmp_path: Path) -> None:
    for word in ("first", "second"):
        async with running([part(tmp_path, "a", f"print('{word}', flush=True); {SLEEPER}")]) as (_, journal):
            await until(lambda journal=journal: ups(journal) == 1, "it is up")
    assert (tmp_path / "a.log").read_text().startswith("second")
    assert (tmp_path / "a.log.1").read_text().startswith("first")


async def test_a_very_long_line_and_a_cut_one_arrive(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('x' * 200_000 + '\\nrest'); sys.stdout.flush(); import os; os._exit(0)"
    policy = RestartPolicy(first_delay_s=60.0)

    async with running([part(tmp_path, "a", code)], policy) as (_, journal):
        await until(lambda: any(text == "rest" for _, text in journal.lines), "the cut line was passed on")
    assert "".join(text for _, text in journal.lines).startswith("x" * 200_000)


class Forgotten(Journal):
    """Its terminal has gone: every report fails."""

    def changed(self, views: Sequence[PartView]) -> None:
        super().changed(views)
        raise OSError(errno.EIO, "Input/output error")

    def died(self, view: PartView, death: Death, restart_delay_s: float) -> None:
        super().died(view, death, restart_delay_s)
        raise OSError(errno.EIO, "Input/output error")

    def line(self, spec: PartSpec, text: str) -> None:
        super().line(spec, text)
        raise OSError(errno.EIO, "Input/output error")


async def test_a_listener_that_fails_ends_no_part(tmp_path: Path) -> None:
    parts = [part(tmp_path, "a", SLEEPER), part(tmp_path, "b", SLEEPER)]
    async with running(parts, journal=Forgotten()) as (supervisor, journal):
        await until(lambda: ups(journal) == ups(journal, "b") == 1, "both are up")
        first, other = pid_of(supervisor, "a"), pid_of(supervisor, "b")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: ups(journal) == 2, "it is up again")
        assert pid_of(supervisor, "b") == other
        assert not supervisor.stopping
    assert journal.deaths == [("a", -signal.SIGKILL, 0.0)]


async def test_a_listener_that_fails_does_not_hold_up_a_part_that_writes_much(tmp_path: Path) -> None:
    code = f"print(('x' * 999 + '\\n') * 1000, flush=True); {SLEEPER}"
    async with running([part(tmp_path, "a", code)], journal=Forgotten()) as (_, journal):
        await until(lambda: ups(journal) == 1, "it has written all")
    assert journal.deaths == []


async def test_a_part_whose_output_is_read_no_more_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    follow, lives = PartOutput.follow, list[int]()

    async def fail_once(self: PartOutput, pipe: asyncio.StreamReader) -> None:
        lives.append(len(lives))
        if len(lives) == 1:
            await pipe.read(1)
            raise MemoryError
        await follow(self, pipe)

    monkeypatch.setattr(PartOutput, "follow", fail_once)
    async with running([part(tmp_path, "a", SLEEPER)]) as (_, journal):
        await until(lambda: ups(journal) == 1, "it was started again")
    assert journal.deaths == [("a", -signal.SIGKILL, 0.0)]
    assert "the output or readiness of a cannot be read" in caplog.text


async def test_a_part_whose_probe_fails_is_started_again(tmp_path: Path) -> None:
    asked: list[int] = []

    async def probe() -> bool:
        asked.append(len(asked))
        if len(asked) == 1:
            raise ValueError("an answer of another form")
        return True

    async with running([part(tmp_path, "a", SLEEPER, probe=probe)]) as (supervisor, journal):
        async with asyncio.timeout(LIMIT_S):
            await supervisor.wait_ready("a")
    assert journal.deaths == [("a", -signal.SIGKILL, 0.0)]


SPARE = """
import signal, sys
if len(sys.argv) > 1:
    print('waits', flush=True)
    sys.stdin.readline()
print('works', flush=True)
signal.pause()
"""


@asynccontextmanager
async def running_with_a_spare(tmp_path: Path) -> AsyncIterator[tuple[Supervisor, Journal]]:
    """Run parts a and b, one of which works; `ups` of the last process decide what the probes say."""
    journal = Journal()

    def has_said(name: str, word: str) -> Callable[[], Awaitable[bool]]:
        async def probe() -> bool:
            said = [text for part, text in journal.lines if part == name]
            return bool(said) and said[-1] == word

        return probe

    parts = [
        dataclasses.replace(
            part(tmp_path, name, SPARE, probe=has_said(name, "works")),
            standby=Standby(("--standby",), has_said(name, "waits")),
        )
        for name in "ab"
    ]
    supervisor = Supervisor(parts, journal, QUICK, num_spares=1)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, journal
    finally:
        supervisor.stop()
        async with asyncio.timeout(LIMIT_S):
            await task


def roles(supervisor: Supervisor) -> dict[str, PartState]:
    return {view.spec.name: view.state for view in supervisor.views}


async def test_a_spare_takes_the_place_of_a_part_that_dies(tmp_path: Path) -> None:
    """It was started before, and the dead one comes back as the spare."""
    async with running_with_a_spare(tmp_path) as (supervisor, journal):
        first = {"a": PartState.READY, "b": PartState.STANDBY}
        await until(lambda: roles(supervisor) == first, "b stands by")
        spare, dead = pid_of(supervisor, "b"), pid_of(supervisor, "a")
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        await until(lambda: roles(supervisor) == {"a": PartState.STANDBY, "b": PartState.READY}, "a stands by")
        assert pid_of(supervisor, "b") == spare
        assert journal.lines == [("a", "works"), ("b", "waits"), ("b", "works"), ("a", "waits")]
        assert [view.is_spare for view in supervisor.views] == [True, False]
    assert set(roles(supervisor).values()) == {PartState.ENDED}


async def test_a_spare_that_dies_is_replaced_and_disturbs_nobody(tmp_path: Path) -> None:
    async with running_with_a_spare(tmp_path) as (supervisor, journal):
        working = None
        for deaths in range(4):  # more than what means that a working part cannot start
            await until(lambda: roles(supervisor)["b"] is PartState.STANDBY, "b stands by")
            working = working or pid_of(supervisor, "a")
            assert len(journal.deaths) == deaths
            spare = pid_of(supervisor, "b")
            assert spare is not None
            os.kill(spare, signal.SIGKILL)
            await until(lambda deaths=deaths: len(journal.deaths) > deaths, "its death is noted")
        assert pid_of(supervisor, "a") == working
        assert [(name, delay) for name, _, delay in journal.deaths] == [("b", 0), ("b", 0.01), ("b", 0.02), ("b", 0.02)]
