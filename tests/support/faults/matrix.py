"""The kill matrix: the target, the fault, and the moment of a request's life; and how a cell of it is run.

A cell runs every feature row over both APIs at once. A process is paused at its fault point while the fault is injected
into it or into another process, so that the fault happens at exactly that moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pagestream_streams.fault_points import FaultPoint
from support.faults.cluster import Fault, FaultCluster, FeatureClient, Member
from support.faults.fault_points import Pause
from support.faults.parts import EnginePart, ExecutorPart, RankPart
from support.faults.setups import Engines
from support.pairwise import pairwise, product
from support.processes.fork_server import ForkedPart
from support.processes.part import StackError
from support.processes.waiting import LIMIT_S, descendants_of

POLL_S = 0.01


class Target(StrEnum):
    """The part into which the fault is injected."""

    ENGINE = "engine"
    GATEWAY = "gateway"
    REDIS = "Redis"
    TWO = "two at once"
    ENGINE_PROCESS = "engine process alone"
    """The worker's child, which steps the engine; the worker lives, and says so."""
    EXECUTOR = "executor alone"
    """The engine's child, which runs the model; engine and worker live, and say so."""
    RANK = "rank alone"
    """One of the engine's children that run the model together."""


class Moment(StrEnum):
    """The moment in a request's life."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    PREFILL = "prefill"
    FIRST_TOKEN = "first token"
    MIDDLE = "middle"
    LAST_TOKEN = "last token"
    FINISH = "finish"


# The passage of the fault point at which a process pauses. A step makes one token of each choice, so the 20th append is
# in the middle of 48 tokens; of the finishes the third, so that some requests have ended and others have not.
PASSAGES: Mapping[Moment, Sequence[tuple[FaultPoint, int]]] = {
    Moment.QUEUED: [(FaultPoint.QUEUED, 1)],
    Moment.CLAIMED: [(FaultPoint.CLAIMED, 1)],
    Moment.PREFILL: [(FaultPoint.PREFILL, 1)],
    Moment.FIRST_TOKEN: [(FaultPoint.FIRST_TOKEN, 1)],
    Moment.MIDDLE: [(FaultPoint.MIDDLE, 20)],
    Moment.LAST_TOKEN: [(FaultPoint.LAST_TOKEN, 3)],
    # Before the append, and after it while its reply is unread.
    Moment.FINISH: [(FaultPoint.FINISH, 2), (FaultPoint.FINISHED, 2)],
}
FACTORS = {
    "target": (Target.ENGINE, Target.GATEWAY, Target.REDIS, Target.TWO),
    "fault": (Fault.KILL, Fault.STOP, Fault.CUT),
    "moment": tuple(Moment),
}


@dataclass(frozen=True)
class Cell:
    """One combination of target, fault and moment."""

    target: Target
    fault: Fault
    moment: Moment
    engines: Engines = Engines.PLAIN

    def __str__(self) -> str:
        cell = f"{self.target}, {self.fault}, {self.moment}"
        return cell if self.engines is Engines.PLAIN else f"{self.engines}: {cell}"

    @property
    def number(self) -> int:
        """The cell's index, which chooses what the cell leaves open: which gateway, which two."""
        return 7 * (3 * list(Target).index(self.target) + list(Fault).index(self.fault)) + list(Moment).index(
            self.moment
        )


ALONE = (Target.ENGINE_PROCESS, Target.EXECUTOR)
_PARTS = {Target.ENGINE_PROCESS: EnginePart, Target.EXECUTOR: ExecutorPart, Target.RANK: RankPart}
_NEEDED = {Target.EXECUTOR: {"process"}, Target.RANK: {"--tensor-parallel-size", "--pipeline-parallel-size"}}
"""Options, one of which an engine has that has such a process; any engine has the others."""
_OTHERS = (
    Cell(Target.REDIS, Fault.FILL, Moment.MIDDLE),
    *(Cell(target, Fault.KILL, Moment.MIDDLE) for target in ALONE),
)
_COVER_OF_RANKS = (
    Cell(Target.RANK, Fault.KILL, Moment.MIDDLE, Engines.RANKS),
    Cell(Target.RANK, Fault.KILL, Moment.PREFILL, Engines.STAGES),
)
_COVER_OF_ENGINES = {
    Moment.MIDDLE: Engines.INT8_AND_DRAFTS,
    Moment.FIRST_TOKEN: Engines.MODELS,
    Moment.FINISH: Engines.INT4,
    Moment.LAST_TOKEN: Engines.FLOAT8,
    Moment.QUEUED: Engines.EXPERTS,
}
"""Whose engine the cover kills at a moment, in place of a plain one."""


@dataclass
class CellResult:
    """The result of a cell."""

    cell: Cell
    victims: list[str] = field(default_factory=list)
    unfinished: int = 0
    """Streams that had not ended when the fault was injected."""
    reconnects: int = 0
    interrupted: int = 0
    """Groups of class 2 that engines interrupted for class 0, in those of their runs that have not ended."""
    swapped_bytes: int = 0
    """Of blocks that came back from host memory, likewise."""
    recovery_s: list[float] = field(default_factory=list)
    """From the injection to the next token, of each stream that had not ended."""
    failures: list[str] = field(default_factory=list)
    took_s: float = 0.0


def all_cells() -> list[Cell]:
    """Return all 189 cells: the combinations, Redis at its memory limit, and the processes of engine and executor
    killed and stopped alone, at each moment; then engines of each other set-up killed, one of two ranks killed and
    stopped alone, and one of two stages killed.
    """
    combinations = [Cell(**case) for case in product(FACTORS)]
    filled = [Cell(Target.REDIS, Fault.FILL, moment) for moment in Moment]
    alone = product({"target": ALONE, "fault": (Fault.KILL, Fault.STOP), "moment": tuple(Moment)})
    return [*combinations, *filled, *(Cell(**case) for case in alone), *_cells_of_other_engines()]


def _cells_of_other_engines() -> Iterator[Cell]:
    for engines in (each for each in Engines if each is not Engines.PLAIN):
        yield from (Cell(Target.ENGINE, Fault.KILL, moment, engines) for moment in Moment)
    # A stage has nobody to be compared with: its group takes it for stopped after 10 s only.
    for fault, engines in ((Fault.KILL, Engines.RANKS), (Fault.STOP, Engines.RANKS), (Fault.KILL, Engines.STAGES)):
        yield from (Cell(Target.RANK, fault, moment, engines) for moment in Moment)


def covering_cells() -> list[Cell]:
    """Return 33 cells in which each pair of target, fault and moment occurs: 28 of the combinations, where the engines
    that are killed are of several set-ups, one with a full Redis, two in which the process of the engine, and that of
    the executor, is killed alone, and two in which a rank is, and a stage.
    """
    return [*(_with_engines(Cell(**case)) for case in pairwise(FACTORS)), *_OTHERS, *_COVER_OF_RANKS]


def _with_engines(cell: Cell) -> Cell:
    """Return the cell with the engines that the cover has in it: what kills them does not know what they compute."""
    if (cell.target, cell.fault) != (Target.ENGINE, Fault.KILL):
        return cell
    return replace(cell, engines=_COVER_OF_ENGINES.get(cell.moment, Engines.PLAIN))


def brief_cells() -> list[Cell]:
    """Return 3 cells: a kill, a stop and a cut, of an engine's process alone, of Redis, and of two at once."""
    return [
        Cell(Target.ENGINE_PROCESS, Fault.KILL, Moment.MIDDLE),
        Cell(Target.REDIS, Fault.STOP, Moment.CLAIMED),
        Cell(Target.TWO, Fault.CUT, Moment.LAST_TOKEN),
    ]


async def run_cell(cluster: FaultCluster, cell: Cell, *, is_brief: bool = False) -> CellResult:
    """Run every row through the cell, over both APIs, or briefly over one of them.

    Differences and errors of streams and processes are failures of the result.
    """
    result, started = CellResult(cell), time.monotonic()
    passages = PASSAGES[cell.moment]
    for passage in [passages[cell.number % len(passages)]] if is_brief else passages:
        try:
            await _run_once(cluster, cluster.clients(cell.number if is_brief else None), cell, passage, result)
        except (AssertionError, StackError, TimeoutError) as error:
            result.failures.append(f"{type(error).__name__}: {error}")
            break
    result.took_s = time.monotonic() - started
    return result


async def _run_once(
    cluster: FaultCluster,
    clients: Sequence[FeatureClient],
    cell: Cell,
    passage: tuple[FaultPoint, int],
    result: CellResult,
) -> None:
    await cluster.wait_ready()
    running: list[asyncio.Task[object]] = []
    paused: list[Pause] = []
    try:
        if cell.moment is Moment.QUEUED:
            paused = await _pause_before_claiming(cluster, cluster.engines)
            running = await _start(clients)
            await _wait_accepted(clients, running)
        else:
            paused = await _pause_before_claiming(cluster, _others(cluster, cell))
            cluster.fault_points.arm(dict([passage]), _armed(cluster, cell))
            running = await _start(clients)
            paused.insert(0, await _first_pause(cluster, running))
        cluster.fault_points.disarm()
        victims = _victims(cluster, cell, paused[0])
        result.victims = [victim.name for victim in victims]
        injected_at = time.monotonic()
        cluster.inject(cell.fault, victims)
        open_streams = [client for client in clients if not client.is_done]
        result.unfinished += len(open_streams)
        _resume(cluster, [*paused, *cluster.fault_points.take_pauses()])
        await cluster.repair(cell.fault, victims)
        await asyncio.gather(*running)
    finally:
        cluster.fault_points.disarm()
        _resume(cluster, [*paused, *cluster.fault_points.take_pauses()])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    await cluster.wait_ready()
    result.reconnects += sum(client.reconnects for client in clients)
    result.recovery_s += [took for client in open_streams if (took := client.recovery_s(injected_at)) is not None]
    interrupted, swapped_bytes = await cluster.count_interrupted_and_swapped()
    result.interrupted += interrupted
    result.swapped_bytes += swapped_bytes
    result.failures += [failure async for failure in _failures(cluster, clients)]


async def _failures(cluster: FaultCluster, clients: Sequence[FeatureClient]) -> AsyncIterator[str]:
    for client in clients:
        reference = await cluster.reference(client)
        for difference in client.transcript.differences(reference):
            yield f"{client.name} {client.request_id}: {difference}"
    quarantined = await cluster.num_quarantined()
    if quarantined:
        yield f"{quarantined} requests are quarantined"


async def _start(clients: Sequence[FeatureClient]) -> list[asyncio.Task[object]]:
    """Start the clients, those of lower classes first: they run when the others come."""
    lower = [client for client in clients if client.row.priority]
    running: list[asyncio.Task[object]] = [asyncio.create_task(client.run(), name=client.name) for client in lower]
    await _wait_accepted(lower, running)
    others = [client for client in clients if not client.row.priority]
    return running + [asyncio.create_task(client.run(), name=client.name) for client in others]


async def _pause_before_claiming(cluster: FaultCluster, engines: Collection[Member]) -> list[Pause]:
    """Pause engines before they claim requests."""
    cluster.fault_points.arm({FaultPoint.QUEUED: 1}, [engine.pid for engine in engines])
    return [await cluster.fault_points.next_pause(LIMIT_S) for _ in engines]


async def _first_pause(cluster: FaultCluster, running: Sequence[asyncio.Task[object]]) -> Pause:
    pausing = asyncio.create_task(cluster.fault_points.next_pause(LIMIT_S))
    try:
        waited: set[asyncio.Task[Any]] = {pausing, *running}
        while not pausing.done():
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return pausing.result()
    finally:
        pausing.cancel()


async def _wait_accepted(clients: Sequence[FeatureClient], running: Sequence[asyncio.Task[object]]) -> None:
    """Wait until every client has its request's id; those of vectors learn it with their answer."""
    clients = [client for client in clients if not client.row.is_embedding]
    async with asyncio.timeout(LIMIT_S):
        while not all(client.request_id for client in clients):
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_S)


def _able(cluster: FaultCluster, cell: Cell) -> list[Member]:
    """Return the engines that have the process that the cell hits."""
    return cluster.engines_with(_NEEDED[cell.target]) if cell.target in _NEEDED else cluster.engines


def _others(cluster: FaultCluster, cell: Cell) -> list[Member]:
    """Return the engines that claim nothing before the fault, so that the one that it hits has enough to do."""
    able = _able(cluster, cell)
    return [engine for engine in cluster.engines if engine not in able]


def _armed(cluster: FaultCluster, cell: Cell) -> list[int] | None:
    """Return the processes that may pause; None: all."""
    if cell.target not in _NEEDED:
        return None
    return [pid for engine in _able(cluster, cell) for pid in (engine.pid, *descendants_of(engine.pid))]


def _victims(cluster: FaultCluster, cell: Cell, pause: Pause) -> list[Member]:
    """Return the paused engine, or by the cell's index one of the gateways or of the pairs."""
    engine = cluster.member_of(pause.pid)
    if engine not in cluster.engines or not isinstance(engine.part, ForkedPart):
        raise StackError(f"process {pause.pid}, which paused, is no engine")
    gateway = cluster.gateways[cell.number % len(cluster.gateways)]
    match cell.target:
        case Target.ENGINE:
            return [engine]
        case Target.ENGINE_PROCESS | Target.EXECUTOR | Target.RANK:
            able = _able(cluster, cell)
            hit = (engine if engine in able else able[0]).part
            if not isinstance(hit, ForkedPart):
                raise StackError(f"{hit.name} is no engine")
            return [Member(_PARTS[cell.target](hit), (), {})]
        case Target.GATEWAY:
            return [gateway]
        case Target.REDIS:
            return [cluster.redis]
        case Target.TWO:
            pairs = ([engine, gateway], [engine, cluster.redis], [gateway, cluster.redis])
            turn = list(Fault).index(cell.fault) + list(Moment).index(cell.moment)
            return pairs[turn % len(pairs)]


def _resume(cluster: FaultCluster, paused: Collection[Pause]) -> None:
    for pause in paused:
        cluster.fault_points.resume(pause.pid)


def table(results: Sequence[CellResult]) -> Iterator[str]:
    """Yield a Markdown table with a row for each cell, and the totals."""
    yield "| cell | hit | open streams | reconnects | interrupted | swapped | recovery max | took | result |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for each in results:
        slowest = f"{max(each.recovery_s):.2f} s" if each.recovery_s else "-"
        outcome = "equal" if not each.failures else f"**{len(each.failures)} failures**"
        yield (
            f"| {each.cell} | {' + '.join(each.victims)} | {each.unfinished} | {each.reconnects} | {each.interrupted} "
            f"| {each.swapped_bytes >> 10} KiB | {slowest} | {each.took_s:.1f} s | {outcome} |"
        )
    failed = sum(bool(each.failures) for each in results)
    took = sum(each.took_s for each in results)
    yield f"\n{len(results)} cells, {failed} failed, {took:.0f} s"
