"""Steps by several processes, each of which has a part of the model: one plan for all, and the last stage's result.

`Stragglers` finds a rank that hangs: the others wait for it.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import NoReturn

import numpy as np

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError, InvariantViolation, MessageError, NodesMissing, RankLost
from pagestream_engine.executor.base import RunnerFactory
from pagestream_engine.executor.nodes.forming import Forming
from pagestream_engine.executor.nodes.remote_rank import RemoteRank
from pagestream_engine.executor.preparations import PreparedByAll
from pagestream_engine.executor.rank_process import Answer, Rank, RankProcess
from pagestream_engine.parallel.rank import Progress
from pagestream_engine.plan import StepPlan, StepResult
from pagestream_engine.wire.executor import PLANS, ExecutorFacts, Failure, Preparation, Prepared

HANG_LIMIT_S = 1.5
"""Of a rank behind the others of its stage, without progress. They do the same work between two exchanges."""
REMOTE_LIMIT_S = 5.0
"""Of one on another machine, whose progress comes with heartbeats, in their time without a byte."""
COLLECTIVE_LIMIT_S = 5.0
"""Of all ranks of a stage within one collective: a slow network, or a machine without processor time for a rank."""
STAGE_LIMIT_S = 10.0
"""Of a stage for which others wait, between two layers: no other does the same work."""
_FIRST_LIMIT_S = 60.0
"""Of the first step, in which a rank may import or compile what it has not used before."""


class Stragglers:
    """Watches a group while a step is waited for.

    A rank hangs if it stays behind the others of its stage, by the collectives that it has begun and ended or by its
    answer to the step, for `limit_s`. Where all are as far as each other and in a collective, none computes: one of
    them hangs in it, the others wait for its data, and the first is named after COLLECTIVE_LIMIT_S or longer. Where all
    compute, that has no limit here in a group of one stage. Of several, the first one that has not answered is named
    where no rank has got on for STAGE_LIMIT_S or longer: later ones wait for it. With drafts it may itself wait for the
    last one.

    Args:
        num_local: ranks of this machine, the first ones; None: all.
    """

    def __init__(self, progress: Progress, stage_size: int, num_local: int | None = None) -> None:
        self._progress = progress
        self._stage_size = stage_size
        self._num_local = num_local
        self.waited_s = 0.0
        """How long the rank that was found has made no progress."""
        self._longest_s: float | None = None
        self._began = 0.0
        self._last: tuple[bool, int, int] | None = None
        """Whether the hindmost rank is behind, the rank, and its count; the sum of all counts where all compute."""
        self._since = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds: as long as the longest step so far took, and as long as the others took in this one, on a machine
        where that is more."""
        if self._longest_s is None:
            return _FIRST_LIMIT_S
        return max(HANG_LIMIT_S, self._longest_s, self._since - self._began)

    def begin(self) -> None:
        """Begin to wait for a step."""
        self._began, self._last = monotonic(), None

    def end(self) -> None:
        """Note that the step has been answered by all ranks."""
        self._longest_s = max(self._longest_s or 0.0, monotonic() - self._began)

    def find(self, waiting: Sequence[int]) -> int | None:
        """Return the rank that hangs, None while none does.

        Args:
            waiting: ranks that have not answered.
        """
        counts = self._progress.counts()
        first = waiting[0] - waiting[0] % self._stage_size
        stage = range(first, first + self._stage_size)
        count, rank = min((counts[rank], rank) for rank in waiting if rank in stage)
        is_behind = any(each not in waiting or counts[each] > count for each in stage)
        # Begins and ends both count: a rank that stopped within a collective is behind no other rank.
        is_in_collective = count % 2 == 1
        is_waited_for = len(counts) > self._stage_size
        is_remote = self._num_local is not None and rank >= self._num_local
        behind_s = REMOTE_LIMIT_S if is_remote else HANG_LIMIT_S
        least_s = behind_s if is_behind else COLLECTIVE_LIMIT_S if is_in_collective else STAGE_LIMIT_S
        if not (is_behind or is_in_collective or is_waited_for):
            self._last = None
        elif (seen := (is_behind, rank, count if is_behind or is_in_collective else sum(counts))) != self._last:
            self._last, self._since = seen, monotonic()
        elif monotonic() - self._since > max(self.limit_s, least_s):
            self.waited_s = monotonic() - self._since
            return rank
        return None


_FAILURE_LIMIT_S = 1.0
"""For the others to fail, too, when a rank has failed: they wait for it if it has failed alone."""
_POLL_S = 0.1
_CLOSE_LIMIT_S = 5.0


class RankGroup:
    """Starts this machine's ranks as processes by `spawn`, waits for those of other machines (`nnodes`) to join, and
    sends each plan to all of them.

    The result of a step is that of the first rank of the last stage, which is rank 0 where there is one stage.

    A step that all ranks fail alike fails alone: none has exchanged more than another. A rank that dies, hangs
    (`Stragglers`), fails alone, or samples other tokens than the first of its stage ends the group: the others are
    killed.

    A program that uses it must guard its entry point by `if __name__ == "__main__"`: each process imports that module.

    Args:
        make_runner: loads a rank's part of the model by `config.rank`; a function of a module.

    Raises:
        RankLost: a process ended while it loaded.
        NodesMissing: ranks of other machines have not joined within `node_join_timeout_s`.
        Exception: what loading raised.
    """

    def __init__(self, make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._size, num_stages = config.parallel.num_ranks, config.parallel.pipeline_parallel_size
        self._folder = Path(tempfile.mkdtemp(prefix="pagestream-ranks-"))
        self._first_sampling = self._size - self._size // num_stages
        """The first rank of the last stage: those of other stages have no tokens."""
        self._progress = Progress(self._folder, self._size, create=True)
        num_local = self._size // config.parallel.nnodes
        self._stragglers = Stragglers(self._progress, self._size // num_stages, num_local)
        self._ranks: list[Rank] = []
        self._in_flight: deque[int] = deque()
        self._prepared = PreparedByAll(self._size)
        self._lost: RankLost | None = None
        try:
            with Forming(config, self._folder) as forming:
                for own in forming.ranks:
                    self._ranks.append(RankProcess(context, make_runner, folder, replace(config, rank=own)))
                self._await_joins(forming)
            self.facts = _agreed(self._load())
            for rank in self._ranks:
                rank.note_loaded()
        except BaseException:
            self._end()
            raise

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def pids(self) -> list[int]:
        """Of the ranks that were started on this machine."""
        processes = [rank.process for rank in self._ranks if isinstance(rank, RankProcess)]
        return [process.pid for process in processes if process.pid is not None]

    def submit(self, plan: StepPlan) -> None:
        self._send(plan, "plan")
        self._in_flight.append(plan.step_id)

    def _send(self, content: object, name: str) -> None:
        self._raise_lost()
        frame = PLANS.encode(content)
        for rank in self._ranks:
            try:
                rank.send(frame)
            except OSError as error:
                self._lose(rank, f"takes no {name}s", error)
            except BaseException:
                # Interrupted: some ranks may have it, or a part of it.
                self._lose_all(f"has not all of a {name}")
                raise

    def collect(self) -> StepResult:
        self._raise_lost()
        try:
            answers = self._gather(self._in_flight[0])
            failures = {rank: each for rank, each in enumerate(answers) if isinstance(each, Failure)}
            if len(failures) == len(answers):
                raise failures[0].error
            for rank, failure in failures.items():
                # The others go on with the next plan, which this one drops.
                self._lose(self._ranks[rank], "failed alone", failure.error)
            return self._checked([each for each in answers if isinstance(each, StepResult)])
        except BaseException:
            self._in_flight.clear()
            raise
        finally:
            if self._in_flight:
                self._in_flight.popleft()

    def prepare(self, wanted: Preparation) -> None:
        self._send(wanted, "preparation")

    def prepared(self, timeout_s: float) -> list[Prepared]:
        """As for any executor: what is prepared is done when all ranks have done it, each for itself."""
        self._raise_lost()
        while self._receive(timeout_s):
            timeout_s = 0.0
        for rank in self._ranks:
            self._prepared.note(rank.rank, rank.prepared)
            rank.prepared.clear()
        return self._prepared.take()

    def check_alive(self) -> None:
        self._raise_lost()
        for rank in self._ranks:
            if rank.end_reason:
                self._lose(rank, "")

    def close(self) -> None:
        """End the processes: they get the end of their pipes, and are killed if that does not end them within 5 s."""
        self._in_flight.clear()
        self._end(_CLOSE_LIMIT_S)

    # -- the start --

    def _await_joins(self, forming: Forming) -> None:
        """Wait for the ranks of other machines, unless one of this machine fails to load."""
        until = monotonic() + forming.limit_s
        while len(self._ranks) < self._size and not any(isinstance(each, Failure) for each in self._answers()):
            if monotonic() > until:
                raise NodesMissing(
                    f"ranks {forming.missing} have not joined within {forming.limit_s:g} s; start pagestream-engine on "
                    "their machines with the same options, and their own node_rank"
                )
            joined = forming.take(_POLL_S)
            if joined is not None:
                self._ranks.append(RemoteRank(joined, partial(self._progress.note, joined.rank)))
            self._receive(0.0)
        self._ranks.sort(key=lambda rank: rank.rank)

    # -- answers --

    def _load(self) -> list[ExecutorFacts]:
        """Wait for the facts of all ranks; one that fails ends the wait."""
        failed_at = None
        while failed_at is None or monotonic() < failed_at + _FAILURE_LIMIT_S:
            if all(rank.answers for rank in self._ranks):
                break
            self._receive(_POLL_S, notice_deaths=failed_at is None)
            if failed_at is None and any(isinstance(each, Failure) for each in self._answers()):
                failed_at = monotonic()
        answers = [rank.answers.popleft() for rank in self._ranks if rank.answers]
        errors = [each.error for each in answers if isinstance(each, Failure)]
        if errors:
            # One that misses another rank fails, too, and says less.
            raise next((error for error in errors if isinstance(error, EngineError)), errors[0])
        return [each for each in answers if isinstance(each, ExecutorFacts)]

    def _gather(self, step_id: int) -> list[Answer]:
        """Wait for the step's answer of each rank; those of steps that an interrupted caller has dropped come first."""
        failed_at = None
        self._stragglers.begin()
        while True:
            for rank in self._ranks:
                _drop_before(rank.answers, step_id)
            waiting = [rank for rank in self._ranks if not rank.answers]
            if not waiting:
                self._stragglers.end()
                return [rank.answers.popleft() for rank in self._ranks]
            now = monotonic()
            failures = [each for each in self._answers() if isinstance(each, Failure)]
            failed_at = now if failures and failed_at is None else failed_at
            if failed_at is not None and now > failed_at + _FAILURE_LIMIT_S:
                self._lose(_failed(self._ranks), "failed alone", failures[0].error)
            hanging = self._stragglers.find([rank.rank for rank in waiting])
            if hanging is not None:
                self._lose(self._ranks[hanging], f"made no progress for {self._stragglers.waited_s:.1f} s")
            self._receive(_POLL_S)

    def _receive(self, timeout_s: float, *, notice_deaths: bool = True) -> bool:
        """Receive a message of each rank that has sent one, or sends one within the time; return whether any has.

        Raises:
            RankLost: a rank has died.
        """
        connections = {rank.connection: rank for rank in self._ranks if not rank.has_ended}
        sentinels = {rank.sentinel: rank for rank in self._ranks if rank.sentinel is not None}
        ready = wait([*connections, *(sentinels if notice_deaths else ())], timeout_s)
        dead = [sentinels[each] for each in ready if isinstance(each, int)]
        for connection, rank in connections.items():
            if connection not in ready:
                continue
            try:
                rank.receive()
            except MessageError as error:
                self._lose(rank, "sends what is no answer", error)
            except (EOFError, OSError) as error:
                rank.has_ended = True
                if notice_deaths:
                    self._lose(rank, "sends nothing", error)
            except BaseException:
                # Interrupted, perhaps in the middle of a message: nothing after it can be read.
                self._lose_all("was interrupted within an answer")
                raise
        for rank in dead:
            if not any(isinstance(each, Failure) for each in rank.answers):
                self._lose(rank, "")
        return any(connection in ready and not rank.has_ended for connection, rank in connections.items())

    def _answers(self) -> list[Answer]:
        return [rank.answers[0] for rank in self._ranks if rank.answers]

    def _checked(self, results: list[StepResult]) -> StepResult:
        """Return the result of the first rank that samples. Each goes on with its own tokens: they must be the same."""
        sampling = self._first_sampling
        first, *others = results[sampling:]
        for rank, other in enumerate(others, sampling + 1):
            if not (np.array_equal(first.token_ids, other.token_ids) and np.array_equal(first.counts, other.counts)):
                self._lose(self._ranks[rank], f"sampled other tokens than rank {sampling}")
        return first

    # -- the end --

    def _lose(self, rank: Rank, how: str, cause: BaseException | None = None) -> NoReturn:
        """End the group because of a rank, and raise RankLost.

        Args:
            how: what it does, for one that is alive; empty for one that has died.
            cause: if an error has shown it.
        """
        if not how or isinstance(cause, (EOFError, ConnectionError)):  # not BlockingIOError, of a pipe that is full
            rank.join(_CLOSE_LIMIT_S)  # its exit code comes just after the end of its pipes
        is_link_lost = any(each.is_cut_off() for each in self._ranks)  # others then fail or hang in their exchanges
        how = rank.end_reason or how or "has died"
        self._lost = RankLost(rank.rank, self._size, how, rank.exit_code, is_link_lost=is_link_lost)
        self._end()
        raise self._lost from cause

    def _lose_all(self, how: str) -> None:
        self._lost = RankLost(0, self._size, how)
        self._end()

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _end(self, limit_s: float | None = None) -> None:
        """End all processes; None: by SIGKILL, all at once."""
        for rank in self._ranks:
            if limit_s is None:
                rank.kill()
        until = monotonic() + (limit_s or 0.0)
        for rank in self._ranks:
            rank.end(max(0.0, until - monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)


def _failed(ranks: Iterable[Rank]) -> Rank:
    return next(rank for rank in ranks if rank.answers and isinstance(rank.answers[0], Failure))


def _drop_before(answers: deque[Answer], step_id: int) -> None:
    while answers:
        answer = answers[0]
        if isinstance(answer, ExecutorFacts) or answer.step_id > step_id:
            raise InvariantViolation(f"a rank answered {answer!r:.80}, expected the answer to plan {step_id}")
        if answer.step_id == step_id:
            return
        answers.popleft()


def _agreed(facts: list[ExecutorFacts]) -> ExecutorFacts:
    """Return rank 0's facts, with the memory of all ranks.

    Raises:
        InvariantViolation: the ranks have loaded different things.
    """
    first = facts[0]
    for each in facts[1:]:
        same = (each.fingerprint, each.num_blocks, each.host_memory and each.host_memory.num_pages)
        if same != (first.fingerprint, first.num_blocks, first.host_memory and first.host_memory.num_pages):
            raise InvariantViolation(f"ranks: given {same}, expected what rank 0 has loaded")
    total = {name: sum(each.memory_bytes[name] for each in facts) for name in first.memory_bytes}
    return replace(first, memory_bytes=total)
